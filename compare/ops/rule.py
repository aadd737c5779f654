"""The rule as one operation of a chain: judged as `diff` judges it, on whatever inputs the chain hands it.

The idea: nothing of the rule's judgement is repeated here. Given tensors become a case, the case a witness,
and `judge` rules; an honest chain runs the rule's emulation with the variants that its yardstick has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...capture.case import Case
from ...kernels.interface import KernelCall, KernelInfo, RunResult
from ...reference.truth import truth
from ..checks import shape
from ..clauses import transforms_of, under
from ..inputs import RULE_TENSORS, Inputs, call_of, inputs_of
from ..judge import judge
from ..session import Runner, unanswered
from ..soundness import soundness_of
from ..trial import Trial
from ..verdict import Ruling
from ..witness import Witness
from ..yardstick import GENERIC, HonestRun, decay_floors, honest_runs
from .op import Tensors


def rule_case(case: Case, tensors: Mapping[str, Tensor], *, raw: bool) -> Case:
    """The rule's own case with other q, k, v, g, beta. raw: q and k still need l2norm."""
    kept = {n: case[n] for n in RULE_TENSORS if case.get(n) is not None}
    options = msgspec.structs.replace(
        case.options, qk="raw" if raw else "normalised", gate_space="log", scale=case.scale
    )
    both = {**kept, **{n: tensors[n] for n in ("q", "k", "v", "g", "beta")}}
    return msgspec.structs.replace(
        case, op="rule", tensors=both, options=options, content_hash=None, path=None
    )


def rule_truth(case: Case, info: KernelInfo, device: Any, *, pure: bool = False) -> Tensors:
    """Float64 output and final state of a rule's case, under the kernel's clauses unless `pure`."""
    inputs = inputs_of(case, device)
    if not pure:
        inputs = under(inputs, transforms_of(info.contract))
    output, state = truth(**inputs.keywords())
    return {"output": output, "final_state": state}


def run_rule(runner: Runner, case: Case) -> tuple[KernelCall, RunResult]:
    """The rule's kernel on a case."""
    call = call_of(case)
    return call, runner.run([call])[0]


def judge_rule(
    info: KernelInfo, case: Case, result: RunResult, *, device: Any, seed: int
) -> tuple[Ruling, Trial | None]:
    """Rule on a kernel's answer to one rule's case."""
    if result.status != "ok":
        return unanswered(result), None
    witness = Witness(case, device=device, seed=seed)
    soundness = soundness_of(witness)
    fault = shape.check(witness.inputs, result.outputs)
    if fault.status == "fires":
        ruling = Ruling(
            verdict="fail", tier=fault.tier, rule=fault.check, reason=fault.reason, worst_tile=fault.place,
            error={"output": None, "state": None}, outcomes=(fault,),
        )  # fmt: skip
        return ruling, None
    trial = Trial(witness, info, result.outputs["output"], result.outputs["final_state"])
    return judge(trial, soundness, []), trial


def honest_rules(info: KernelInfo, inputs: Inputs, *, seed: int) -> list[HonestRun]:
    """The runs of the rule that a sound kernel of this precision may be."""
    capabilities = info.capabilities
    profile = str(capabilities.profile or info.contract.value("precision.profile") or GENERIC)
    return honest_runs(
        under(inputs, transforms_of(info.contract)),
        profile,
        capabilities.default_chunk_size,
        seed,
        l2norm_before=capabilities.l2norm == "before" and inputs.l2norm,
        device=str(info.environment.get("device", inputs.device.type)).split(":")[0],
    )


def rule_floors(inputs: Inputs, output: Any, state: Any) -> dict[str, Tensor]:
    """Relative error per tile that a few float32 scalars alone may cause (`yardstick.decay_floors`)."""
    if inputs.g.ndim == 3:
        return {}
    rows, states = decay_floors(inputs, output, state)
    return {"output": rows, "final_state": states}


def finite_inputs(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a rule can be emulated on these: NaN and +inf go where no honest run goes."""
    g = tensors["g"]
    rest = all(bool(torch.isfinite(tensors[n]).all()) for n in ("q", "k", "v", "beta"))
    return rest and not bool(torch.isnan(g).any()) and not bool((g == torch.inf).any())

"""What a stand-alone script is made of: the calls as they were made, what came back, and how wrong is wrong.

The idea: a script knows nothing of axes. Whatever the deviations changed about the case (neighbours, states,
dtypes, heads) is in its tensors, a schedule is a list of calls, and what is left (a pin, poisoned memory) is
a constant. What cannot be said so is refused in one line, before anything is written.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from ...capture.case import Case, starting_state
from ...capture.errors import BadInput
from ...kernels.interface import KernelInfo
from ..axes.axis import Ran, Setup, Situation
from ..axes.recase import rule_only
from ..shrink.candidate import rule_tensors
from ..shrink.oracle import worst_error
from ..sweep.baseline import baseline_for, read_baseline
from ..sweep.configuration import configuration_of, setup_of
from ..sweep.judging import judged_steps
from ..trial import Trial
from ..witness import Witness

# Options of a call that a script can express.
EXPRESSED = {"chunk_size", "poison", "pins", "l2norm", "tune", "state_dtype"}
# A script's limit lies between the error that was seen and what rounding explains.
SHARE_OF_ERROR = (0.05, 0.5)


class Call(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One input of the script and how it is called."""

    case: Case
    setup: Setup

    @property
    def steps(self) -> list[list[tuple[int, int, int]]] | None:
        """The calls of the schedule; None for a single one."""
        steps = judged_steps(self.setup)
        handed = len(steps) > 1 or self.setup.state_dtype is not None
        return [list(step) for step in steps] if handed else None

    def unchanged_from(self, case: Case) -> bool:
        """Whether the deviations left the case's tensors as they are."""
        return all(
            case.get(name) is not None and torch.equal(x, case[name]) for name, x in self.case.tensors.items()
        )

    def tensors(self, prefix: str, *, keep_flags: bool) -> dict[str, Tensor]:
        """What is stored. keep_flags: the kernel reads has_initial_state; else fresh states are zeros."""
        case = self.case
        found = {n: case[n] for n in ("q", "k", "v", "g", "beta", "cu_seqlens")}
        if case.options.gate_space == "linear":
            found["g"] = found["g"].log()
        if keep_flags and case.get("initial_state") is not None:
            found |= {n: case[n] for n in ("initial_state", "has_initial_state") if case.get(n) is not None}
        else:
            state = starting_state(case)
            if state is not None:
                found["initial_state"] = state
        return {f"{prefix}.{name}": x.detach().cpu().contiguous().clone() for name, x in found.items()}


def call_for(
    case: Case, deviations: dict[str, str], info: KernelInfo, *, baseline: str | None, seed: int
) -> Call:
    """The call of a case under deviations. Raises BadInput for a deviation that no script can express."""
    situation = Situation(case=rule_tensors(case), info=info, seed=seed)
    given = {} if baseline is None else read_baseline(baseline)
    setup = setup_of(configuration_of(deviations, baseline_for(given, situation)[0]), situation)
    words = {name: value for name, value in deviations.items()}
    left = sorted(set(setup.options) - EXPRESSED)
    if setup.slots is not None:
        left.append(f"state={words.get('state', 'of a simulated pool')}")
    if setup.stochastic or words.get("rounding"):
        left.append("rounding")
    if setup.judged == "own":
        left.append(f"packing={words.get('packing')}")
    if left:
        raise BadInput(
            f"{case.label}: {', '.join(left)} cannot be said in a script without gdncheck; "
            "shrink it first, or send the case file with the command of gdncheck replay"
        )
    return Call(case=as_called(setup.case), setup=setup)


def as_called(case: Case) -> Case:
    """The case with its states gathered, so that no pool is needed."""
    return rule_only(case) if case.get("pool") is not None else case


class Seen(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The kernel's answer beside the truth."""

    expected: tuple[Tensor, Tensor]
    """(output, final state) in float64."""
    got: tuple[Tensor, Tensor] | None = None
    error: float = float("inf")
    """Of the worst row, relative to the RMS of the truth."""


def seen(call: Call, info: KernelInfo, ran: Ran | None) -> Seen:
    """Compare an answer with the truth. ran: None where the kernel gave none."""
    witness = Witness(call.case)
    output, state = witness.truth()
    if ran is None or ran.output is None or ran.state is None:
        return Seen(expected=(output, state))
    trial = Trial(witness, info, ran.output, ran.state)
    got = (ran.output.cpu(), ran.state.cpu())
    finite = all(bool(torch.isfinite(x).all()) for x in got)
    return Seen(expected=(output, state), got=got, error=worst_error(trial) if finite else float("inf"))


def limit_for(found: Seen, call: Call, info: KernelInfo, ratio: float | None, allowed: float) -> float:
    """The relative error that tells the fault from rounding.

    ratio: the error over the honest one where tier 3 measured it, allowed: the limit on it.
    Raises BadInput where the error is no larger than rounding's: then only exact bits show it.
    """
    witness = Witness(call.case)
    truth = witness.truth()
    rounded = (truth[0].to(call.case["v"].dtype), truth[1].float())
    rounding = worst_error(Trial(witness, info, *rounded))
    if found.error == float("inf"):
        return max(0.1, 10 * rounding)
    least, most = SHARE_OF_ERROR
    share = most if not ratio else min(most, max(least, (allowed / ratio) ** 0.5))
    limit = share * found.error
    if limit < 2 * rounding:
        # Next to rounding, or an exact case, where none is needed.
        limit = (found.error * rounding) ** 0.5
    if found.error <= limit:
        raise BadInput(
            f"{call.case.label}: the error ({found.error:.3g}) is no larger than rounding's; only gdncheck's "
            "own rules tell it: send the case file with the command of gdncheck replay"
        )
    return limit

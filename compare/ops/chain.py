"""The whole core as a chain: which operation departs first, and which only hands on what it was handed.

The idea: each operation is measured three times. On the truth's input, rounded as the chain stores it: what
it makes. On the input that the chain handed it, against the truth of that very input: what it makes of these
numbers. And its value in the chain against the chain's float64 truth, in units of what an honest chain of the
same precision errs there: what arrives. An error that arrives and is not made was handed on.

Leaves to others: judging one operation (`judge`, `rule`), the walk (`values`), the verdict (`chain_verdict`),
names (`kernels.ops.chains`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ...capture.case import Case
from ...kernels.interface import KernelInfo, RunResult
from ...reference.emulation_ops import OpRounding
from ..inputs import inputs_of
from ..nonfinite import first_place
from ..report_words import where
from ..session import Runner
from ..verdict import ContractDifference, OpFinding, Outcome, Place, Ruling
from .checks import other_class, ratio_outcome
from .inputs import call_of_op, inputs_from
from .layout import tile_map
from .op import OpInputs, Tensors
from .rule import finite_inputs, honest_rules, judge_rule, rule_case, rule_floors, rule_truth, run_rule
from .session import rule_on
from .table import OPS
from .trial import OpTrial, measured, scales
from .values import Walk, given_by, gives, reads, shown, walk

HONEST_CHAINS = 6
BLAMED = ("fail", "suspect")


@dataclass(frozen=True)
class Link:
    """One operation of a chain with its open kernel; runner None: a core that is one call shows it."""

    op: str
    kernel: str
    info: KernelInfo
    runner: Runner | None


@dataclass
class Measurement:
    """What was found out about one operation."""

    own: Ruling
    """On the input that the chain handed it."""
    fed: Ruling | None = None
    """On the truth's input; None where the operation cannot be run alone, or read nothing of the chain's."""
    arrives: Outcome | None = None
    """Its value in the chain against an honest chain."""
    errors: dict[str, float | None] | None = None


class ChainTrial:
    """A chain of kernels on one case: its own walk, the float64 walk, and the honest ones."""

    def __init__(self, case: Case, links: Sequence[Link], *, device: Any, seed: int) -> None:
        self.case, self.links, self.device, self.seed = case, tuple(links), device, seed
        self.ops = tuple(link.op for link in links)
        self.given = given_by(case, device)
        self.by_op = {link.op: link for link in links}
        self.raw = "l2norm" not in self.ops and "post-conv" not in self.ops
        self.found: dict[str, Measurement] = {}
        self.stopped = ""
        """Why the chain ended early."""

    def run(self) -> Walk:
        """The kernels' own walk, each operation judged on what it was handed."""
        return walk(self.ops, self.given, self._run_one)

    def take(self, result: RunResult) -> Walk:
        """The walk of a core that is one call, each shown operation judged on what it was handed."""
        outputs = {name: tensor.to(self.device) for name, tensor in result.outputs.items()}
        found = shown(self.ops, self.given, outputs)
        for link in self.links:
            answer = RunResult(status="ok", outputs=found.gave[link.op], evidence={})
            self.found[link.op] = Measurement(own=self._judge_shown(link, found.read[link.op], answer))
        return found

    def _run_one(self, op: str, inputs: Tensors) -> Tensors | None:
        link = self.by_op[op]
        assert link.runner is not None
        ruling, outputs = self.ask(link, inputs)
        self.found[op] = Measurement(own=ruling)
        if outputs is None:
            self.stopped = f"{op} ({link.kernel}) gave nothing to go on with: {ruling.reason}"
            return None
        return {name: tensor.to(self.device) for name, tensor in outputs.items()}

    def ask(self, link: Link, inputs: Mapping[str, Tensor]) -> tuple[Ruling, Tensors | None]:
        """Run one operation's kernel on given inputs and rule on its answer."""
        assert link.runner is not None
        if link.op == "rule":
            case = rule_case(self.case, _on_cpu(inputs), raw=self.raw)
            _, result = run_rule(link.runner, case)
            ruling, trial = judge_rule(link.info, case, result, device=self.device, seed=self.seed)
            return ruling, None if trial is None else dict(result.outputs)
        # The calls that an operation asks for besides are `--op`'s business: here the case itself counts.
        op, own = OPS[link.op], self.inputs(link.op, inputs)
        call = call_of_op(link.op, own)
        answer = rule_on(op, own, link.info, link.runner.run([call, call]), call, seed=self.seed)
        usable = answer.trial is not None
        return answer.ruling, {n: answer.outputs[n] for n in gives(link.op)} if usable else None

    def _judge_shown(self, link: Link, inputs: Tensors, answer: RunResult) -> Ruling:
        if link.op == "rule":
            case = rule_case(self.case, _on_cpu(inputs), raw=self.raw)
            return judge_rule(link.info, case, answer, device=self.device, seed=self.seed)[0]
        op, own = OPS[link.op], self.inputs(link.op, inputs)
        return rule_on(op, own, link.info, [answer], call_of_op(link.op, own), seed=self.seed).ruling

    def inputs(self, op: str, tensors: Mapping[str, Tensor]) -> OpInputs:
        return inputs_from(op, tensors, self.case, self.device)

    # The float64 walk and the honest ones.

    def true_walk(self, *, pure: bool = False) -> Walk:
        """Float64 throughout, nothing rounded in between; under each kernel's clauses unless `pure`."""
        return walk(self.ops, self.given, lambda op, inputs: self._true_step(op, inputs, pure=pure))

    def _true_step(self, op: str, inputs: Tensors, *, pure: bool) -> Tensors:
        link = self.by_op[op]
        if op == "rule":
            case = rule_case(self.case, inputs, raw=self.raw)
            return rule_truth(case, link.info, self.device, pure=pure)
        own = self.inputs(op, inputs)
        if not pure:
            own = OPS[op].under(own, OPS[op].transforms(link.info.contract, own))
        return OPS[op].truth(own)

    def honest_walks(self, stored: Walk) -> list[Walk]:
        """Chains of emulations, each value rounded to the dtype that the kernels' chain stores it in."""
        return [
            walk(self.ops, self.given, lambda op, inputs, run=run: self._honest_step(op, inputs, run, stored))  # type: ignore[misc]
            for run in range(HONEST_CHAINS)
        ]

    def _honest_step(self, op: str, inputs: Tensors, run: int, stored: Walk) -> Tensors | None:
        link = self.by_op[op]
        if op not in stored.gave:
            return None
        if op == "rule":
            if not finite_inputs(inputs):
                return None
            read = inputs_of(rule_case(self.case, inputs, raw=self.raw), self.device)
            runs = honest_rules(link.info, read, seed=self.seed)
            result = runs[run % len(runs)]()
            outputs = {"output": result.output, "final_state": result.final_state}
        else:
            own = self.inputs(op, inputs)
            trial = OpTrial(OPS[op], own, link.info, stored.gave[op], seed=self.seed)
            ways = trial.runs(trial.under_clauses)
            # Every table and form, plain first: a chain of all of them takes each in turn.
            way = ways[(run * (len(ways) // HONEST_CHAINS or 1)) % len(ways)]
            outputs = OPS[op].emulate(way[0], _jittered(way[1], run))
        return {name: outputs[name].to(stored.gave[op][name].dtype) for name in gives(op)}


def _jittered(at: OpRounding, run: int) -> OpRounding:
    """Another seed for each chain, and none for the first."""
    return replace(at, seed=None if run == 0 else (at.seed or 0) + 7919 * run)


def _on_cpu(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def examine(trial: ChainTrial, own: Walk) -> tuple[list[OpFinding], dict[str, float | None]]:
    """Measure every operation that ran; returns findings in order and the errors at the chain's end."""
    true = trial.true_walk()
    honest = trial.honest_walks(own)
    departed: set[str] = set()
    findings = []
    errors: dict[str, float | None] = {}
    for link in trial.links:
        if link.op not in trial.found:
            break
        m = trial.found[link.op]
        if link.op in own.gave:
            m.errors, m.arrives = _arrival(trial, link.op, own, true, honest)
            errors |= {RESULTS.get(n, n): e for n, e in m.errors.items()}
            if link.runner is not None and _worth_feeding(trial, link.op, m, departed):
                m.fed = trial.ask(link, _rounded_like(true.read[link.op], own.read[link.op]))[0]
        findings.append(_finding(link, m, departed, trial))
    return findings, errors


def _worth_feeding(trial: ChainTrial, op: str, m: Measurement, departed: set[str]) -> bool:
    """Whether an operation's answer to the truth's input can tell more than its own one.

    The rule costs as much as all the rest: it is not asked again where it was right on sound values.
    """
    if not _reads_the_chain(trial, op):
        return False
    return op != "rule" or m.own.verdict != "pass" or bool(departed & set(reads(op)))


RESULTS = {"normed": "output", "final_state": "state", "final_conv_state": "conv_state"}


def _reads_the_chain(trial: ChainTrial, op: str) -> bool:
    """Whether an operation takes anything that an earlier one gave; else its own input is the truth's."""
    earlier = trial.ops[: trial.ops.index(op)]
    given = {name for other in earlier for name in gives(other)} | {"core_output"}
    return bool(given & set(reads(op)))


def _rounded_like(true: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Tensors:
    """The truth's values in the dtypes that the chain stores."""
    return {name: true[name].to(own[name].dtype) for name in own if name in true}


def _arrival(
    trial: ChainTrial, op: str, own: Walk, true: Walk, honest: Sequence[Walk]
) -> tuple[dict[str, float | None], Outcome]:
    """An operation's value in the chain against the float64 chain, by what an honest chain errs."""
    truth, stored = true.gave[op], own.gave[op]
    inputs = trial.inputs(op, true.read[op]) if op != "rule" else _rule_inputs(trial, true.read[op])
    table = {name: measured(name, stored[name], truth[name], inputs) for name in gives(op)}
    errors: dict[str, float | None] = {name: m.relative for name, m in table.items()}
    for name, m in table.items():
        wrong = m.masks.n_unexplained
        if wrong:
            place = first_place(m.masks, m.tiles)
            assert place is not None
            return errors, Outcome(
                check="arrives", tier=1, status="fires", place=place,
                reason=f"{name} is not finite at {where(place)}, where the truth is",
            )  # fmt: skip
        if bool(other_class(m).any()):
            row, head = other_class(m).nonzero()[0].tolist()
            place = Place(tensor=name, class_="wrong", head=head, token=row)
            return errors, Outcome(
                check="arrives", tier=1, status="fires", place=place,
                reason=f"{name} is finite at row {row}, head {head}, where the truth is not",
            )  # fmt: skip
    runs = [w.gave[op] for w in honest if op in w.gave]
    if not runs:
        return errors, Outcome(check="arrives", tier=3, status="not-applicable")
    floors = {}
    if op == "rule":
        read = inputs_of(rule_case(trial.case, true.read[op], raw=trial.raw), trial.device)
        floors = rule_floors(read, tile_map("output", inputs), tile_map("final_state", inputs))
    scale = scales(truth, runs, stored, inputs, floors)
    return errors, ratio_outcome(table, scale, inputs.heads)


def _rule_inputs(trial: ChainTrial, tensors: Mapping[str, Tensor]) -> OpInputs:
    cu = trial.case["cu_seqlens"].long().to(trial.device)
    k, v = tensors["k"], tensors["v"]
    heads = (k.shape[1], k.shape[2], v.shape[1], v.shape[2])
    return OpInputs(dict(tensors), None, cu, heads)


def _finding(link: Link, m: Measurement, departed: set[str], trial: ChainTrial) -> OpFinding:
    """Made, handed on, or sound; departed: the values that depart so far, of which this one's are added."""
    blamed = next((r for r in (m.fed, m.own) if r is not None and r.verdict in BLAMED), None)
    reads_bad = bool(departed & set(reads(link.op)))
    arrives = m.arrives is not None and m.arrives.status == "fires"
    made = blamed is not None
    if not made and not arrives and m.own.verdict not in ("pass", "out-of-contract", "skipped"):
        made = True  # it gave no answer at all
    handed_on = arrives and not made
    if arrives or made:
        departed |= {"core_output" if n == "output" else n for n in gives(link.op)}
    ruling = blamed or m.fed or m.own
    place = ruling.first_nonfinite or ruling.worst_tile
    reason = ruling.reason
    if handed_on:
        assert m.arrives is not None
        place, reason = m.arrives.place, f"in the chain {m.arrives.reason}"
        if not reads_bad:
            reason += "; it errs by no more than its precision explains, and so does what it read"
    return OpFinding(
        op=link.op,
        kernel=link.kernel,
        verdict=ruling.verdict,
        made=made,
        handed_on=handed_on or (made and arrives and reads_bad),
        ratio_fed=None if m.fed is None else m.fed.ratio,
        ratio_own=m.own.ratio,
        ratio_chain=_largest_ratio(m.arrives),
        place=place if made or handed_on else None,
        reason=reason,
        error=m.errors or {},
        contract_differences=differences(m),
    )


def differences(m: Measurement) -> tuple[ContractDifference, ...]:
    """Named on the chain's own input, and on the truth's where only that shows them."""
    found = {d.clause: d for d in (m.fed.contract_differences if m.fed is not None else ())}
    found |= {d.clause: d for d in m.own.contract_differences}
    return tuple(found.values())


def _largest_ratio(outcome: Outcome | None) -> float | None:
    if outcome is None:
        return None
    return max((float(v) for k, v in outcome.numbers.items() if k.endswith("_rms_ratio")), default=None)

"""Run a history: bookkeeper, ledger, kernel and truth, step by step, until something is wrong.

The idea: every step asks three things in turn. Does the plan break a rule of the ledger? Did the call leave
what nobody was to write alone? Is what it computed the sequence's own truth? The first step that answers
wrongly ends the run, with all that is known of it: the ledger's line first, for it names the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...kernels.interface import KernelCall, RunResult
from ..threads import one_thread
from ..verdict import Outcome
from .bookkeeping import Plan, Request
from .books import Books
from .explain import whose_state
from .judging import Expected, expect, in_life, judge_conv, judge_rule
from .ledger import Breach
from .legal import Scene
from .lives import Lives, Version
from .machine import Answer, Asked, Group, Machine, Pools, Role
from .plans import check_plan, request_of, right_of, tokens_of
from .steps import Arrive, Call, Finish, History, Preempt, Prefill, Resume, Verify
from .tokens import Drawn, Place, TokenSource


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong, at which step."""

    step: int
    rule: str
    """`read`, `position`, `content`, `unowned`, `owner`, `plan` of the ledger; a check's name; or `error`."""
    line: str
    """The ledger's line; where no rule of it is broken, what it knows of the rows that are wrong."""
    found: tuple[str, ...] = ()
    """What the checks say of the numbers, and further breaches."""
    sequence: int | None = None
    slot: int | None = None
    status: str = "fail"
    """`fail`, or the kernel's own: error, crash, timeout, refused."""


class Told(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What came of a history."""

    steps: int
    """Steps that were run."""
    calls: int = 0
    rows: int = 0
    tokens: int = 0
    failure: Failure | None = None
    worst_ratio: float = 0.0
    """Largest error in units of the honest one, over all calls."""
    padded: int = 0
    """Padded rows that were run."""
    notes: tuple[str, ...] = ()
    outputs: dict[tuple[int, int], Tensor] = {}
    """(sequence, position) -> [HV, V], of a run that is not judged."""
    states: dict[int, Tensor] = {}
    """Last state of each sequence [HV, K, V], likewise."""


Stepping = Generator[Asked, RunResult, Failure | None]
Answers = Callable[[str, KernelCall], RunResult]
"""Runs a call by the kernel of a role."""
Judged = tuple[Group, Answer, Expected | None]


class _Raised(Exception):
    """The bookkeeper raised."""


class Run:
    """One run of one history."""

    def __init__(
        self,
        history: History,
        machine: Machine,
        make_bookkeeper: Callable[[int, int], Any],
        tokens: TokenSource,
        *,
        state_dtype: torch.dtype = torch.float32,
        judged: bool = True,
        most_runs: int | None = None,
    ) -> None:
        """make_bookkeeper: called with (slots, draft). judged: if not, outputs are kept instead."""
        self.history, self.machine, self.tokens = history, machine, tokens
        self.bookkeeper = make_bookkeeper(history.slots, history.draft)
        self.scene = Scene(history.slots, history.draft)
        self.pools = Pools(history.slots, tokens.sizes, state_dtype)
        self.state_dtype, self.judged, self.most_runs = state_dtype, judged, most_runs
        self.lives = Lives(tokens.sizes)
        self.books = Books(self.pools)
        self.calls = self.rows = self.n_tokens = self.padded = 0
        self.worst = 0.0
        self.notes: dict[str, None] = {}
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.states: dict[int, Tensor] = {}

    def talk(self) -> Generator[Asked, RunResult, Told]:
        """Run all steps, or up to the first that is wrong: asks for kernel calls, is sent their results."""
        failure, number = None, 0
        for number, wish in enumerate(self.history.steps, start=1):
            step = self.scene.admit(wish)
            if step is None:
                continue
            try:
                if isinstance(step, Call):
                    failure = yield from self._call(number, step)
                else:
                    self._event(number, step)
            except _Raised as error:
                line = f"step {number}: the bookkeeper raised {error}"
                failure = Failure(step=number, rule="plan", line=line, status="error")
            if failure is not None:
                break
        return Told(
            steps=number, calls=self.calls, rows=self.rows, tokens=self.n_tokens, failure=failure,
            worst_ratio=self.worst, padded=self.padded, notes=tuple(self.notes), outputs=self.outputs,
            states=self.states,
        )  # fmt: skip

    def _ask(self, method: str, *arguments: object) -> Any:
        """Call the bookkeeper, which is somebody else's code."""
        try:
            return getattr(self.bookkeeper, method)(*arguments)
        except Exception as error:
            text = " ".join(str(error).split())
            raise _Raised(f"{type(error).__name__} in {method}: {text}") from error

    def _event(self, number: int, step: Arrive | Preempt | Resume | Finish) -> None:
        lives = self.lives
        if isinstance(step, Arrive):
            for arrived in step.sequences:
                lives.arrive(arrived, self.tokens.start(arrived))
                self._ask("arrive", arrived)
            return
        sequence = step.sequence
        if isinstance(step, Preempt):
            if step.state == "dropped":
                kept = lives.sequences[sequence].checkpoint
                self.books.end(number, sequence, "was preempted", None if kept is None else kept.position)
            self._ask("preempt", sequence, step.state)
        elif isinstance(step, Resume):
            if step.source == "zero":
                self.books.end(number, sequence, "started again from zero")
            lives.resume(sequence, step.source, self.tokens.start(sequence))
            self._ask("resume", sequence, step.source)
        else:
            self.books.end(number, sequence, "finished")
            del lives.sequences[sequence]
            self._ask("finish", sequence)

    def _call(self, number: int, step: Call) -> Stepping:
        request = Request(
            rows=tuple(request_of(row) for row in step.rows), padded=step.padded, padding=step.padding
        )
        plan = self._ask("plan", request)
        wrong = check_plan(plan, request, self.history.slots)
        if wrong:
            return Failure(step=number, rule="plan", line=f"step {number}: {wrong}")
        before = {row.sequence: self.lives.sequences[row.sequence].now for row in step.rows}
        seen = {sequence: version.position for sequence, version in before.items()}
        starts = self._given(seen)
        plan = _with_states(plan, starts)
        self.books.prepare(number, plan, starts)
        breaches = self.books.check_reads(number, step, plan, seen)
        pool = self.pools.state.clone()
        judged: list[Judged] = []
        for group in self._groups(step, plan):
            answer = yield from self.machine.run(group, self.pools)
            if answer.status == "refused" and group.padded:
                self.notes[f"padded rows are left out: {answer.message}"] = None
                group = msgspec.structs.replace(group, padded=())
                answer = yield from self.machine.run(group, self.pools)
            if answer.status != "ok":
                line = f"step {number}: {answer.message}"
                return Failure(step=number, rule="error", line=line, status=answer.status)
            judged.append((group, answer, self._expect(group, before, answer)))
        self._advance(step, judged, before)
        breaches += self.books.check_writes(number, plan, self.lives.needed())
        outcomes = [o for entry in judged for o in self._judge(*entry, before)]
        failure = self._failure(number, plan, breaches, outcomes, judged, pool)
        self.books.note(number, step, plan, seen)
        self.calls += 1
        self.rows += len(step.rows)
        self.n_tokens += sum(n for group, _, _ in judged for n in group.lengths)
        self.padded += sum(len(group.padded) for group, _, _ in judged)
        for row in step.rows:
            if isinstance(row, Verify) and failure is None:
                self._ask("accept", row.sequence, row.accepted)
        return failure

    def _given(self, seen: dict[int, int]) -> dict[int, Tensor]:
        """The states of sequences whose first call this is, where they were given one."""
        states = {s: self.tokens.start(s) for s, position in seen.items() if position == 0}
        return {s: state for s, state in states.items() if state is not None}

    def _groups(self, step: Call, plan: Plan) -> list[Group]:
        """The rows as vLLM's layer splits them; padded rows behind the last group."""
        verifies = [i for i, row in enumerate(step.rows) if isinstance(row, Verify)]
        others = [i for i in range(len(step.rows)) if i not in verifies]
        role: Role = "prefill" if any(isinstance(step.rows[i], Prefill) for i in others) else "decode"
        parts: list[tuple[Role, list[int]]] = [(role, others), ("verify", verifies)]
        groups = [self._group(role, numbers, step, plan) for role, numbers in parts if numbers]
        return [*groups[:-1], msgspec.structs.replace(groups[-1], padded=plan.padded)]

    def _group(self, role: Role, numbers: list[int], step: Call, plan: Plan) -> Group:
        rows = tuple(plan.rows[i] for i in numbers)
        places: list[Place] = []
        lengths = []
        for i, row in zip(numbers, rows, strict=True):
            n, right = tokens_of(step.rows[i]), right_of(step.rows[i])
            places += [(row.sequence, row.start + t, t >= right) for t in range(n)]
            lengths.append(n)
        return Group(role=role, rows=rows, lengths=tuple(lengths), tensors=self._tensors(places))

    def _tensors(self, places: list[Place]) -> dict[str, Tensor]:
        conv = {"conv_input": self.tokens.conv(places), "conv_weight": self.tokens.weight}
        return self.tokens.rule(places) | conv

    def _expect(self, group: Group, before: dict[int, Version], answer: Answer) -> Expected | None:
        if not self.judged:
            return None
        versions = [before[row.sequence] for row in group.rows]
        return expect(
            self._as_due(group, versions), versions, self.machine.info(group.role), self.state_dtype,
            rounded_between=answer.rounded_between, most_runs=self.most_runs,
        )  # fmt: skip

    def _as_due(self, group: Group, versions: list[Version]) -> Group:
        """The group with the tokens that its sequences were due, which a faulty plan does not feed."""
        if all(row.start == v.position for row, v in zip(group.rows, versions, strict=True)):
            return group
        places: list[Place] = []
        for row, version, n in zip(group.rows, versions, group.lengths, strict=True):
            places += [(row.sequence, version.position + t, False) for t in range(n)]
        return msgspec.structs.replace(group, tensors=self._tensors(places))

    def _advance(self, step: Call, judged: list[Judged], before: dict[int, Version]) -> None:
        """Move every sequence's own truth on, to the last token that was right."""
        after: dict[int, tuple[Version, ...]] = {}
        for group, answer, expected in judged:
            if expected is not None:
                after |= {row.sequence: v for row, v in zip(group.rows, expected.versions, strict=True)}
            else:
                self._keep(step, group, answer)
        for row in step.rows:
            life = self.lives.sequences[row.sequence]
            if getattr(row, "keep", False):
                life.checkpoint = life.now
            if row.sequence in after:
                life.now = after[row.sequence][row.accepted if isinstance(row, Verify) else 0]
            else:
                old = before[row.sequence]
                life.now = Version(old.position + right_of(row), old.truth, (), old.conv)

    def _keep(self, step: Call, group: Group, answer: Answer) -> None:
        """Keep what an unjudged call gave for tokens that were right."""
        assert answer.output is not None
        asked = {row.sequence: row for row in step.rows}
        at = 0
        for row, n in zip(group.rows, group.lengths, strict=True):
            right = right_of(asked[row.sequence])
            for t in range(right):
                self.outputs[row.sequence, row.start + t] = answer.output[at + t]
            slot = row.writes[right - 1 if len(row.writes) > 1 else 0]
            self.states[row.sequence] = self.pools.state[slot].clone()
            at += n

    def _judge(
        self, group: Group, answer: Answer, expected: Expected | None, before: dict[int, Version]
    ) -> list[Outcome]:
        if expected is None:
            return []
        assert answer.output is not None
        slots = [slot for row in group.rows for slot in row.writes]
        info = self.machine.info(group.role)
        outcomes = judge_rule(expected, info, answer.output, self.pools.state[slots])
        for outcome in outcomes:
            for name in ("output_rms_ratio", "state_rms_ratio"):
                self.worst = max(self.worst, float(outcome.numbers.get(name, 0.0)))
        versions = [before[row.sequence] for row in group.rows]
        windows = [self.pools.conv[slot] for row in group.rows for slot in row.conv_writes]
        conv = judge_conv(
            self._as_due(group, versions), versions, expected, self.machine.conv_info(group.role),
            answer.conv_output, windows,
        )  # fmt: skip
        return [*(in_life(o, group) for o in outcomes), conv]

    def _failure(
        self,
        number: int,
        plan: Plan,
        breaches: list[Breach],
        outcomes: list[Outcome],
        judged: list[Judged],
        pool: Tensor,
    ) -> Failure | None:
        """The ledger's breach first; else the check that fires, and what the ledger knows. pool: before."""
        firing = [o for o in outcomes if o.status == "fires"]
        if not breaches and not firing:
            return None
        found = tuple(o.reason for o in firing)
        if breaches:
            first, *others = breaches
            return Failure(
                step=number, rule=first.rule, line=first.line, sequence=first.sequence, slot=first.slot,
                found=(*found, *(b.line for b in others)),
            )  # fmt: skip
        place = firing[0].place
        sequence = None if place is None else place.sequence
        rows = [r for r in plan.rows if sequence is None or r.sequence == sequence]
        known = "; ".join(self.books.row_words(r) for r in rows)
        line = f"step {number}: {firing[0].reason}; by the ledger the slots were right: {known}"
        guess = whose_state(judged, rows[0], pool, self.pools.state, self.books) if len(rows) == 1 else ""
        slot = rows[0].read if rows else None
        return Failure(
            step=number, rule=firing[0].check, line=f"{line}{guess}", found=found[1:], sequence=sequence,
            slot=slot,
        )  # fmt: skip


def _with_states(plan: Plan, starts: dict[int, Tensor]) -> Plan:
    """Sequences that were given a state (a captured case's) find it in the slot that they read first."""
    if not starts:
        return plan
    rows = (msgspec.structs.replace(r, fresh=r.fresh and r.sequence not in starts) for r in plan.rows)
    return msgspec.structs.replace(plan, rows=tuple(rows))


def run_history(
    history: History,
    machine: Machine,
    make_bookkeeper: Callable[[int, int], Any],
    tokens: TokenSource | None = None,
    answers: Answers | None = None,
    **options: Any,
) -> Told:
    """Run a history once.

    answers: runs kernel calls; None for the reference, which asks for none. options: as Run takes them.
    """
    if tokens is None:
        tokens = Drawn(history.seed, machine.sizes)
    talk = Run(history, machine, make_bookkeeper, tokens, **options).talk()
    with one_thread():
        try:
            asked = next(talk)
            while True:
                assert answers is not None, "a machine that asks for calls needs somebody to run them"
                asked = talk.send(answers(*asked))
        except StopIteration as end:
            told: Told = end.value
            return told

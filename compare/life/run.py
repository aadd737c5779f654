"""Run a history: bookkeeper, ledger, kernel and truth, step by step, until something is wrong.

The idea: every step asks three things in turn. Does the plan break a rule of the ledger? Did the call leave
what nobody was to write alone? Is what it computed the sequence's own truth? The first step that answers
wrongly ends the run, with all that is known of it: the ledger's line first, for it names the cause.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..verdict import Outcome
from .bookkeeping import Plan, Request, RowPlan, RowRequest
from .judging import Expected, expect, judge_conv, judge_rule
from .ledger import Breach, Ledger
from .legal import Scene
from .lives import Lives, Version
from .machine import Answer, Group, Machine, Pools, Role
from .steps import Arrive, Call, Decode, Finish, History, Prefill, Preempt, Resume, Row, Step, Verify
from .tokens import Drawn, Place, TokenSource


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong, at which step."""

    step: int
    rule: str
    """`read`, `position`, `content`, `unowned`, `owner`, `plan` (of the ledger), a check's name, or `error`."""
    line: str
    """The ledger's line; where no rule of it is broken, what the ledger knows of the rows that are wrong."""
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
    notes: tuple[str, ...] = ()
    outputs: dict[tuple[int, int], Tensor] = {}
    """(sequence, position) -> [HV, V], where they were asked for."""
    states: dict[int, Tensor] = {}
    """Last state of each sequence [HV, K, V], where outputs were asked for."""


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
        """make_bookkeeper: called with (slots, draft). judged: False keeps outputs instead of judging them."""
        self.history, self.machine, self.tokens = history, machine, tokens
        self.bookkeeper = make_bookkeeper(history.slots, history.draft)
        self.scene = Scene(history.slots, history.draft)
        self.pools = Pools(history.slots, tokens.sizes, state_dtype)
        self.state_dtype, self.judged, self.most_runs = state_dtype, judged, most_runs
        self.lives = Lives(tokens.sizes)
        self.ledger = Ledger("state", self.pools.state)
        self.conv_ledger = Ledger("conv", self.pools.conv)
        self.calls = self.rows = self.n_tokens = 0
        self.worst = 0.0
        self.notes: dict[str, None] = {}
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.states: dict[int, Tensor] = {}

    def __call__(self) -> Told:
        """Run all steps, or up to the first that is wrong."""
        failure, number = None, 0
        for number, wish in enumerate(self.history.steps, start=1):
            step = self.scene.admit(wish)
            if step is not None:
                failure = self._step(number, step)
            if failure is not None:
                break
        return Told(
            steps=number, calls=self.calls, rows=self.rows, tokens=self.n_tokens, failure=failure,
            worst_ratio=self.worst, notes=tuple(self.notes), outputs=self.outputs, states=self.states,
        )  # fmt: skip

    def _step(self, number: int, step: Step) -> Failure | None:
        try:
            if isinstance(step, Call):
                return self._call(number, step)
            self._event(number, step)
        except Exception as error:
            if type(error).__module__.startswith("gdncheck"):
                raise
            if not _raised_by(error, type(self.bookkeeper).__module__):
                raise
            line = f"step {number}: the bookkeeper raised {type(error).__name__}: {error}"
            return Failure(step=number, rule="plan", line=line, status="error")
        return None

    def _event(self, number: int, step: Arrive | Preempt | Resume | Finish) -> None:
        lives = self.lives
        if isinstance(step, Arrive):
            for arrived in step.sequences:
                lives.arrive(arrived, self.tokens.start(arrived))
                self.bookkeeper.arrive(arrived)
            return
        sequence = step.sequence
        if isinstance(step, Preempt):
            if step.state == "dropped":
                kept = lives.sequences[sequence].checkpoint
                self._end(number, sequence, "was preempted", None if kept is None else kept.position)
            self.bookkeeper.preempt(sequence, step.state)
        elif isinstance(step, Resume):
            if step.source == "zero":
                self._end(number, sequence, "started again from zero")
            lives.resume(sequence, step.source, self.tokens.start(sequence))
            self.bookkeeper.resume(sequence, step.source)
        else:
            self._end(number, sequence, "finished")
            del lives.sequences[sequence]
            self.bookkeeper.finish(sequence)

    def _end(self, number: int, sequence: int, why: str, kept: int | None = None) -> None:
        for ledger in (self.ledger, self.conv_ledger):
            ledger.end(number, sequence, why, kept)

    def _call(self, number: int, step: Call) -> Failure | None:
        request = Request(
            rows=tuple(_request(row) for row in step.rows), padded=step.padded, padding=step.padding
        )
        plan = self.bookkeeper.plan(request)
        wrong = check_plan(plan, request, self.history.slots)
        if wrong:
            return Failure(step=number, rule="plan", line=f"step {number}: {wrong}")
        before = {row.sequence: self.lives.sequences[row.sequence].now for row in step.rows}
        self._prepare(number, plan)
        breaches = self._check_reads(number, step, plan, before)
        groups = self._groups(step, plan)
        answers: list[tuple[Group, Answer, Expected | None]] = []
        for group in groups:
            answer = self.machine.run(group, self.pools)
            if answer.status == "refused" and group.padded:
                self.notes[f"padded rows are left out: {answer.message}"] = None
                group = msgspec.structs.replace(group, padded=())
                answer = self.machine.run(group, self.pools)
            if answer.status != "ok":
                line = f"step {number}: {answer.message}"
                return Failure(step=number, rule="error", line=line, status=answer.status)
            self.notes |= dict.fromkeys(answer.notes)
            versions = [before[row.sequence] for row in group.rows]
            expected = self._expect(group, versions, answer)
            answers.append((group, answer, expected))
        self._advance(step, answers, before)
        breaches += self._check_writes(number, step, plan)
        outcomes = [o for entry in answers for o in self._judge(*entry, before)]
        self._note_writes(number, step, plan, before)
        self.calls += 1
        self.rows += len(step.rows)
        self.n_tokens += sum(n for group in groups for n in group.lengths)
        for row in step.rows:
            if isinstance(row, Verify):
                self.bookkeeper.accept(row.sequence, row.accepted)
        return self._failure(number, plan, breaches, outcomes)

    def _prepare(self, number: int, plan: Plan) -> None:
        """Clears, copies, and the states that sequences were given."""
        pairs = ((self.ledger, self.pools.state), (self.conv_ledger, self.pools.conv))
        for ledger, pool in pairs:
            for slot in plan.clears:
                pool[slot] = 0
                ledger.clear(number, slot, pool[slot])
            for source, target in plan.copies:
                pool[target] = pool[source]
                ledger.copy(number, source, target, pool[target])
        for row in plan.rows:
            start = self.tokens.start(row.sequence)
            if start is not None and self.lives.sequences[row.sequence].now.position == 0:
                self.pools.state[row.read] = start.to(self.state_dtype)
                self.pools.conv[row.conv_read] = 0
                self.ledger.load(number, row.read, row.sequence, self.pools.state[row.read])
                self.conv_ledger.load(number, row.conv_read, row.sequence, self.pools.conv[row.conv_read])

    def _check_reads(
        self, number: int, step: Call, plan: Plan, before: dict[int, Version]
    ) -> list[Breach]:
        found: list[Breach | None] = []
        for row, asked in zip(plan.rows, step.rows, strict=True):
            start = before[row.sequence].position
            who = who_is(asked, start)
            if row.start != start:
                held = self.ledger.entries[row.read]
                line = (
                    f"step {number}: {who} was fed from token {row.start} on, but it has seen {start} "
                    f"token(s) (it read slot {row.read}, {held.words})"
                )
                found.append(
                    Breach(rule="position", step=number, line=line, sequence=row.sequence, slot=row.read)
                )
            if row.fresh and (start > 0 or self.tokens.start(row.sequence) is not None):
                line = f"step {number}: {who} started from zero, but it has seen {start} token(s)"
                found.append(
                    Breach(rule="position", step=number, line=line, sequence=row.sequence, slot=row.read)
                )
            if row.fresh:
                continue
            rows = ((self.ledger, row.read, self.pools.state), (self.conv_ledger, row.conv_read, self.pools.conv))
            for ledger, slot, pool in rows:
                if ledger is self.ledger or self.machine.has_conv:
                    found.append(ledger.check_read(number, slot, row.sequence, start, who, pool[slot]))
        return [b for b in found if b is not None]

    def _groups(self, step: Call, plan: Plan) -> list[Group]:
        """The rows as vLLM's layer splits them; padded rows behind the last group."""
        verifies = [i for i, row in enumerate(step.rows) if isinstance(row, Verify)]
        others = [i for i in range(len(step.rows)) if i not in verifies]
        mixed = any(isinstance(step.rows[i], Prefill) for i in others)
        parts: list[tuple[Role, list[int]]] = [("prefill" if mixed else "decode", others), ("verify", verifies)]
        groups = [self._group(role, numbers, step, plan) for role, numbers in parts if numbers]
        return [*groups[:-1], msgspec.structs.replace(groups[-1], padded=plan.padded)]

    def _group(self, role: Role, numbers: list[int], step: Call, plan: Plan) -> Group:
        rows = tuple(plan.rows[i] for i in numbers)
        places: list[Place] = []
        lengths = []
        for i, row in zip(numbers, rows, strict=True):
            asked = step.rows[i]
            n, right = _tokens(asked), _right(asked)
            places += [(row.sequence, row.start + t, t >= right) for t in range(n)]
            lengths.append(n)
        tensors = self.tokens.rule(places) | {
            "conv_input": self.tokens.conv(places), "conv_weight": self.tokens.weight,
        }  # fmt: skip
        return Group(role=role, rows=rows, lengths=tuple(lengths), tensors=tensors)

    def _expect(self, group: Group, versions: list[Version], answer: Answer) -> Expected | None:
        if not self.judged:
            return None
        # A bookkeeper that feeds the wrong tokens is judged against the right ones.
        right = self._as_due(group, versions)
        return expect(
            right, versions, self.machine.info(group.role), self.state_dtype,
            rounded_between=answer.rounded_between, most_runs=self.most_runs,
        )  # fmt: skip

    def _as_due(self, group: Group, versions: list[Version]) -> Group:
        """The group with the tokens that its sequences were due."""
        if all(row.start == v.position for row, v in zip(group.rows, versions, strict=True)):
            return group
        places: list[Place] = []
        for row, version, n in zip(group.rows, versions, group.lengths, strict=True):
            places += [(row.sequence, version.position + t, False) for t in range(n)]
        tensors = self.tokens.rule(places) | {
            "conv_input": self.tokens.conv(places), "conv_weight": self.tokens.weight,
        }  # fmt: skip
        return msgspec.structs.replace(group, tensors=tensors)

    def _advance(
        self, step: Call, answers: list[tuple[Group, Answer, Expected | None]], before: dict[int, Version]
    ) -> None:
        """Move every sequence's own truth on, to the last token that was right."""
        after: dict[int, tuple[Version, ...]] = {}
        for group, answer, expected in answers:
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
                life.now = Version(old.position + _right(row), old.truth, (), old.conv)

    def _keep(self, step: Call, group: Group, answer: Answer) -> None:
        """Keep what an unjudged call gave for tokens that were right."""
        assert answer.output is not None
        asked = {row.sequence: row for row in step.rows}
        at = 0
        for row, n in zip(group.rows, group.lengths, strict=True):
            right = _right(asked[row.sequence])
            for t in range(right):
                self.outputs[row.sequence, row.start + t] = answer.output[at + t]
            slot = row.writes[right - 1 if len(row.writes) > 1 else 0]
            self.states[row.sequence] = self.pools.state[slot].clone()
            at += n

    def _check_writes(self, number: int, step: Call, plan: Plan) -> list[Breach]:
        needed = self.lives.needed()
        found: list[Breach | None] = []
        padded = [p.slot for p in plan.padded if p.tokens]
        pairs = [(self.ledger, self.pools.state, lambda row: row.writes)]
        if self.machine.has_conv:
            pairs.append((self.conv_ledger, self.pools.conv, lambda row: row.conv_writes))
        for ledger, pool, slots_of in pairs:
            written = [slot for row in plan.rows for slot in slots_of(row)]
            for row, asked in zip(plan.rows, step.rows, strict=True):
                who = f"sequence {row.sequence}"
                for slot in slots_of(row):
                    found.append(ledger.check_write(number, slot, row.sequence, who, needed))
            found.append(ledger.check_kept(number, pool, written, padded))
        return [b for b in found if b is not None]

    def _note_writes(self, number: int, step: Call, plan: Plan, before: dict[int, Version]) -> None:
        for row, asked in zip(plan.rows, step.rows, strict=True):
            start, n, right = before[row.sequence].position, _tokens(asked), _right(asked)
            for ledger, pool, slots in (
                (self.ledger, self.pools.state, row.writes),
                (self.conv_ledger, self.pools.conv, row.conv_writes),
            ):
                ends = range(1, n + 1) if len(slots) > 1 or isinstance(asked, Verify) else [n]
                for slot, end in zip(slots, ends, strict=False):
                    rejected = end > right
                    ledger.write(number, slot, row.sequence, start + end, pool[slot], rejected=rejected)

    def _judge(
        self, group: Group, answer: Answer, expected: Expected | None, before: dict[int, Version]
    ) -> list[Outcome]:
        if expected is None:
            return []
        assert answer.output is not None
        slots = [slot for row in group.rows for slot in row.writes]
        outcomes = judge_rule(
            expected, self.machine.info(group.role), answer.output, self.pools.state[slots]
        )
        for outcome in outcomes:
            for name in ("output_rms_ratio", "state_rms_ratio"):
                self.worst = max(self.worst, float(outcome.numbers.get(name, 0.0)))
        if self.machine.has_conv:
            due = self._as_due(group, [before[row.sequence] for row in group.rows])
            windows = [self.pools.conv[slot] for row in group.rows for slot in row.conv_writes]
            versions = [before[row.sequence] for row in group.rows]
            outcomes.append(judge_conv(due, versions, expected, answer.conv_output, windows))
        return [_in_life(o, group) for o in outcomes]

    def _failure(
        self, number: int, plan: Plan, breaches: list[Breach], outcomes: list[Outcome]
    ) -> Failure | None:
        firing = [o for o in outcomes if o.status == "fires"]
        if not breaches and not firing:
            return None
        found = [o.reason for o in firing]
        if breaches:
            first, *others = breaches
            return Failure(
                step=number, rule=first.rule, line=first.line, sequence=first.sequence, slot=first.slot,
                found=(*found, *(b.line for b in others)),
            )  # fmt: skip
        place = firing[0].place
        sequence = None if place is None else place.sequence
        rows = [r for r in plan.rows if sequence is None or r.sequence == sequence]
        known = "; ".join(self._row_words(r) for r in rows)
        line = f"step {number}: {firing[0].reason}; by the ledger the slots were right: {known}"
        slot = rows[0].read if rows else None
        return Failure(
            step=number, rule=firing[0].check, line=line, found=tuple(found[1:]), sequence=sequence, slot=slot
        )

    def _row_words(self, row: RowPlan) -> str:
        """What the ledger knows of a row."""
        read = "started from zero" if row.fresh else f"read slot {row.read}"
        wrote = ", ".join(map(str, row.writes))
        return f"sequence {row.sequence} {read} at position {row.start} and wrote slot {wrote}"


def _in_life(outcome: Outcome, group: Group) -> Outcome:
    """Places count the rows and tokens of a call; a life's sequences and positions have numbers of their own."""
    place = outcome.place
    if place is None or outcome.check == "conv":
        return outcome
    each = place.tensor == "state" and group.role == "verify"
    # One state per token of a verify: which row it belongs to.
    ends = torch.tensor(group.lengths).cumsum(0) if each else torch.arange(1, len(group.rows) + 1)

    def mine(number: int) -> RowPlan:
        return group.rows[int(torch.searchsorted(ends, number, right=True))]

    def words(found: re.Match[str]) -> str:
        row, head, token = mine(int(found[1])), found[2] or "", found[3]
        return f"sequence {row.sequence}{head}" + (f", token {row.start + int(token)}" if token else "")

    reason = re.sub(r"sequence (\d+)(, head \d+)?(?:, chunk \d+)?(?:, token (\d+))?", words, outcome.reason)
    if place.sequence is None:
        return msgspec.structs.replace(outcome, reason=reason)
    row = mine(place.sequence)
    token = None if place.token is None else row.start + place.token
    moved = msgspec.structs.replace(place, sequence=row.sequence, chunk=None, token=token)
    return msgspec.structs.replace(outcome, reason=reason, place=moved)


def _request(row: Row) -> RowRequest:
    kind = "prefill" if isinstance(row, Prefill) else "decode" if isinstance(row, Decode) else "verify"
    keep = bool(getattr(row, "keep", False))
    return RowRequest(sequence=row.sequence, kind=kind, tokens=_tokens(row), keep=keep)  # type: ignore[arg-type]


def _tokens(row: Row) -> int:
    """Tokens that a row runs."""
    return row.tokens if isinstance(row, Prefill) else 1 if isinstance(row, Decode) else row.draft + 1


def _right(row: Row) -> int:
    """Those that its sequence has seen afterwards."""
    return row.accepted + 1 if isinstance(row, Verify) else _tokens(row)


def who_is(row: Row, start: int) -> str:
    """`sequence 3 (fresh, 1 token)`."""
    n = _tokens(row)
    tokens = "1 token" if n == 1 else f"{n} tokens"
    return f"sequence {row.sequence} ({'fresh' if start == 0 else f'at position {start}'}, {tokens})"


def check_plan(plan: Plan, request: Request, slots: int) -> str:
    """What makes a plan no plan at all for this request; empty: nothing."""
    if not isinstance(plan, Plan):
        return f"the bookkeeper returned {type(plan).__name__}, not a Plan"
    mine, asked = [r.sequence for r in plan.rows], [r.sequence for r in request.rows]
    if mine != asked:
        return f"the plan has rows of sequences {mine}; {asked} were asked for"
    for row, ask in zip(plan.rows, request.rows, strict=True):
        most = ask.tokens if ask.kind == "verify" else 1
        for what, count in (("writes", len(row.writes)), ("conv_writes", len(row.conv_writes))):
            if count != most:
                return f"sequence {row.sequence}: {what} has {count} slot(s); {most} are written"
        for slot in (row.read, row.conv_read, *row.writes, *row.conv_writes):
            if not 0 <= slot < slots:
                return f"sequence {row.sequence}: slot {slot} is not in a pool of {slots}"
        if row.start < 0:
            return f"sequence {row.sequence}: it starts at position {row.start}"
    for name in ("writes", "conv_writes"):
        every = [slot for row in plan.rows for slot in getattr(row, name)]
        twice = next((slot for slot in every if every.count(slot) > 1), None)
        if twice is not None:
            return f"two rows of one call write slot {twice} ({name})"
    wrong = next((p.slot for p in plan.padded if not -1 <= p.slot < slots), None)
    return "" if wrong is None else f"a padded row points at slot {wrong}; the pool has {slots}"


def _raised_by(error: BaseException, module: str) -> bool:
    """Whether an exception comes out of a module's own code."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == module:
            return True
        trace = trace.tb_next
    return False


def run_history(
    history: History,
    machine: Machine,
    make_bookkeeper: Callable[[int, int], Any],
    tokens: TokenSource | None = None,
    **options: Any,
) -> Told:
    """Run a history once. options: as Run takes them."""
    if tokens is None:
        tokens = Drawn(history.seed, machine.sizes)  # type: ignore[attr-defined]
    return Run(history, machine, make_bookkeeper, tokens, **options)()

"""A chain of speculative steps: prefill, drafts of which some tokens are accepted, a plain step, a prefill.

The idea: each step may be right and the chain of them wrong, so the pool is the kernel's own from step to
step. Every step is judged by itself, from the state that the last accepted token left (`step`); at the end
what was accepted is held against the recurrence over the accepted tokens alone, as if no draft had ever been.
Tokens that are rejected differ from those that come instead.

Leaves to others: slots that change hands, preemption, several kinds of call at once (`compare.life`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...capture.case import Case
from ...capture.errors import BadInput
from ...kernels.interface import KernelInfo, RunResult
from ..axes.recase import PER_TOKEN, rule_only, state_like
from ..checks import shape, slots
from ..decode.stream import stream_of
from ..inputs import call_of, inputs_of
from ..judge import judge
from ..soundness import soundness_of
from ..sweep.handed import HandedWitness
from ..trial import Trial
from ..verdict import Ruling, VerdictWord
from ..witness import Witness
from .session import STATUS_VERDICT, Runner
from .step import NO_ERROR, judge_step

SPARE_SLOTS = 3


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One call of all sequences."""

    kind: str
    """`prefill` or `verify` (a step without a draft is a verify of one token)."""
    tokens: tuple[int, ...]
    """Tokens of each sequence in the call: of a verify step the certain one and its draft."""
    accepted: tuple[int, ...]
    """How many of them stay."""


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """What a chain of steps came to."""

    kernel: str
    prefill: str
    turns: int
    drafted: int
    accepted: int
    """Of the drafted tokens."""
    ruling: Ruling
    failed_turn: int | None = None

    @property
    def verdict(self) -> VerdictWord:
        return self.ruling.verdict


def turns_of(n_sequences: int, draft: int, steps: int, *, prompt: int, seed: int) -> list[Turn]:
    """The schedule: a prompt, `steps` drafts of 1..draft tokens, a step without one, a prefill.

    Accepted counts run from none to all of a draft; the first two steps take the two ends.
    """
    dice = random.Random(seed)
    turns = [Turn(kind="prefill", tokens=(prompt,) * n_sequences, accepted=(prompt,) * n_sequences)]
    for number in range(steps):
        drafts = [dice.randint(1, draft) for _ in range(n_sequences)]
        if number < 2:
            kept = [d if (number + n) % 2 else 0 for n, d in enumerate(drafts)]
        else:
            kept = [dice.randint(0, d) for d in drafts]
        turns.append(
            Turn(kind="verify", tokens=tuple(1 + d for d in drafts), accepted=tuple(1 + a for a in kept))
        )
    turns.append(Turn(kind="verify", tokens=(1,) * n_sequences, accepted=(1,) * n_sequences))
    more = max(2, prompt // 2)
    turns.append(Turn(kind="prefill", tokens=(more,) * n_sequences, accepted=(more,) * n_sequences))
    return turns


def speculate(
    verify: Runner,
    prefill: Runner,
    case: Case,
    *,
    draft: int = 3,
    steps: int = 6,
    prompt: int = 5,
    state_dtype: str = "float32",
    seed: int = 0,
    device: str = "cpu",
) -> Speculation:
    """Run the schedule through a kernel's own pool and rule on every step and on the whole.

    verify, prefill: open kernels. case: its sequences' tokens are the stream, repeated as needed.
    Raises BadInput for a case that has no tokens, or a draft of none.
    """
    if draft < 1:
        raise BadInput(f"draft is {draft}; give 1 or more drafted tokens")
    turns = turns_of(len(case.lengths), draft, steps, prompt=prompt, seed=seed)
    engine = _Engine(case, turns, draft, state_dtype, seed, device)
    names: dict[str, Any] = {
        "kernel": verify.info.name, "prefill": prefill.info.name, "turns": len(turns),
    }  # fmt: skip
    for number, turn in enumerate(turns):
        runner = prefill if turn.kind == "prefill" else verify
        ruling = engine.run(runner, turn)
        if ruling.verdict not in ("pass", "suspect"):
            reason = f"turn {number + 1} of {len(turns)} ({turn.kind}): {ruling.reason}"
            ruling = msgspec.structs.replace(ruling, reason=reason)
            return Speculation(**names, **_counts(turns[:number]), ruling=ruling, failed_turn=number)
    return Speculation(**names, **_counts(turns), ruling=engine.whole(prefill.info, turns))


def _counts(turns: Sequence[Turn]) -> dict[str, Any]:
    steps = [t for t in turns if t.kind == "verify"]
    return {
        "drafted": sum(n - 1 for t in steps for n in t.tokens),
        "accepted": sum(n - 1 for t in steps for n in t.accepted),
    }


@dataclass
class _Sequence:
    """Where one sequence stands."""

    columns: Tensor
    position: int = 0
    column: int = 0
    """Where its state lies."""
    outputs: list[Tensor] = field(default_factory=list)


class _Engine:
    """The pool and what is known of every sequence."""

    def __init__(
        self, case: Case, turns: Sequence[Turn], draft: int, state_dtype: str, seed: int, device: str
    ) -> None:
        longest = max(sum(t.accepted[n] for t in turns) for n in range(len(case.lengths)))
        self.given, self.stream = rule_only(case), stream_of(case, longest + draft)
        self.length, self.seed, self.device = longest + draft, seed, device
        n = self.stream.n_sequences
        if n != len(case.lengths):
            raise BadInput("a sequence of the case is empty; every one needs tokens")
        self.dice = torch.Generator().manual_seed(seed + 17)
        self.dtype: torch.dtype = getattr(torch, state_dtype)
        order = torch.randperm(n * (1 + draft) + SPARE_SLOTS, generator=self.dice)
        self.pool = state_like(self.given, len(order), seed=seed).to(self.dtype)
        self.sequences = [_Sequence(order[i * (1 + draft) : (i + 1) * (1 + draft)]) for i in range(n)]
        self.started = self.stream.get("initial_state") is not None
        if self.started:
            for i, sequence in enumerate(self.sequences):
                self.pool[sequence.columns[0]] = self.stream["initial_state"][i].to(self.dtype)

    def run(self, runner: Runner, turn: Turn) -> Ruling:
        """One call and its verdict; what it leaves is the engine's."""
        case, starts = self._case(turn)
        call = call_of(case)
        result = runner.run([call])[0]
        if result.status != "ok":
            word = STATUS_VERDICT[result.status]
            return Ruling(verdict=word, reason=result.message or result.status, error=NO_ERROR)
        if turn.kind == "verify":
            ruling = judge_step(case, runner.info, result.outputs, device=self.device, seed=self.seed)
        else:
            ruling = self._prefilled(runner.info, case, result)
        if ruling.verdict in ("pass", "suspect"):
            self._take(turn, case, result, starts)
        return ruling

    def _case(self, turn: Turn) -> tuple[Case, list[int]]:
        """The call of a turn, and the packed row at which each sequence begins in it."""
        rows, drafted = [], []
        for n, sequence in enumerate(self.sequences):
            at = n * self.length + sequence.position
            rows.append(torch.arange(at, at + turn.tokens[n]))
            kept = turn.accepted[n]
            drafted.append(torch.arange(turn.tokens[n]) >= kept)
        packed, rejected = torch.cat(rows), torch.cat(drafted)
        tensors: dict[str, Any] = {name: self.stream[name][packed].clone() for name in PER_TOKEN}
        other = torch.randint(0, self.given.n_tokens, (int(rejected.sum()),), generator=self.dice)
        for name in PER_TOKEN:
            tensors[name][rejected] = self.given[name][other].flip(1)
        offsets = torch.tensor([0, *turn.tokens]).cumsum(0)
        tensors |= {"cu_seqlens": offsets, "pool": self.pool.clone()}
        columns = torch.stack([s.columns for s in self.sequences])
        now = torch.tensor([s.column for s in self.sequences])
        if turn.kind == "verify":
            tensors |= {"slot_indices": columns, "num_accepted": now + 1}
            tensors["draft"] = torch.tensor(turn.tokens) - 1
        else:
            tensors["slot_indices"] = columns.gather(1, now[:, None])[:, 0]
            fresh = all(s.position == 0 for s in self.sequences) and not self.started
            tensors["has_initial_state"] = torch.full((len(now),), not fresh)
        case = self.stream.with_tensors(
            **{name: None for name in self.stream.tensors if name not in tensors}, **tensors
        )
        op: Any = "verify" if turn.kind == "verify" else "rule"
        return msgspec.structs.replace(case, op=op), offsets[:-1].tolist()

    def _prefilled(self, info: KernelInfo, case: Case, result: RunResult) -> Ruling:
        witness = Witness(case, device=self.device, seed=self.seed)
        call = call_of(case)
        state = slots.final_states(call.tensors, result.outputs)
        outputs = result.outputs if state is None else {**result.outputs, "final_state": state}
        fault = shape.check(inputs_of(case), outputs)
        if fault.status == "fires":
            return Ruling(verdict="fail", tier=0, rule="shape", reason=fault.reason, error=NO_ERROR)
        trial = Trial(witness, info, outputs["output"], outputs["final_state"])
        return judge(trial, soundness_of(witness), [slots.check(call.tensors, result.outputs)])

    def _take(self, turn: Turn, case: Case, result: RunResult, starts: list[int]) -> None:
        """Keep what was accepted: its outputs, and where the state now is."""
        if "pool" in result.outputs:
            self.pool = result.outputs["pool"].cpu().to(self.dtype)
        else:
            self.pool[case["slot_indices"].long()] = result.outputs["final_state"].cpu().to(self.dtype)
        for n, sequence in enumerate(self.sequences):
            kept = turn.accepted[n]
            sequence.outputs.append(result.outputs["output"][starts[n] : starts[n] + kept].cpu())
            sequence.position += kept
            if turn.kind == "verify":
                sequence.column = kept - 1

    def whole(self, info: KernelInfo, turns: Sequence[Turn]) -> Ruling:
        """All that was accepted, against the recurrence over the accepted tokens only.

        info: of the prefill's kernel, whose rounding is the coarser one.
        """
        lengths = [s.position for s in self.sequences]
        rows = torch.cat([torch.arange(n) + i * self.length for i, n in enumerate(lengths)])
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        case = self.stream.with_tensors(
            **{name: self.stream[name][rows] for name in PER_TOKEN}, cu_seqlens=offsets
        )
        done = [0] * len(lengths)
        steps = []
        for turn in turns:
            steps.append([(n, done[n], done[n] + k) for n, k in enumerate(turn.accepted)])
            done = [d + k for d, k in zip(done, turn.accepted, strict=True)]
        witness = HandedWitness(Witness(case, device=self.device, seed=self.seed), steps, self.dtype)
        output = torch.cat([torch.cat(s.outputs) for s in self.sequences])
        state = torch.stack([self.pool[s.columns[s.column]] for s in self.sequences])
        ruling = judge(Trial(witness, info, output, state), soundness_of(witness), [])
        return msgspec.structs.replace(
            ruling, reason=f"over the {int(offsets[-1])} accepted tokens: {ruling.reason}"
        )


def prefill_for(name: str) -> str:
    """The prefill kernel that goes with a verify kernel: its family's, else the emulation's."""
    from ...kernels.registry import own_kernels, parse_name

    parsed = parse_name(name)
    if parsed.family is not None and f"{parsed.family}.chunk" in own_kernels():
        return str(msgspec.structs.replace(parsed, op="chunk"))
    return "emulation.chunk"

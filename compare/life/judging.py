"""Judge one kernel call of a life: by the rules of `diff`, against the sequences' own truth.

The idea: a call's output and the states it leaves are tiles like any others; only truth and yardstick are
carried instead of starting anew. So a call gets a witness of its own (`CallWitness`), and the same checks
decide: non-finite values, the emulation ratio with the same limits, the low bits. A running bound is not
asked for: it would have to be carried too, and says less than the ratio.

The conv keeps copies of inputs, so its state must have their bits; its output has the bound that `diff` has
for `--op conv`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...kernels.interface import KernelInfo
from ...reference.recurrence import recurrence
from ..checks import emulation_ratio, low_bits, nonfinite
from ..clauses import transforms_of, under
from ..inputs import Inputs
from ..ops.conv_bound import check_bound
from ..ops.op import OpInputs
from ..ops.table import OPS
from ..ops.trial import OpTrial
from ..tiles import TileMap, map_states
from ..trial import Trial
from ..verdict import Outcome, Place
from ..witness import Witness
from ..yardstick import (
    DECAY_ROUNDINGS,
    FAST_EXP_BIAS,
    GENERIC,
    U32,
    Growing,
    HonestRun,
    Yardstick,
    decay_floors,
    honest_runs,
)
from .bookkeeping import RowPlan
from .lives import Version, conv_after, honest_states, one_token
from .machine import REFERENCE_INFO, Group

CHECKS = (nonfinite.check, emulation_ratio.check, low_bits.check)
CONV_CHECK = "conv"


class Expected(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a group's call ought to leave: per row, the versions after it (of a verify, after each token)."""

    versions: tuple[tuple[Version, ...], ...]
    witness: CallWitness


class CallWitness(Witness):
    """A witness of one call whose truth and honest runs come from the sequences' lives."""

    def __init__(
        self,
        inputs: Inputs,
        truth: tuple[Tensor, Tensor],
        state_sequence: Tensor,
        seen: Tensor,
        results: list[tuple[HonestRun, Tensor, Tensor]],
    ) -> None:
        """truth: output [T, HV, V] and states [M, HV, K, V], one per written slot.

        state_sequence: [M] row of each state. seen: [N] tokens that each row had seen before.
        results: of each honest run, output and states likewise.
        """
        self.inputs, self.seed, self.kept = inputs, 0, {}
        self._pair, self._state_sequence, self._seen, self._results = truth, state_sequence, seen, results
        self._output_maps = {}
        self._measured: Yardstick | None = None
        self.__dict__["state_tiles"] = map_states(len(state_sequence))
        self.__dict__["is_exact"] = False

    def relevant(self, clauses: object) -> tuple[()]:
        """The inputs are already as the clauses would have them."""
        return ()

    def truth(self, clauses: object = ()) -> tuple[Tensor, Tensor]:
        return self._pair

    def yardstick(self, profile: str, chunk_size: int | None, *args: object, **options: object) -> Yardstick:
        """The carried honest runs, per tile."""
        if self._measured is None:
            self._measured = self._measure(profile, chunk_size, str(options.get("device")))
        return self._measured

    def _measure(self, profile: str, chunk_size: int | None, device: str) -> Yardstick:
        maps = (self.output_tiles(chunk_size), self.state_tiles)
        scales = [Growing(m, t) for m, t in zip(maps, self._pair, strict=True)]
        for run, output, states in self._results:
            scales[0].add(output, cap=run.cap)
            scales[1].add(states, cap=run.cap)
        floors = self._floors(maps[0], fast_exp=chunk_size is None and device == "cuda")
        plain = self._results[0]
        float32 = self.inputs.v.dtype == torch.float32 and "tf32" not in plain[0].precision.dots.values()
        found = [s.scale(f, float32=float32) for s, f in zip(scales, floors, strict=True)]
        return Yardstick(profile, chunk_size, found[0], found[1], len(self._results), plain[2].float())

    def _floors(self, tiles: TileMap, *, fast_exp: bool) -> tuple[Tensor, Tensor]:
        """[M, H] relative errors that a few float32 scalars cause, over all the calls of a life.

        As `yardstick.decay_floors`, for the tokens that the state remembers instead of the call's.
        """
        output, state = decay_floors(self.inputs, tiles, map_states(self.inputs.n_sequences))
        lengths = self.inputs.cu_seqlens.diff()
        total = torch.zeros_like(state).index_add_(
            0, torch.repeat_interleave(lengths), self.inputs.g.double().abs()
        )
        rate = total / lengths.clamp(min=1)[:, None]
        tokens = (self._seen + lengths).double()[:, None].minimum(1 / rate.clamp(min=1e-300))
        more = U32 * (tokens.sqrt() + DECAY_ROUNDINGS) + (FAST_EXP_BIAS * tokens if fast_exp else 0.0)
        return output + more[tiles.sequence], (state + more)[self._state_sequence]


def inputs_of_group(group: Group, versions: Sequence[Version], info: KernelInfo) -> Inputs:
    """A group's call as the truth reads it, each sequence from its own true state."""
    x = group.tensors
    inputs = Inputs(
        q=x["q"], k=x["k"], v=x["v"], g=x["g"], beta=x["beta"], cu_seqlens=group.offsets,
        initial_state=torch.stack([v.truth for v in versions]), scale=float(x["q"].shape[-1]) ** -0.5,
        l2norm=False,
    )  # fmt: skip
    return under(inputs, transforms_of(info.contract))


def expect(
    group: Group,
    versions: Sequence[Version],
    info: KernelInfo,
    state_dtype: torch.dtype,
    *,
    rounded_between: bool = False,
    most_runs: int | None = None,
) -> Expected:
    """Run the truth and the honest runs on a group's call.

    versions: each row's sequence before the call. rounded_between: a verify went token by token through the
    pool. most_runs: fewer honest runs, for a kernel that errs far less than its limit.
    """
    inputs = inputs_of_group(group, versions, info)
    each = group.role == "verify"
    lengths = torch.tensor(group.lengths)
    counts = lengths if each else torch.ones_like(lengths)
    rows = torch.repeat_interleave(counts)
    output, final, *states = recurrence(**_rule(inputs), return_states=each)
    true_states = states[0] if states else final
    runs = honest_runs(
        inputs, profile_of(info), info.capabilities.default_chunk_size, 0, device=device_of(info)
    )[:most_runs]
    results = []
    for number, run in enumerate(runs):
        start = honest_states(versions, number)
        if each:
            results.append((run, *_token_by_token(run, inputs, start, state_dtype, rounded_between)))
        else:
            made = run.on(msgspec.structs.replace(inputs, initial_state=start))()
            results.append((run, made.output, made.final_state.to(state_dtype).float()))
    witness = CallWitness(
        inputs, (output, true_states), rows, torch.tensor([v.position for v in versions]), results
    )
    return Expected(versions=_after(group, versions, true_states, results), witness=witness)


def _rule(inputs: Inputs) -> dict[str, Any]:
    keywords = inputs.keywords()
    return {
        name: keywords[name] for name in ("q", "k", "v", "g", "beta", "cu_seqlens", "initial_state", "scale")
    }


def _token_by_token(
    run: HonestRun, inputs: Inputs, state: Tensor, dtype: torch.dtype, rounded: bool
) -> tuple[Tensor, Tensor]:
    """(output [T, HV, V], the state after each token [T, HV, K, V]) of one honest run.

    A kernel that runs a verify in one call keeps float32 in registers and rounds what it stores.
    """
    output = torch.zeros(inputs.v.shape, dtype=torch.float32)
    states = torch.zeros(inputs.n_tokens, *state.shape[1:])
    state = state.clone()
    for token in range(int(inputs.cu_seqlens.diff().max())):
        part, rows, numbers = one_token(inputs, token, state)
        made = run.on(part)()
        output[rows] = made.output.float()
        stored = made.final_state.to(dtype).float()
        states[rows] = stored
        state[numbers] = stored if rounded else made.final_state.float()
    return output, states


def _after(
    group: Group,
    versions: Sequence[Version],
    states: Tensor,
    results: list[tuple[HonestRun, Tensor, Tensor]],
) -> tuple[tuple[Version, ...], ...]:
    """Each row's sequence after the call, or after each token of its verify."""
    found, at, token = [], 0, 0
    for version, length in zip(versions, group.lengths, strict=True):
        convs = conv_after(version, group.tensors["conv_input"][token : token + length], _taps(group))
        steps = list(range(length)) if group.role == "verify" else [length - 1]
        after = []
        for step in steps:
            honest = tuple(made[at] for _, _, made in results)
            after.append(Version(version.position + step + 1, states[at], honest, convs[step]))
            at += 1
        found.append(tuple(after))
        token += length
    return tuple(found)


def _taps(group: Group) -> int:
    return int(group.tensors["conv_weight"].shape[1])


def profile_of(info: KernelInfo) -> str:
    """Precision profile that a kernel declares."""
    return str(info.capabilities.profile or info.contract.value("precision.profile") or GENERIC)


def device_of(info: KernelInfo) -> str:
    return str(info.environment.get("device", "cpu")).split(":")[0]


def judge_rule(expected: Expected, info: KernelInfo, output: Tensor, states: Tensor) -> list[Outcome]:
    """What the checks say of a call's output [T, HV, V] and states [M, HV, K, V], as the pool has them.

    Places are left as the call has them (`in_life`).
    """
    trial = Trial(expected.witness, info, output, states)
    return [check(trial) for check in CHECKS]


def judge_conv(
    group: Group,
    versions: Sequence[Version],
    expected: Expected,
    info: KernelInfo,
    output: Tensor | None,
    states: Sequence[Tensor],
) -> Outcome:
    """The conv's output within its roundings, its states the last inputs bit for bit.

    states: [D, W-1] of each written slot, rows in order. info: the conv's kernel.
    """
    want = [version for after in expected.versions for version in after]
    rows = [i for i, after in enumerate(expected.versions) for _ in after]
    for got, version, row in zip(states, want, rows, strict=True):
        if torch.equal(got, version.conv.to(got.dtype)):
            continue
        channel = int((got != version.conv.to(got.dtype)).any(-1).nonzero()[0])
        reason = (
            f"the conv state of sequence {group.rows[row].sequence} after {version.position} token(s) is "
            f"not its last inputs, first in channel {channel}"
        )
        place = Place(tensor="conv_state", class_="wrong", sequence=group.rows[row].sequence)
        return Outcome(check=CONV_CHECK, tier=0, status="fires", reason=reason, place=place)
    if output is None or info is REFERENCE_INFO:
        # The reference's output follows from the state that it read, which the ledger has seen.
        return Outcome(check=CONV_CHECK, tier=2, status="ok")
    return in_life(_conv_output(group, versions, info, output), group)


def _conv_output(group: Group, versions: Sequence[Version], info: KernelInfo, output: Tensor) -> Outcome:
    """By the bound that `diff --op conv` has, with the roundings that the kernel declares."""
    x = group.tensors
    start = torch.stack([v.conv for v in versions])
    tensors = {
        "conv_input": x["conv_input"], "conv_weight": x["conv_weight"], "conv_state": start,
        "cu_seqlens": group.offsets,
    }  # fmt: skip
    op = OPS["conv" if group.role == "prefill" else "conv-update"]
    heads = (x["k"].shape[1], x["k"].shape[2], x["v"].shape[1], x["v"].shape[2])
    inputs = OpInputs(tensors, op.function, group.offsets, heads)
    outputs = {"conv_output": output, "final_conv_state": start}
    return check_bound(OpTrial(op, inputs, info, outputs))


def in_life(outcome: Outcome, group: Group) -> Outcome:
    """An outcome with the life's own numbers: places count the rows and tokens of a call."""
    place = outcome.place
    if place is None:
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

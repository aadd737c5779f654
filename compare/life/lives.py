"""Each sequence's own truth, carried from call to call: its state in float64, its conv's inputs, and what
honest kernels would have made of the same calls.

The idea: the truth of a sequence is the recurrence over the tokens that it has seen, whatever happened to it
meanwhile; one step is as cheap as the tokens it runs, so thousands of steps cost what a recurrence over their
tokens costs. A kernel hands its state on in the pool's dtype, so its honest error grows with the calls: the
honest runs of the yardstick (the emulation and its variants) are carried beside the truth, call by call,
rounded where the kernel's state is. What the errors are worth is `judging`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..inputs import Inputs
from .tokens import Sizes


@dataclass(frozen=True)
class Version:
    """A sequence after some of its tokens."""

    position: int
    truth: Tensor
    """[HV, K, V] float64."""
    honest: tuple[Tensor, ...]
    """[HV, K, V] float32 each, rounded to the pool's dtype: one per honest run; empty before the first."""
    conv: Tensor
    """[D, W-1] the last inputs of the conv, exactly."""


@dataclass
class Life:
    """A live sequence: where it stands, and where its checkpoint does."""

    now: Version
    checkpoint: Version | None = None


@dataclass
class Lives:
    """All of them."""

    sizes: Sizes
    sequences: dict[int, Life] = field(default_factory=dict)

    def born(self, start: Tensor | None) -> Version:
        """A sequence that has seen nothing. start: [HV, K, V] state that it was given; None: zero."""
        x = self.sizes
        truth = torch.zeros(x.v_heads, x.key_dim, x.value_dim, dtype=torch.float64)
        if start is not None:
            truth = start.double()
        conv = torch.zeros(x.channels, x.taps - 1, dtype=getattr(torch, x.dtype))
        return Version(0, truth, (), conv)

    def arrive(self, sequence: int, start: Tensor | None) -> None:
        self.sequences[sequence] = Life(self.born(start))

    def resume(self, sequence: int, source: str, start: Tensor | None) -> None:
        life = self.sequences[sequence]
        if source == "zero":
            life.now, life.checkpoint = self.born(start), None
        elif source == "checkpoint":
            assert life.checkpoint is not None
            life.now = life.checkpoint

    def needed(self) -> set[tuple[int, int]]:
        """(sequence, position) of every state that somebody will read again."""
        found = {(s, life.now.position) for s, life in self.sequences.items()}
        return found | {
            (s, life.checkpoint.position) for s, life in self.sequences.items() if life.checkpoint is not None
        }


def conv_after(version: Version, conv_input: Tensor, taps: int) -> list[Tensor]:
    """[D, W-1] after each of a row's tokens; conv_input: [T, D]."""
    seen = torch.cat([version.conv, conv_input.T], 1)
    return [seen[:, j + 1 : j + taps].contiguous() for j in range(len(conv_input))]


def honest_states(versions: Sequence[Version], run: int) -> Tensor:
    """[N, HV, K, V] float32: what the sequences' states are in one honest run.

    A sequence that other kernels have run so far may know fewer runs; it shares theirs in turn.
    """
    return torch.stack([v.honest[run % len(v.honest)] if v.honest else v.truth.float() for v in versions])


def one_token(inputs: Inputs, token: int, state: Tensor) -> tuple[Inputs, Tensor, Tensor]:
    """Token number `token` of the sequences that have one, as a call; their packed rows [R] and numbers [R].

    state: [N, HV, K, V] of all the sequences.
    """
    lengths = inputs.cu_seqlens.diff()
    numbers = (lengths > token).nonzero().flatten()
    rows = inputs.cu_seqlens[numbers] + token
    changed = {name: getattr(inputs, name)[rows] for name in ("q", "k", "v", "g", "beta")}
    import msgspec

    part = msgspec.structs.replace(
        inputs, **changed, cu_seqlens=torch.arange(len(numbers) + 1), initial_state=state[numbers]
    )
    return part, rows, numbers

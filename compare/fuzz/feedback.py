"""Feedback: numbers that say how near a case came to breaking, and the maxima that make a corpus.

The idea: a kernel's binary cannot be watched for new branches, but its numbers can: an error that grows
against its bound, an inverse that grows, a state near its bound, a decay sum near where exp overflows. A case
that takes one of them further than any before it, among cases of the same kind, is worth mutating. Numbers
count by half octaves, so that the last bits, which depend on what a case was judged beside, decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ...reference.emulation import EmulationResult
from ...reference.overflow import chunk_sums
from ..tiles import row_errors
from ..trial import TENSORS, Trial
from .joined import PLAIN, Joined
from .recipe import Recipe

FEATURES = ("ratio", "bound", "inverse", "state", "decay")
"""Error over the plain emulation's; error over its running bound; largest |T|; largest |S| over its bound;
largest -G inside a chunk. In this order in the store."""
CHUNK = 64  # where the kernel has none, inverse and sums are those of this chunk
# Below this a feature says nothing (an error of zero has no logarithm).
LEAST = 2.0**-40
STEPS_PER_OCTAVE = 2


def measured_feedback(trial: Trial, whole: Joined, *, with_ratio: bool = True) -> list[dict[str, float]]:
    """The features of every joined case. with_ratio: off for exact cases, where nothing is rounded."""
    features = {
        "ratio": _ratio(trial, whole) if with_ratio else _zeros(trial, whole),
        "bound": _error_over_bound(trial, whole),
        "inverse": _inverse(trial, whole),
        "state": _state_over_bound(trial, whole),
        "decay": _decay(trial, whole),
    }
    table = torch.stack([features[name] for name in FEATURES]).T.tolist()
    return [dict(zip(FEATURES, row, strict=True)) for row in table]


def _zeros(trial: Trial, whole: Joined) -> Tensor:
    return torch.zeros(whole.n_cases, dtype=torch.float64, device=trial.witness.device)


def _by_case(values: Tensor, case_of_row: Tensor, whole: Joined) -> Tensor:
    """[R, ...] -> [cases] largest finite value, 0 where there is none."""
    flat = torch.nan_to_num(values.double().flatten(1), nan=0.0, posinf=0.0, neginf=0.0)
    per_row = flat.amax(-1) if flat.shape[1] else flat.new_zeros(flat.shape[0])
    found = per_row.new_zeros(whole.n_cases)
    return found.scatter_reduce_(0, case_of_row, per_row, "amax")


def _ratio(trial: Trial, whole: Joined) -> Tensor:
    """Largest ratio of a (sequence, head)'s RMS error to the plain emulation's."""
    found = _zeros(trial, whole)
    if trial.witness.inputs.g.ndim != 2:
        return found
    trial.yardstick  # noqa: B018  (made here, and the plain emulation kept on the way)
    plain = trial.witness.kept.get(PLAIN)
    assert isinstance(plain, EmulationResult)
    for name, honest in zip(TENSORS, (plain.output, plain.final_state), strict=True):
        measured = trial.measured[name]
        own, theirs = measured.rows.square, row_errors(honest, measured.want).square
        if name == "output":
            n = trial.witness.inputs.n_sequences
            index = measured.tiles.sequence_of_row
            own, theirs = (x.new_zeros(n, x.shape[1]).index_add_(0, index, x) for x in (own, theirs))
        ratio = torch.where(theirs > 0, own / theirs, 0.0).sqrt()
        found = torch.maximum(found, _by_case(ratio, whole.case_of_sequence, whole))
    return found


def _error_over_bound(trial: Trial, whole: Joined) -> Tensor:
    limits = {"output": trial.error_bounds.output, "state": trial.error_bounds.final}
    found = _zeros(trial, whole)
    for name in TENSORS:
        measured, limit = trial.measured[name], limits[name]
        size = measured.rows.truth_square.sqrt()
        ratio = torch.where(limit < size, measured.rows.square.sqrt() / limit, 0.0)
        found = torch.maximum(found, _by_case(ratio, whole.rows_of(name), whole))
    return found


def _state_over_bound(trial: Trial, whole: Joined) -> Tensor:
    norm = torch.linalg.vector_norm(trial.truth[1].flatten(2), dim=-1)
    bound = trial.state_bounds.final
    return _by_case(torch.where(bound > 0, norm / bound, 0.0), whole.case_of_sequence, whole)


def _decay(trial: Trial, whole: Joined) -> Tensor:
    x = trial.witness.inputs
    sums = chunk_sums(x.g, x.cu_seqlens, trial.capabilities_chunk or CHUNK).abs()
    return _by_case(sums, whole.case_of_row, whole)


def _inverse(trial: Trial, whole: Joined) -> Tensor:
    """Largest entry of T = (I + A)^-1 in any chunk, in float32."""
    x = trial.witness.inputs
    size = trial.capabilities_chunk or CHUNK
    if x.n_tokens == 0 or x.g.ndim != 2:
        return torch.zeros(whole.n_cases, dtype=torch.float64, device=x.device)
    tiles = trial.witness.output_tiles(size)
    assert tiles.token_of_row is not None
    at = tiles.token_of_row % size
    k = x.k.float()
    if x.l2norm:
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + x.l2norm_eps)

    def chunked(rows: Tensor) -> Tensor:
        """[T, H, ...] -> [chunks, H, size, ...], zeros behind a sequence's end."""
        table = rows.new_zeros(tiles.n_tiles, size, *rows.shape[1:])
        table[tiles.tile_of_row, at] = rows
        return table.transpose(1, 2)

    keys, beta = chunked(k), chunked(x.beta.float())
    heads = x.heads // keys.shape[1]
    sums = chunked(chunk_sums(x.g, x.cu_seqlens, size).float())
    gram = (keys @ keys.transpose(-1, -2)).repeat_interleave(heads, dim=1)
    decay = (sums[..., :, None] - sums[..., None, :]).clamp(max=0.0).exp()
    below = (gram * decay * beta[..., None]).tril(-1)
    eye = torch.eye(size, device=x.device).expand_as(below)
    inverse = torch.linalg.solve_triangular(below + eye, eye, upper=False, unitriangular=True)
    per_tile = inverse.abs().flatten(1)
    return _by_case(per_tile, whole.case_of_sequence[tiles.sequence], whole)


def level(value: float) -> int:
    """A feature in half octaves."""
    if not value > LEAST:
        return math.floor(math.log2(LEAST) * STEPS_PER_OCTAVE)
    return math.floor(math.log2(value) * STEPS_PER_OCTAVE)


def region(recipe: Recipe) -> str:
    """Which kind of case a maximum is kept for: how its longest sequence ends, and how it is called."""
    longest = max(recipe.lengths, default=0)
    end = {0: "64n", 1: "64n+1", 63: "64n-1"}.get(longest % 64, "between")
    size = "few" if longest <= 4 else "one" if longest <= 65 else "more"
    packed = "packed" if len(recipe.pieces) > 1 else "alone"
    split = "split" if "split" in recipe.deviations else "whole"
    return f"{recipe.shape} {size} {end} {packed} {split}"


def levels(recipe: Recipe, feedback: Mapping[str, float]) -> dict[str, int]:
    """Bucket -> level: what a case may raise."""
    where = region(recipe)
    return {f"{name} {where}": level(feedback[name]) for name in FEATURES if name in feedback}

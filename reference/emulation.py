"""The chunk algorithm of the gated delta rule with a kernel's own rounding: the same maths, the same casts.

The idea: judge a kernel's error by what its algorithm costs in its precision. This is that algorithm
(shared stages `cumsum`, `kkt`, `solve`, `wu`, `state`, `output`), in float32 torch, where every value that
a kernel keeps in a narrower format goes through a named cast point of `precision`. At the extremes it
behaves as FLA does, by the same operations: exp(G_i - G_j) is formed and then masked, so a large decay
underflows to zero and only g = -inf gives NaN (-inf minus -inf); a NaN spreads to its whole chunk through
masked products. Kernels that factor the decay overflow instead (`factored_exp`).

Left to others: what a cast does (`rounding`), which casts there are (`precision`), the order of sums
(`emulation_arithmetic`, `variants`), the inverse (`emulation_solve`), the token loop
(`emulation_recurrent`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .emulation_arithmetic import Arithmetic, ieee_matmul
from .emulation_inputs import L2NORM_EPS, Inputs, checked_inputs, l2norm_of
from .emulation_solve import inverse, solve_direct
from .precision import Precision, precision_for
from .variants import Variant

STAGE_TENSORS = ("cumsum", "kkt", "solve", "w", "u", "h", "v_new")
"""Names in `EmulationResult.stages`, in the order in which they come about."""

Override = Tensor | Callable[[Tensor], Tensor]

# Working memory of one piece of chunks, about: on a CPU small enough for a cache to help, on a GPU enough for
# few and large launches.
_PIECE_BYTES = {"cpu": 1 << 24, "cuda": 1 << 31}


@dataclass(frozen=True)
class EmulationResult:
    """What one emulated call gives: values on the grid of their cast point, in the arithmetic's dtype."""

    output: Tensor
    """[T, HV, V]"""
    final_state: Tensor
    """[N, HV, K, V]"""
    stages: dict[str, Tensor] = field(default_factory=dict)
    """On request; the layout of the float64 chunk form. Per token: cumsum [T, HV], kkt and solve [T, HV, C]
    (the row of its chunk's matrix), w [T, HV, K], u, v_new and output [T, HV, V]. Per chunk, sequence after
    sequence: h [chunks, HV, K, V], the state at its start."""


def emulate_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    precision: Precision | str = "generic",
    chunk_size: int = 64,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    l2norm: bool = False,
    l2norm_eps: float = L2NORM_EPS,
    variant: Variant | None = None,
    generator: torch.Generator | None = None,
    stages: bool = False,
    overrides: Mapping[str, Override] | None = None,
    before_overrides: bool = False,
) -> EmulationResult:
    """Run the chunk algorithm as a kernel with this precision would.

    q, k: [T, HK, K], v: [T, HV, V], g: [T, HV] natural log, beta: [T, HV], initial_state: [N, HV, K, V]
    or None for zeros, cu_seqlens: [N+1] or None for one sequence. HK divides HV. The dtype of q is the one
    that `native` cast points follow.
    precision: a table, or a profile's name (taken for the device of q and this chunk size).
    scale: factor on the output, K**-0.5 when None. l2norm: normalise q and k first, l2norm_eps in the root.
    variant: how to run it otherwise in the same precision; None: as written. A variant's chunk size wins.
    generator: for stochastic rounding.
    overrides: stage tensor -> its replacement: a tensor laid out as in `EmulationResult.stages`, or a
    function from the computed tensor, [HV, chunks, C, X] and for `h` [HV, K, V], to another of that shape.
    before_overrides: `stages` keeps what each stage computed, not what replaced it. With every stage
    replaced by given values, one run then shows what each stage makes of given inputs.
    Raises ValueError for shapes, dtypes or names that do not fit.
    """
    if variant is not None and variant.chunk_size is not None:
        chunk_size = variant.chunk_size
    if isinstance(precision, str):
        precision = precision_for(precision, device=q.device.type, chunk_size=chunk_size)
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, not {chunk_size}")
    for name in overrides or {}:
        if name not in STAGE_TENSORS:
            raise ValueError(f"unknown stage {name!r} in overrides; known: {', '.join(STAGE_TENSORS)}")
    inputs = checked_inputs(q, k, v, g, beta, initial_state, cu_seqlens, scale)
    arithmetic = Arithmetic(
        precision, native=q.dtype, beta=beta.dtype, device=q.device, variant=variant, generator=generator
    )
    arithmetic.replaced = bool(overrides)
    with torch.no_grad(), ieee_matmul():
        run = _Run(inputs, arithmetic, chunk_size, l2norm_eps if l2norm else None, stages, overrides or {})
        run.before_overrides = before_overrides
        return run.result()


@dataclass(frozen=True)
class _Piece:
    """Some consecutive chunks of the packed call."""

    first: int
    """Number of the first chunk in the whole call."""
    rows: Tensor
    """[P, C] token index of each place; places past a sequence's end point at token 0."""
    valid: Tensor
    """[P, C] bool."""


class _Write(Protocol):
    """How one chunk's v_new comes about from the state."""

    def __call__(self, p: int, state: Tensor) -> Tensor:
        """v_new [HV, C, V] of the piece's chunk p, before its cast point; state [HV, K, V] as operand."""


@dataclass(frozen=True)
class _FromWU:
    """v_new = u - w S."""

    a: Arithmetic
    w: Tensor
    u: Tensor

    def __call__(self, p: int, state: Tensor) -> Tensor:
        return self.u[:, p] - self.a.dot("h", self.w[:, p], state)


@dataclass(frozen=True)
class _FromError:
    """v_new = (T beta) (v - exp(G) k S)."""

    a: Arithmetic
    k: Tensor
    v: Tensor
    t_beta: Tensor
    decay: Tensor

    def __call__(self, p: int, state: Tensor) -> Tensor:
        a = self.a
        read = a.cast("sk", a.dot("h", self.k[:, p], state) * self.decay[:, p])
        return a.dot("u", self.t_beta[:, p], a.cast("error", self.v[:, p] - read))


class _Run:
    """One call: chunks in pieces, the state carried from piece to piece."""

    def __init__(
        self,
        inputs: Inputs,
        arithmetic: Arithmetic,
        chunk_size: int,
        l2norm_eps: float | None,
        stages: bool,
        overrides: Mapping[str, Override],
    ) -> None:
        self.x = inputs
        self.a = arithmetic
        self.size = chunk_size
        self.l2norm_eps = l2norm_eps
        self.overrides = overrides
        self.before_overrides = False
        self.plan = _plan(inputs.lengths, inputs.starts, chunk_size)
        zeros, tokens, hv, dk, dv = arithmetic.zeros, inputs.tokens, inputs.hv, inputs.dk, inputs.dv
        self.starting: Tensor | None = None
        self.output = zeros(tokens, hv, dv)
        self.final = zeros(len(inputs.lengths), hv, dk, dv)
        self.state = zeros(hv, dk, dv)
        self.stages: dict[str, Tensor] = {}
        if stages:
            widths = {"kkt": chunk_size, "solve": chunk_size, "w": dk, "u": dv, "v_new": dv}
            self.stages = {name: zeros(tokens, hv, width) for name, width in widths.items()}
            self.stages |= {
                "cumsum": zeros(tokens, hv),
                "h": zeros(len(self.plan), hv, dk, dv),
                "output": self.output,
            }

    def result(self) -> EmulationResult:
        starting = self.x.initial_state
        if starting is not None:
            starting = self.starting = self.a.cast("handover", self.a.enter(starting))
        for n, length in enumerate(self.x.lengths):
            if length == 0 and starting is not None:
                self.final[n] = self.a.cast("final_state", starting[n])
        for piece in self._pieces():
            self._piece(piece)
        return EmulationResult(self.output, self.final, self.stages)

    def _pieces(self) -> Iterator[_Piece]:
        per_chunk = 8 * self.x.hv * self.size * (3 * self.size + 4 * self.x.dk + 5 * self.x.dv)
        device = self.x.q.device
        count = max(1, _PIECE_BYTES.get(device.type, _PIECE_BYTES["cpu"]) // per_chunk)
        places = torch.arange(self.size, device=device)
        for first in range(0, len(self.plan), count):
            plan = self.plan[first : first + count]
            start = torch.tensor([p.start for p in plan], device=device)
            length = torch.tensor([p.length for p in plan], device=device)
            valid = places < length[:, None]
            yield _Piece(first, torch.where(valid, start[:, None] + places, 0), valid)

    def _piece(self, piece: _Piece) -> None:
        """All stages of one piece; every tensor is [H, P, C, X]."""
        x, a = self.x, self.a
        q, k, v = (self._take(t, piece) for t in (x.q, x.k, x.v))
        scale_first = a.precision.scaled == "q"
        if self.l2norm_eps is not None:
            q, k = (l2norm_of(y, self.l2norm_eps) for y in (q, k))
            k = a.cast("l2norm", k)
            q = q if scale_first else a.cast("l2norm", q)
        scale = 1.0 if scale_first else x.scale
        if scale_first:
            q = a.cast("q_scale", q * x.scale)
        beta = a.cast("beta", self._take(x.beta[..., None], piece))
        total = self._take(x.g[..., None], piece)[..., 0].cumsum(-1)
        # A kernel loads zero past the end of the sequence, not the last sum.
        total = a.cast("cumsum", total.masked_fill(~piece.valid, 0.0))
        total = self._stage("cumsum", total[..., None], piece)[..., 0]

        k_beta = a.cast("k_beta", self._per_value_head(k) * beta)
        kkt, scores = self._within_chunk(q, k, k_beta, total, beta, piece)
        kkt = self._stage("kkt", kkt, piece)
        k, q = self._per_value_head(k), self._per_value_head(q)
        decay = total.exp()[..., None]
        v_beta = a.cast("v_beta", v * beta)
        k_beta = a.cast("k_beta_decay", k_beta * decay)
        if a.precision.v_new_from == "error" and not self.overrides.keys() & {"w", "u"}:
            t = self._stage("solve", a.cast("solve", inverse(kkt, a)), piece)
            if self.stages:  # for the report only: such a kernel forms neither
                self._w_and_u(kkt, k_beta, v_beta, piece)
            write: _Write = _FromError(a, k, v, a.cast("solve_beta", t * beta.mT), decay)
        else:
            write = _FromWU(a, *self._w_and_u(kkt, k_beta, v_beta, piece))
        h, v_new = self._states(k, write, total, piece)
        if a.precision.read_decay == "q":
            read = a.dot("qh", a.cast("q_decay", q * decay), h)
        else:
            read = a.dot("qh", q, h) * decay
        out = read * scale + a.dot("av", scores, v_new) * scale
        self._put(self.output, a.cast("output", out), piece)

    def _within_chunk(
        self, q: Tensor, k: Tensor, k_beta: Tensor, total: Tensor, beta: Tensor, piece: _Piece
    ) -> tuple[Tensor, Tensor]:
        """A, strictly lower, and the output's score matrix, lower with the diagonal: [HV, P, C, C]."""
        a, each = self.a, self._per_value_head
        both = piece.valid[:, :, None] & piece.valid[:, None, :]
        lower = torch.ones(self.size, self.size, dtype=torch.bool, device=k.device).tril()
        strict = lower.tril(-1) & both
        lower = lower & both
        with_beta = a.precision.kkt_from == "k_beta"
        if a.precision.factored_exp:
            grown = total.exp()[..., None]
            down = a.cast("k_decay", each(k) * (-total).exp()[..., None]).mT
            kk = a.dot("kkt", a.cast("k_decay", (k_beta if with_beta else each(k)) * grown), down)
            qk = a.dot("qk", a.cast("k_decay", each(q) * grown), down)
        else:
            decay = (total[..., :, None] - total[..., None, :]).exp()
            kk = (a.dot("kkt", k_beta, each(k).mT) if with_beta else each(a.dot("kkt", k, k.mT))) * decay
            qk = each(a.dot("qk", q, k.mT)) * decay
        kk = torch.where(strict, kk if with_beta else kk * beta, 0.0)
        return a.cast("kkt", kk), a.cast("qk_decay", torch.where(lower, qk, 0.0))

    def _w_and_u(self, kkt: Tensor, k_beta: Tensor, v_beta: Tensor, piece: _Piece) -> tuple[Tensor, Tensor]:
        a = self.a
        direct = a.precision.solve == "direct" and "solve" not in self.overrides
        if direct:
            w, u = solve_direct(kkt, k_beta), solve_direct(kkt, v_beta)
        if not direct or self.stages:
            t = self._stage("solve", a.cast("solve", inverse(kkt, a)), piece)
            if not direct:
                w, u = a.dot("w", t, k_beta), a.dot("u", t, v_beta)
        return self._stage("w", a.cast("w", w), piece), self._stage("u", a.cast("u", u), piece)

    def _states(self, k: Tensor, write: _Write, total: Tensor, piece: _Piece) -> tuple[Tensor, Tensor]:
        """The pass over the chunks: the state at each start, h [HV, P, K, V], and v_new [HV, P, C, V]."""
        a = self.a
        stored = torch.empty(*k.shape[:2], self.x.dk, self.x.dv, dtype=a.dtype, device=k.device)
        v_new = torch.empty(*k.shape[:3], self.x.dv, dtype=a.dtype, device=k.device)
        kept, one_cast = a.precision.update_from == "stored", a.same_cast("h", "h_dot")
        lengths = [self.plan[piece.first + p].length for p in range(k.shape[1])]
        lasts = total[:, range(k.shape[1]), [length - 1 for length in lengths]]
        # Places past the end have zero k, but the padded sum 0 would overflow exp(G_last - 0): mask.
        lefts = torch.where(piece.valid, (lasts[..., None] - total).exp(), 0.0)[..., None]
        shrinks = lasts.exp()[..., None, None]
        for p in range(k.shape[1]):
            chunk = self.plan[piece.first + p]
            if chunk.opens:
                self.state = self._fresh(chunk.sequence)
            own = a.cast("h", self.state)
            h = self._override("h", own, piece.first + p)
            stored[:, p] = h
            if "h" in self.stages:
                self.stages["h"][piece.first + p] = own if self.before_overrides else h
            new = write(p, own if one_cast else a.cast("h_dot", self.state))
            v_new[:, p] = a.cast("v_new", new)
            if kept:
                new = v_new[:, p]
            left, decayed = lefts[:, p], self.state * shrinks[:, p]
            if a.precision.update_decay == "k":
                update = a.dot("state", a.cast("k_left", k[:, p] * left).mT, new)
            else:
                update = a.dot("state", k[:, p].mT, a.cast("v_decay", new * left))
            self.state = a.cast("state", decayed + update)
            if chunk.closes:
                self.final[chunk.sequence] = a.cast("final_state", self.state)
        return stored, self._stage("v_new", v_new, piece)

    def _fresh(self, sequence: int) -> Tensor:
        if self.starting is None:
            return torch.zeros_like(self.state)
        return self.starting[sequence].clone()

    def _take(self, x: Tensor, piece: _Piece) -> Tensor:
        """[T, H, X] -> [H, P, C, X] in the arithmetic's dtype, zero past the end of a sequence."""
        if self.x.tokens == 0:
            return x.new_zeros(x.shape[1], *piece.rows.shape, x.shape[2], dtype=self.a.dtype)
        taken = x[piece.rows].masked_fill(~piece.valid[..., None, None], 0)
        return self.a.enter(taken.permute(2, 0, 1, 3))

    def _put(self, target: Tensor, values: Tensor, piece: _Piece) -> None:
        """[HV, P, C, X] into the rows of target [T, HV, X] that the piece owns."""
        target[piece.rows[piece.valid]] = values.permute(1, 2, 0, 3)[piece.valid]

    def _per_value_head(self, x: Tensor) -> Tensor:
        return x if self.x.groups == 1 else x.repeat_interleave(self.x.groups, dim=0)

    def _stage(self, name: str, value: Tensor, piece: _Piece) -> Tensor:
        """Replace a stage's value if the caller wants, and keep it if asked for."""
        override, own = self.overrides.get(name), value
        if isinstance(override, Tensor):
            given = override[..., None] if name == "cumsum" else override
            value = self._take(given, piece)
        elif override is not None:
            value = override(value)
        if name in self.stages:
            target = self.stages[name]
            kept = own if self.before_overrides else value
            self._put(target[..., None] if name == "cumsum" else target, kept, piece)
        return value

    def _override(self, name: str, value: Tensor, chunk: int) -> Tensor:
        override = self.overrides.get(name)
        if isinstance(override, Tensor):
            return override[chunk].to(value)
        return value if override is None else override(value)


@dataclass(frozen=True)
class _Chunk:
    """One chunk's place in the packed call."""

    sequence: int
    start: int
    """First token, counted over the whole call."""
    length: int
    opens: bool
    closes: bool


def _plan(lengths: list[int], starts: list[int], size: int) -> list[_Chunk]:
    return [
        _Chunk(n, start + at, min(size, length - at), at == 0, at + size >= length)
        for n, (length, start) in enumerate(zip(lengths, starts, strict=True))
        for at in range(0, length, size)
    ]

"""The arithmetic of an emulation: casts and dot products as a precision table and a variant want them.

The idea: the algorithms in `emulation` and `emulation_recurrent` are written once, in terms of `cast` and
`dot`; everything that differs between kernels or between sound runs of one kernel happens in here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .precision import Precision
from .rounding import format_of, round_to
from .variants import PLAIN, Variant

# One operand in so many moves by an ulp: about the noise of one more float32 rounding. Moving all of them
# would triple a float32 kernel's error (measured) and excuse a bad one.
_ONE_IN = 16
_POOL = 65_537  # prime, so that no tensor's rows repeat the pool in step
_PARTIAL_SUM = 16  # products summed before a narrow accumulator rounds: the depth of one MMA step in bf16


# Cast points that the operands of a dot have passed where the algorithm is FLA's, and the dots of q or k.
OPERANDS = {
    "kkt": ("l2norm", "k_beta"), "solve": ("kkt", "solve_step"), "u": ("solve", "v_beta"),
    "w": ("solve", "k_beta_decay"), "h": ("w", "h_dot"), "state": ("l2norm", "v_decay"),
    "qh": ("l2norm", "h"), "qk": ("l2norm",), "av": ("qk_decay", "v_new"),
}  # fmt: skip
OF_INPUTS = ("kkt", "state", "qh", "qk")
NARROW = {"bf16", "fp16"}


class Arithmetic:
    """Casts and dots of one run."""

    def __init__(
        self,
        precision: Precision,
        *,
        native: torch.dtype,
        beta: torch.dtype,
        device: torch.device,
        variant: Variant | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """native, beta: dtypes of q, k, v and of beta, which `native` and `promoted` cast points follow.

        generator: draws for stochastic rounding; None: torch's default one.
        """
        self.precision = precision
        self.variant = variant or PLAIN
        self.dtype = torch.float64 if precision.arithmetic == "fp64" else torch.float32
        self._native = native
        self._beta = beta
        self._generator = generator
        self._orders: dict[int, Tensor] = {}
        self._device = device
        self._dice = torch.Generator(device=device).manual_seed(self.variant.seed)
        self._starts = torch.Generator().manual_seed(self.variant.seed)
        self._pool: Tensor | None = None
        self.replaced = False
        """Whether stages are replaced by values from elsewhere, which are on no grid."""

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self._device)

    def enter(self, x: Tensor) -> Tensor:
        """An input in the arithmetic's dtype, perturbed if the variant says so."""
        return self._perturb(x.to(self.dtype, memory_format=torch.contiguous_format))

    def cast(self, point: str, x: Tensor) -> Tensor:
        """x rounded as the table says for this cast point."""
        return self._round(self._perturb(x), self.precision.at(point, self._native, self._beta))

    def dot(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """a @ b, [..., M, R] @ [..., R, N], with the operand format and summation order of this run."""
        if self.precision.dot(name) == "tf32" and not self._on_grid(name):
            mode = self.precision.tf32_mode
            a, b = round_to(a, "tf32", mode), round_to(b, "tf32", mode)
        depth = a.shape[-1]
        if self.variant.order != "natural":
            order = self._order(depth)
            a, b = a.index_select(-1, order), b.index_select(-2, order)
        narrow = self.precision.accumulate
        block = self.variant.block if narrow is None else _PARTIAL_SUM
        if block is None or block >= depth:
            return self._partial(a @ b)
        total = self._partial(a[..., :block] @ b[..., :block, :])
        for start in range(block, depth, block):
            stop = start + block
            total = self._partial(total + a[..., start:stop] @ b[..., start:stop, :])
        return total

    def same_cast(self, one: str, other: str) -> bool:
        """Whether two cast points make the same of a value, so that one cast serves both."""
        draws = bool(self.variant.perturb) or self.precision.mode == "stochastic"
        at = self.precision.at
        return not draws and at(one, self._native, self._beta) == at(other, self._native, self._beta)

    def _on_grid(self, dot: str) -> bool:
        """Whether both operands of a dot are known to have so few bits that tf32 takes none away."""
        p = self.precision
        own_way = (p.v_new_from, p.update_decay, p.read_decay, p.scaled) != (
            "wu",
            "v_new",
            "product",
            "output",
        )
        if self.variant.perturb or self.replaced or own_way or p.factored_exp:
            return False
        formats = {p.at(point, self._native, self._beta) for point in OPERANDS[dot]}
        if dot in OF_INPUTS:
            formats.add(format_of(self._native))
        return formats <= NARROW

    def _partial(self, total: Tensor) -> Tensor:
        """A partial sum as the accumulator holds it."""
        narrow = self.precision.accumulate
        return total if narrow is None else round_to(total, narrow)

    def _round(self, x: Tensor, fmt: str) -> Tensor:
        return round_to(x, fmt, self.precision.mode, self._generator)

    def _order(self, depth: int) -> Tensor:
        """The order of `depth` products; the same in every dot of this depth."""
        if depth not in self._orders:
            if self.variant.order == "reversed":
                order = torch.arange(depth - 1, -1, -1, device=self._device)
            else:
                own = torch.Generator().manual_seed(self.variant.seed * 4099 + depth)
                order = torch.randperm(depth, generator=own).to(self._device)
            self._orders[depth] = order
        return self._orders[depth]

    def _perturb(self, x: Tensor) -> Tensor:
        if not self.variant.perturb:
            return x
        # A long pool of factors, read from a random place: drawing every factor anew would cost more than
        # the emulation itself.
        if self._pool is None:
            dice = torch.randint(0, 2 * _ONE_IN, (_POOL,), device=self._device, generator=self._dice)
            ulps = (dice == 0).to(self.dtype) - (dice == 1).to(self.dtype)
            # A relative 2^-23 is one float32 ulp at the lower end of a binade and two at its upper end.
            pool = 1 + ulps * 2.0**-23
            # Twice, so that a turned pool is a slice of it and costs no copy.
            self._pool = torch.cat((pool, pool))
        first = _POOL - int(torch.randint(0, _POOL, (1,), generator=self._starts))
        factors = self._pool[first : first + min(x.numel(), _POOL)]
        if x.numel() > _POOL:
            factors = factors.repeat(-(-x.numel() // _POOL))[: x.numel()]
        return x * factors.view(x.shape)


@contextmanager
def ieee_matmul() -> Iterator[None]:
    """Float32 products of the emulation must be float32, whatever the caller allows for speed."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)

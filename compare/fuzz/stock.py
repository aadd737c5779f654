"""Stock: tokens that cases are cut from, made once per family and shape, or read from captures.

The idea: drawing a family portably costs more than a kernel call, and the rule is causal, so any window of
a family's tokens is a sample of that family. A stock is long enough that windows rarely coincide; the next
cases draw from the next stock. A capture is a stock that its model has made.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...capture.case import Case, starting_state
from ...capture.errors import BadInput
from ...capture.make import DTYPES, FAMILIES, make
from ..axes.recase import rule_only, state_like
from ..soundness import soundness_of
from ..witness import Witness

# Families whose cases are out of contract by construction: no verdict on a kernel comes of them.
UNSOUND = ("forgotten-l2norm",)
KEPT_STOCKS = 96
STOCK_LENGTHS = 2  # of the longest case that a run makes


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Heads, dims and dtypes that share one compilation of a kernel."""

    k_heads: int
    v_heads: int
    key: int
    value: int
    dtype: str = "bf16"
    beta_dtype: str = "bf16"

    @property
    def word(self) -> str:
        """`2x4x128x128:bf16`, with `:beta=fp32` where beta has a dtype of its own."""
        own = "" if self.beta_dtype == self.dtype else f":beta={self.beta_dtype}"
        return f"{self.k_heads}x{self.v_heads}x{self.key}x{self.value}:{self.dtype}{own}"


def shape_of(word: str) -> Shape:
    """Read `HKxHVxKxV[:dtype[:beta=dtype]]`. Raises BadInput."""
    sizes, *dtypes = word.split(":")
    numbers = sizes.split("x")
    fine = len(numbers) == 4 and all(n.isdecimal() and int(n) > 0 for n in numbers) and len(dtypes) <= 2
    dtype = dtypes[0] if dtypes else "bf16"
    beta = dtypes[1].removeprefix("beta=") if len(dtypes) == 2 else dtype
    if not fine or dtype not in DTYPES or beta not in DTYPES or int(numbers[1]) % int(numbers[0]):
        raise BadInput(
            f"--shape {word!r}: write K-HEADSxV-HEADSxKxV:DTYPE, V-heads a multiple of K-heads, "
            "dtype bf16, fp16 or fp32, e.g. 2x4x128x128:bf16"
        )
    k_heads, v_heads, key, value = map(int, numbers)
    return Shape(k_heads=k_heads, v_heads=v_heads, key=key, value=value, dtype=dtype, beta_dtype=beta)


class Source(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Tokens to cut from."""

    tokens: dict[str, Tensor]
    """q, k, v, g, beta [T, ...]."""
    state: Tensor
    """[HV, K, V] float32 that a sequence may start from."""
    qk: Any
    scale: float | None
    starts: tuple[int, ...] = (0,)
    """Tokens at which a sequence of the source starts."""

    @property
    def length(self) -> int:
        return self.tokens["v"].shape[0]

    @property
    def options(self) -> tuple[str, float | None]:
        """What all pieces of one case must share."""
        return self.qk, self.scale


class Stockroom:
    """All sources of a run."""

    def __init__(
        self, seed: int, shapes: Sequence[Shape], longest: int, captures: Sequence[Case] = ()
    ) -> None:
        self.seed, self.shapes, self.longest = seed, tuple(shapes), longest
        self.captures = tuple(captures)
        self._made: OrderedDict[tuple[int, str, int], Source] = OrderedDict()

    def source(self, shape: int, name: str, number: int) -> Source:
        """A stock, made on first use. Making it again gives the same bits."""
        key = (shape, name, number)
        found = self._made.pop(key, None)
        if found is None:
            found = self._capture(name) if name.startswith("capture.") else self._family(*key)
        self._made[key] = found
        while len(self._made) > KEPT_STOCKS:
            self._made.popitem(last=False)
        return found

    def _family(self, shape: int, family: str, number: int) -> Source:
        s = self.shapes[shape]
        case = make(
            family, lengths=[STOCK_LENGTHS * self.longest], k_heads=s.k_heads, v_heads=s.v_heads,
            dims=(s.key, s.value), dtype=s.dtype, beta_dtype=s.beta_dtype, state="random",
            seed=(self.seed * 1009 + number) % 2**63,
        )  # fmt: skip
        tokens = {name: case[name] for name in ("q", "k", "v", "g", "beta")}
        return Source(
            tokens=tokens, state=case["initial_state"][0].float(), qk=case.options.qk,
            scale=case.options.scale,
        )  # fmt: skip

    def _capture(self, name: str) -> Source:
        case = self.captures[int(name.removeprefix("capture."))]
        state = starting_state(case)
        given = state_like(case, 1, seed=self.seed)[0] if state is None else state[0]
        return Source(
            tokens={name: case[name] for name in ("q", "k", "v", "g", "beta")}, state=given.float(),
            qk=case.options.qk, scale=case.options.scale, starts=tuple(case["cu_seqlens"].tolist()[:-1]),
        )  # fmt: skip

    def captures_of(self, shape: int) -> list[str]:
        """Names of the captures that have this shape."""
        wanted = self.shapes[shape]
        return [f"capture.{i}" for i, case in enumerate(self.captures) if capture_shape(case) == wanted]


def capture_shape(case: Case) -> Shape:
    """The shape of a captured case."""
    names = {dtype: name for name, dtype in DTYPES.items() if len(name) == 4}
    q, v = case["q"], case["v"]
    return Shape(
        k_heads=q.shape[1], v_heads=v.shape[1], key=q.shape[2], value=v.shape[2],
        dtype=names[v.dtype], beta_dtype=names[case["beta"].dtype],
    )  # fmt: skip


def usable_captures(cases: Sequence[Case], most_heads: int) -> tuple[list[Case], list[str]]:
    """Captures that cases can be cut from, with at most so many value heads; and why others are left out.

    A capture that is not sound by itself is `diff`'s to report: cut up, it would only be found again.
    """
    kept, left = [], []
    for case in cases:
        reason = _unusable(case)
        if reason:
            left.append(f"{case.label}: {reason}")
        else:
            kept.append(_few_heads(rule_only(case), most_heads))
    return kept, left


def _unusable(case: Case) -> str:
    if case["g"].ndim != 2:
        return "a decay per key channel"
    if case.options.gate_space != "log":
        return "a linear gate"
    if case.n_tokens == 0:
        return "no token"
    if case["v"].dtype not in DTYPES.values() or case["beta"].dtype not in DTYPES.values():
        return f"dtype {case['v'].dtype}"
    if not case.finite or bool(torch.isinf(case["g"]).any()):
        return "not finite"
    found = soundness_of(Witness(case))
    return "" if found.sound else found.reason


def _few_heads(case: Case, most: int) -> Case:
    """The first key heads, with as many value heads as `most` allows (one key head's at least)."""
    ratio = case["v"].shape[1] // case["q"].shape[1]
    n_key = max(1, min(case["q"].shape[1], most // ratio))
    n_value = n_key * ratio
    changed: dict[str, Tensor | None] = {n: case[n][:, :n_key].contiguous() for n in ("q", "k")}
    changed |= {n: case[n][:, :n_value].contiguous() for n in ("v", "g", "beta")}
    if case.get("initial_state") is not None:
        changed["initial_state"] = case["initial_state"][:, :n_value].contiguous()
    return case.with_tensors(**changed)


def families_for(contract_value: Any) -> dict[str, str]:
    """Family -> why it is left out for a kernel; empty: it is drawn. contract_value: `contract.value`."""
    left = dict.fromkeys(UNSOUND, "out of contract by construction")
    gate = str(contract_value("gate.inf", ""))
    if not gate.startswith("-inf is a reset"):
        left["minus-inf"] = "the contract does not promise that g = -inf is a reset"
    beta = contract_value("beta.range", [0, 1])
    if not (isinstance(beta, list | tuple) and max(beta) >= 2):
        left["negative-eigenvalues"] = "the contract has beta in 0..1"
    return {family: left.get(family, "") for family in FAMILIES}

"""Does the input lie where GDN kernels promise to work: each departure with token, value and consequence.

The idea: bad input is said before any kernel is blamed, and by severity. `bad-input` means that no kernel can
be right (NaN, Inf, values whose products overflow); `outside` that kernels promise nothing (g > 0, keys that
missed l2norm); `hint` that the input is allowed and worth a word (beta above 1, -inf gates, eps-dominated
rows). Each kind and tensor gives one finding, at its earliest token, with the number of rows. Sound input
gives none. Statements and constants: tier 1 of the verdict rules. What a kernel then did is not said here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .domain_keys import key_findings
from .domain_place import DomainFinding, Severity, place
from .overflow import CHUNK_SIZES, cancelled, chunk_sums, predict_overflow

__all__ = ["DomainFinding", "Severity", "check_domain", "describe"]

RANK: dict[Severity, int] = {"bad-input": 0, "outside": 1, "hint": 2}
FLOAT32_MAX = torch.finfo(torch.float32).max
HUGE_FACTOR = 2.0**10  # |v| or |S| within this factor of the largest number: sums over a chunk overflow
HUGE_KEY = math.sqrt(FLOAT32_MAX)  # the square of a larger entry of q or k is Inf in float32


@dataclass(frozen=True)
class _Call:
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    cu_seqlens: Tensor
    state: Tensor | None
    """Rows of fresh sequences are taken out (zeros)."""
    dtype: torch.dtype


def check_domain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    qk: Literal["raw", "normalised"] = "normalised",
    gate_space: Literal["log", "linear"] = "log",
    scale: float | None = None,
    dtype: torch.dtype | None = None,
    slot_indices: Tensor | None = None,
    n_slots: int | None = None,
) -> list[DomainFinding]:
    """Every departure from the domain: bad input first, then outside, then hints; earliest token first.

    q, k: [T, HK, K]; v: [T, HV, V]; g: [T, HV] or [T, HV, K], natural log unless gate_space is `linear`;
    beta: [T, HV]; cu_seqlens: [N+1], None for one sequence; initial_state: [N, HV, K, V].
    dtype: of the kernel's operands, None for v's own. Raises nothing for bad values.
    """
    cu = torch.tensor([0, v.shape[0]]) if cu_seqlens is None else cu_seqlens.detach().cpu().long()
    broken = list(_sequences(cu, v.shape[0], slot_indices, n_slots))
    if broken:
        return broken
    cu = cu.to(v.device)
    call = _Call(q, k, v, g, beta, cu, _kept(initial_state, has_initial_state), dtype or v.dtype)
    findings = [
        *_finite(call),
        *_scale(scale),
        *_huge(call),
        *_gate(call, gate_space),
        *_beta(call),
        *key_findings(q, k, beta, cu, qk),
    ]
    return sorted(findings, key=lambda f: (RANK[f.severity], -1 if f.row is None else f.row))


def describe(finding: DomainFinding) -> str:
    """One line: tensor, value, place, consequence."""
    where = ""
    if finding.token is not None:
        where = f" at token {finding.token} of sequence {finding.sequence}"
    elif finding.sequence is not None:
        where = f" of sequence {finding.sequence}"
    head = "" if finding.head is None else f", head {finding.head}"
    rows = f" ({finding.count} rows)" if finding.count > 1 else ""
    name = "the sum of g over a chunk" if finding.kind == "decay-sum" else finding.tensor
    return f"{name} is {finding.value:.6g}{where}{head}{rows}: {finding.consequence}"


def _sequences(
    cu: Tensor, n_tokens: int, slots: Tensor | None, n_slots: int | None
) -> Iterator[DomainFinding]:
    def bad(tensor: str, index: int, value: float, consequence: str) -> DomainFinding:
        return DomainFinding(
            "index", "bad-input", tensor, sequence=index, value=value, consequence=consequence
        )

    falls = (cu.diff() < 0).nonzero().flatten()
    if cu.dim() != 1 or len(cu) < 2:
        yield bad("cu_seqlens", 0, len(cu), "it needs N+1 entries, at least [0, T]")
    elif int(cu[0]) != 0:
        yield bad("cu_seqlens", 0, int(cu[0]), "it must start at 0: tokens before belong to no sequence")
    elif len(falls):
        at = int(falls[0]) + 1
        yield bad("cu_seqlens", at, int(cu[at]), f"it falls after {int(cu[at - 1])}: a length is negative")
    elif int(cu[-1]) != n_tokens:
        yield bad("cu_seqlens", len(cu) - 1, int(cu[-1]), f"it must end at T = {n_tokens}")
    if slots is not None and n_slots is not None:
        wrong = ((slots >= n_slots) | (slots < -1)).nonzero()
        if len(wrong):
            index = tuple(int(i) for i in wrong[0])
            value = int(slots[index])
            yield bad("slot_indices", index[0], value, f"the pool has {n_slots} slots; -1 is padding")


def _kept(state: Tensor | None, has_state: Tensor | None) -> Tensor | None:
    """A row that no sequence reads may hold anything."""
    if state is None or has_state is None:
        return state
    return torch.where(has_state.bool().view(-1, 1, 1, 1), state, torch.zeros_like(state))


def _finite(call: _Call) -> Iterator[DomainFinding]:
    for name in ("q", "k", "v", "g", "beta"):
        tensor: Tensor = getattr(call, name)
        bad = ~torch.isfinite(tensor)
        if name == "g":
            bad &= tensor != -math.inf  # a reset, judged by _gate
        yield from place(
            "non-finite", "bad-input", name, tensor, bad, call.cu_seqlens,
            "no kernel can be right from there on in this sequence",
        )  # fmt: skip
    if call.state is not None:
        yield from place(
            "non-finite", "bad-input", "initial_state", call.state, ~torch.isfinite(call.state), None,
            "no kernel can be right in this sequence",
        )  # fmt: skip


def _scale(scale: float | None) -> Iterator[DomainFinding]:
    if scale is not None and not math.isfinite(scale):
        yield DomainFinding(
            "non-finite", "bad-input", "scale", value=scale, consequence="every output is lost"
        )


def _huge(call: _Call) -> Iterator[DomainFinding]:
    """Finite values whose ordinary sums or products leave the number format."""
    largest = torch.finfo(call.dtype).max
    limits = {"q": HUGE_KEY, "k": HUGE_KEY, "v": largest / (4.0 if largest < 1e5 else HUGE_FACTOR)}
    for name, limit in limits.items():
        tensor: Tensor = getattr(call, name)
        if tensor.dtype == torch.float16 and name != "v":
            continue  # 65504^2 fits float32
        what = "its square" if name != "v" else "a sum of a few such values"
        yield from place(
            "huge", "bad-input", name, tensor, _beyond(tensor, limit), call.cu_seqlens,
            f"{what} overflows: products of this row are Inf or NaN in any kernel",
        )  # fmt: skip
    if call.state is not None:
        yield from place(
            "huge", "bad-input", "initial_state", call.state, _beyond(call.state, limits["v"]), None,
            f"it overflows as an operand of {str(call.dtype).removeprefix('torch.')} products",
        )  # fmt: skip


def _beyond(tensor: Tensor, limit: float) -> Tensor:
    magnitude = tensor.abs().float()
    return (magnitude > limit) & torch.isfinite(magnitude)


def _gate(call: _Call, gate_space: str) -> Iterator[DomainFinding]:
    g, cu = call.g, call.cu_seqlens
    if not g.numel():
        return
    if gate_space == "linear":
        yield from place(
            "gate-space", "outside", "g", g, g < 0, cu,
            "a linear decay lies in [0, 1]; this looks like the log of one: hand over exp(g)",
        )  # fmt: skip
        yield from place(
            "gate-sign", "outside", "g", g, (g > 1) & torch.isfinite(g), cu,
            "a decay above 1 makes the state grow",
        )  # fmt: skip
        return
    positive = (g > 0) & torch.isfinite(g)
    if bool(positive.any()) and not bool((g < 0).any()) and not bool((g > 1).any()):
        yield from place(
            "gate-space", "outside", "g", g, positive, cu,
            "every gate lies in [0, 1], so this looks like the linear decay: hand over its log",
        )  # fmt: skip
        return
    yield from place(
        "gate-sign",
        "outside",
        "g",
        g,
        positive,
        cu,
        "exp(g) is above 1, so the state grows at every such token",
    )
    yield from place(
        "gate-inf", "hint", "g", g, g == -math.inf, cu,
        "the recurrence resets the state here; a kernel that subtracts sums of g gets Inf - Inf = NaN",
    )  # fmt: skip
    yield from _decay_sums(call)


def _decay_sums(call: _Call) -> Iterator[DomainFinding]:
    g, cu = call.g, call.cu_seqlens
    predicted = predict_overflow(g, cu)
    if predicted.chunk_size is not None and predicted.row is not None:
        at = torch.zeros(g.shape[:2], dtype=torch.bool, device=g.device)
        at[predicted.row, predicted.head] = True
        yield from place(
            "decay-sum", "hint", "g", chunk_sums(g, cu, predicted.chunk_size), at, cu,
            f"a kernel that factors exp(G_i) exp(-G_j) overflows from chunk size {predicted.chunk_size} on",
        )  # fmt: skip
    finite = torch.where(torch.isfinite(g), g, 0.0).double()
    sums = chunk_sums(finite, cu, CHUNK_SIZES[-1]) if bool((finite < -1e30).any()) else None
    if sums is not None:
        yield from place(
            "gate-overflow", "outside", "g", g, g.double().clamp(min=-FLOAT32_MAX) < -FLOAT32_MAX / 128, cu,
            "the sum over a chunk is -Inf in float32, and Inf - Inf is NaN; -1e4 resets as well",
        )  # fmt: skip
    swallowed = cancelled(finite, cu, call.dtype)
    if swallowed is not None:
        row, head, error = swallowed
        at = torch.zeros(g.shape[:2], dtype=torch.bool, device=g.device)
        at[row, head] = True
        shown = g if g.dim() == 2 else g.amin(-1)
        yield from place(
            "cancellation", "hint", "g", shown, at, cu,
            f"a float32 sum that carries an earlier huge gate is off by {error:.1e} here",
        )  # fmt: skip


def _beta(call: _Call) -> Iterator[DomainFinding]:
    beta, cu = call.beta.float(), call.cu_seqlens
    finite = torch.isfinite(beta)
    negative = (beta < 0) & finite
    both = bool(negative.any()) and bool((beta > 1).any())
    raw = "; this looks like logits: hand over their sigmoid" if both else ""
    yield from place(
        "beta-range", "outside", "beta", beta, negative, cu,
        f"beta lies in [0, 1], or [0, 2] with negative eigenvalues{raw}",
    )  # fmt: skip
    yield from place(
        "beta-range", "outside", "beta", beta, (beta > 2) & finite, cu,
        f"beta |k|^2 above 2 makes the state grow{raw}",
    )  # fmt: skip
    if not both:
        yield from place(
            "beta-above-1", "hint", "beta", beta, (beta > 1) & (beta <= 2), cu,
            "an eigenvalue is negative; rounding may grow between 1 and 2, so no bound is claimed",
        )  # fmt: skip

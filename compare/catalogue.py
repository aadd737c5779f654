"""The catalogue of slightly different functions that a kernel may compute: data, walked by `hypotheses`.

The idea: an entry changes the inputs of the truth, or its result; nothing here knows about errors. Entries
that a sound kernel may have as its contract (an eps, a floor, a dtype on the way in) are `excusable`; the
rest are mistakes that have a name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from ..reference.l2norm import l2norm
from .inputs import Inputs
from .witness import Pair

LN2 = 0.6931471805599453
L2NORM_EPS = (1e-5, 1e-4, 1e-3, 1e-7, 1e-8, 1e-12)
ALPHA_OFFSETS = (1e-10, 1e-8, 1e-6, 1e-5, 1e-4, 1e-20, 1e-30)
GATE_FLOORS = (-5.0, -10.0, -20.0, -50.0, -80.0)
NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Entry:
    """One function of the catalogue."""

    id: str
    text: str
    """Completes `looks as if ...`."""
    excusable: bool
    inputs: Callable[[Inputs], Inputs] | None = None
    """Changes what the truth reads."""
    result: Callable[[Inputs, Pair], Pair] | None = None
    """Changes what the truth gives: from the inputs and (output, final state)."""
    needs: Callable[[Inputs], bool] = lambda inputs: True
    """Whether the entry means anything for a case."""
    rounds_state: bool = False
    """It explains a float32 state without low bits."""


def applicable(entry: Entry, inputs: Inputs) -> bool:
    return entry.needs(inputs)


def _replace(inputs: Inputs, **changed: object) -> Inputs:
    return msgspec.structs.replace(inputs, **changed)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    """Wide enough that another function of x is not rounded back to where it came from."""
    return x.double()


def _raw(inputs: Inputs) -> bool:
    return inputs.l2norm


def _wider_than_16(name: str) -> Callable[[Inputs], bool]:
    def needs(inputs: Inputs) -> bool:
        x = getattr(inputs, name)
        return x is not None and x.dtype not in NARROW

    return needs


def _normalised(inputs: Inputs, divide: Callable[[Tensor], Tensor]) -> Inputs:
    """q and k through another norm than the rule's."""
    return _replace(inputs, q=divide(inputs.q.double()), k=divide(inputs.k.double()), l2norm=False)


def _by_norm_plus(eps: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + eps)


def _root_eps(eps: float) -> Entry:
    text = f"its l2norm had eps {eps:g} in the root"
    return Entry(f"l2norm.eps {eps:g}", text, True, inputs=lambda x: _replace(x, l2norm_eps=eps), needs=_raw)


def _outer_eps(eps: float) -> Entry:
    return Entry(
        f"l2norm.eps-outside {eps:g}",
        f"its l2norm divided by the norm plus {eps:g}",
        True,
        inputs=lambda x: _normalised(x, _by_norm_plus(eps)),
        needs=_raw,
    )


def _l2norm_entries() -> list[Entry]:
    return [
        *(_root_eps(eps) for eps in L2NORM_EPS),
        *(_outer_eps(eps) for eps in (1e-6, 1e-5)),
        Entry(
            "l2norm.rounded",
            "q and k were rounded to their dtype after the l2norm",
            True,
            inputs=lambda x: _normalised(x, lambda y: l2norm(y, x.l2norm_eps).to(x.q.dtype)),
            needs=_raw,
        ),
        Entry(
            "l2norm.missing",
            "q and k were not normalised",
            False,
            inputs=lambda x: _replace(x, l2norm=False),
            needs=_raw,
        ),
        Entry(
            "l2norm.missing-k",
            "k was not normalised",
            False,
            inputs=lambda x: _replace(x, q=l2norm(x.q.double(), x.l2norm_eps), k=x.k.double(), l2norm=False),
            needs=_raw,
        ),
        Entry(
            "l2norm.doubled",
            "q and k were normalised although they came normalised",
            False,
            inputs=lambda x: _replace(x, l2norm=True),
            needs=lambda x: not x.l2norm,
        ),
    ]


def _alpha_offset(eps: float) -> Entry:
    return Entry(
        f"gate.alpha-offset {eps:g}",
        f"the decay were exp(g) + {eps:g}",
        True,
        inputs=lambda x: _replace(x, g=(x.g.double().exp() + eps).log()),
    )


def _gate_floor(floor: float) -> Entry:
    return Entry(
        f"gate.floor {floor:g}",
        f"g were clamped at {floor:g}",
        True,
        inputs=lambda x: _replace(x, g=x.g.clamp(min=floor)),
        needs=lambda x: bool((x.g < floor).any()),
    )


def _narrowed(entry_id: str, text: str, names: tuple[str, ...], dtype: torch.dtype) -> Entry:
    """Some inputs rounded to a 16-bit dtype on their way in."""
    return Entry(
        f"{entry_id} {_name(dtype)}",
        f"{text} rounded to {_name(dtype)}",
        True,
        inputs=lambda x: _replace(x, **{name: _rounded(getattr(x, name), dtype) for name in names}),
        needs=_wider_than_16(names[0]),
    )


def _mistake(name: str, text: str, field: str, function: Callable[[Tensor], Tensor]) -> Entry:
    """A wrong function of one input."""
    return Entry(
        name, text, False, inputs=lambda x: _replace(x, **{field: function(_wide(getattr(x, field)))})
    )


def _gate_entries() -> list[Entry]:
    mistakes: tuple[tuple[str, str, Callable[[Tensor], Tensor]], ...] = (
        ("gate.base-2", "g were taken to base 2: exp2(g)", lambda g: g * LN2),
        ("gate.base-e", "g, converted to base 2, were taken to base e", lambda g: g / LN2),
        ("gate.missing", "there were no decay", torch.zeros_like),
        ("gate.doubled", "the decay were applied twice", lambda g: 2 * g),
        ("gate.next", "each token had the next one's g", lambda g: torch.cat([g[1:], g[:1]])),
        ("gate.previous", "each token had the g before it", lambda g: torch.cat([g[-1:], g[:-1]])),
    )
    return [
        *(_alpha_offset(eps) for eps in ALPHA_OFFSETS),
        *(_gate_floor(floor) for floor in GATE_FLOORS),
        *(_narrowed("g.dtype", "g were", ("g",), dtype) for dtype in NARROW),
        *(_mistake(name, text, "g", function) for name, text, function in mistakes),
        Entry(
            "decay.after-error",
            "the error were taken before the decay",
            False,
            inputs=_error_before_decay,
            needs=lambda x: x.g.ndim == 2,
        ),
        Entry(
            "decay.after-write",
            "the decay came after the write",
            False,
            inputs=lambda x: _replace(x, v=x.v.double() * x.g.double().exp()[..., None]),
            needs=lambda x: x.g.ndim == 2,
        ),
    ]


def _error_before_decay(x: Inputs) -> Inputs:
    """u = beta (v - S^T k) with the state before its decay is the rule with beta / alpha and v alpha."""
    alpha = x.g.double().exp()
    return _replace(x, beta=x.beta.double() / alpha, v=x.v.double() * alpha[..., None])


def _beta_entries() -> list[Entry]:
    mistakes: tuple[tuple[str, str, Callable[[Tensor], Tensor]], ...] = (
        ("beta.squared", "beta were applied twice", lambda b: b * b),
        ("beta.missing", "beta were 1", torch.ones_like),
        ("beta.sigmoid", "beta went through another sigmoid", torch.sigmoid),
        ("beta.doubled", "beta were doubled", lambda b: 2 * b),
    )
    return [
        *(_narrowed("beta.dtype", "beta were", ("beta",), dtype) for dtype in NARROW),
        *(_mistake(name, text, "beta", function) for name, text, function in mistakes),
    ]


def _input_dtypes() -> list[Entry]:
    return [
        *(_narrowed("inputs.dtype", "q, k and v were", ("v", "q", "k"), dtype) for dtype in NARROW),
        *(
            _narrowed("state.handover", "the initial state were", ("initial_state",), dtype)
            for dtype in NARROW
        ),
    ]


def _state(x: Inputs) -> Tensor:
    assert x.initial_state is not None
    return x.initial_state


def _scale(name: str, text: str, factor: Callable[[Inputs], float]) -> Entry:
    return Entry(
        name,
        text,
        False,
        inputs=lambda x: _replace(x, scale=factor(x)),
        needs=lambda x: factor(x) != x.scale,
    )


def _scale_entries() -> list[Entry]:
    return [
        _scale("scale.missing", "the scale were 1", lambda x: 1.0),
        _scale("scale.squared", "the scale were applied twice", lambda x: x.scale**2),
        _scale(
            "scale.default",
            "the scale were K**-0.5, whatever was asked",
            lambda x: float(x.q.shape[-1]) ** -0.5,
        ),
        _scale("scale.value-dim", "the scale were V**-0.5", lambda x: float(x.v.shape[-1]) ** -0.5),
        _scale("scale.key-dim", "the scale were 1 / K", lambda x: 1.0 / x.q.shape[-1]),
    ]


def _square(x: Inputs) -> bool:
    return x.q.shape[-1] == x.v.shape[-1]


def _has_state(x: Inputs) -> bool:
    return x.initial_state is not None


def _layout_entries() -> list[Entry]:
    return [
        Entry(
            "state.returned-transposed",
            "the final state were returned as [V, K]",
            False,
            result=lambda x, pair: (pair[0], pair[1].mT),
            needs=_square,
        ),
        Entry(
            "state.taken-transposed",
            "the initial state were taken as [V, K]",
            False,
            inputs=lambda x: _replace(x, initial_state=_state(x).mT),
            needs=lambda x: _has_state(x) and _square(x),
        ),
        Entry(
            "state.transposed",
            "states were taken and returned as [V, K]",
            False,
            result=_both_transposed,
            needs=lambda x: _has_state(x) and _square(x),
        ),
        Entry(
            "state.dropped",
            "the initial state were taken for zero",
            False,
            inputs=lambda x: _replace(x, initial_state=None),
            needs=_has_state,
        ),
        Entry(
            "state.previous",
            "each sequence started from the state of the one before it",
            False,
            inputs=lambda x: _replace(x, initial_state=_state(x).roll(1, 0)),
            needs=lambda x: _has_state(x) and x.n_sequences > 1,
        ),
        Entry(
            "state.rounded bfloat16",
            "the final state were rounded to bfloat16",
            False,
            result=lambda x, pair: (pair[0], pair[1].bfloat16().double()),
            rounds_state=True,
        ),
        Entry(
            "state.unwritten",
            "the initial state were returned",
            False,
            result=lambda x, pair: (pair[0], _state(x).double()),
            needs=_has_state,
        ),
        Entry(
            "heads.interleaved",
            "value head h read key head h mod HK",
            False,
            inputs=_interleaved,
            needs=lambda x: 1 < x.q.shape[1] < x.heads,
        ),
        Entry(
            "heads.first",
            "every value head read key head 0",
            False,
            inputs=lambda x: _replace(x, q=x.q[:, :1], k=x.k[:, :1]),
            needs=lambda x: x.q.shape[1] > 1,
        ),
        Entry(
            "heads.shifted",
            "heads were shifted by one",
            False,
            result=lambda x, pair: (pair[0].roll(1, 1), pair[1].roll(1, 1)),
            needs=lambda x: x.heads > 1,
        ),
        Entry(
            "tokens.shifted",
            "each token's output were the one before it",
            False,
            result=lambda x, pair: (pair[0].roll(1, 0), pair[1]),
        ),
        Entry("q-k.swapped", "q and k were swapped", False, inputs=lambda x: _replace(x, q=x.k, k=x.q)),
    ]


def _both_transposed(x: Inputs, pair: Pair) -> Pair:
    from ..reference.truth import truth

    output, state = truth(**_replace(x, initial_state=_state(x).mT).keywords())
    return output, state.mT


def _interleaved(x: Inputs) -> Inputs:
    order = torch.arange(x.heads, device=x.device) % x.q.shape[1]
    return _replace(x, q=x.q[:, order], k=x.k[:, order])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


CATALOGUE: tuple[Entry, ...] = tuple(
    [
        *_l2norm_entries(),
        *_gate_entries(),
        *_beta_entries(),
        *_input_dtypes(),
        *_scale_entries(),
        *_layout_entries(),
    ]
)

"""Other values for some tokens of a call: finite, inside the domain, and loud.

The idea: a leak is linear in v, so replacement values a billion times as large as the case's own make a
leak of one part in a billion stand out, where rounding would hide it; keys and queries keep their norms and
decays stay decays, so that the changed call is as sound as the first. `poison` is for what is multiplied by
zero.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from ..inputs import Inputs

LOUDNESS = 2.0**30
# Replacement values stay this far below the dtype's largest number.
HEADROOM = 2.0**-6


def generator(seed: int, salt: int) -> torch.Generator:
    """A seeded source of numbers, apart for every use."""
    return torch.Generator().manual_seed((seed * 1_000_003 + salt) % (1 << 62))


def replace_tokens(inputs: Inputs, rows: Tensor, *, seed: int, salt: int) -> Inputs:
    """The call with q, k, v, g and beta replaced at `rows` ([R] packed tokens)."""
    dice = generator(seed, salt)
    return msgspec.structs.replace(
        inputs,
        q=_turned(inputs.q, rows, dice),
        k=_turned(inputs.k, rows, dice),
        v=_loud(inputs.v, rows, dice),
        g=_put(inputs.g, rows, _other_decay(inputs.g[rows], dice)),
        beta=_put(inputs.beta, rows, _other_beta(inputs.beta[rows], dice)),
    )


def replace_states(inputs: Inputs, sequences: Tensor, *, seed: int, salt: int) -> Inputs:
    """The call with the initial states of some sequences replaced; unchanged where it has none."""
    if inputs.initial_state is None or len(sequences) == 0:
        return inputs
    state = _loud(inputs.initial_state, sequences, generator(seed, salt + 1))
    return msgspec.structs.replace(inputs, initial_state=state)


def poison(inputs: Inputs, rows: Tensor, sequences: Tensor) -> Inputs:
    """The call with NaN in every number of these rows and of these sequences' initial states."""
    changed = {}
    for name in ("q", "k", "v", "g", "beta"):
        changed[name] = getattr(inputs, name).clone()
        changed[name][rows] = torch.nan
    if inputs.initial_state is not None:
        changed["initial_state"] = inputs.initial_state.clone()
        changed["initial_state"][sequences] = torch.nan
    return msgspec.structs.replace(inputs, **changed)


def _random(shape: torch.Size, dice: torch.Generator, device: torch.device) -> Tensor:
    return torch.randn(shape, generator=dice, dtype=torch.float32).to(device)


def _put(x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    changed = x.clone()
    changed[rows] = values.to(x.dtype)
    return changed


def _turned(x: Tensor, rows: Tensor, dice: torch.Generator) -> Tensor:
    """Other directions, the same norms."""
    old = x[rows].float()
    new = _random(old.shape, dice, x.device)
    length = torch.linalg.vector_norm(old, dim=-1, keepdim=True)
    return _put(x, rows, new * (length / torch.linalg.vector_norm(new, dim=-1, keepdim=True)))


def _loud(x: Tensor, rows: Tensor, dice: torch.Generator) -> Tensor:
    size = float(x.float().square().mean().sqrt()) if x.numel() else 0.0
    largest = float(torch.finfo(x.dtype).max) * HEADROOM
    size = min(LOUDNESS * (size or 1.0), largest / 8)
    return _put(x, rows, _random(x[rows].shape, dice, x.device).clamp(-6, 6) * size)


def _other_decay(g: Tensor, dice: torch.Generator) -> Tensor:
    """Weaker or stronger than before, never growth; a reset becomes an ordinary decay."""
    factor = torch.rand(g.shape, generator=dice).to(g.device) + 0.5
    ordinary = torch.where(torch.isfinite(g), g, -1.0).clamp(-50.0, 0.0)
    return ordinary * factor - 0.01


def _other_beta(beta: Tensor, dice: torch.Generator) -> Tensor:
    share = torch.rand(beta.shape, generator=dice).to(beta.device) * 0.5 + 0.4
    return torch.where(beta > 0, beta.float() * share, 0.5 * share)

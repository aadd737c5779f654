"""Is a set of tensors a canonical case: names, shapes, dtypes, indices, the claim that all is finite.

The idea: one table says what each tensor looks like in terms of shared sizes (T, HK, HV, K, V, N, ...);
the sizes are read from the tensors that define them and every other tensor is held against them.
Whether the *values* lie in a kernel's domain (gate sign, key norms) is `reference.domain`'s business.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..reference.domain_place import locate
from .errors import BadInput

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = (torch.int32, torch.int64)


class Layout(NamedTuple):
    """What one tensor may look like."""

    shapes: tuple[tuple[str, ...], ...]
    """Allowed shapes, in symbols of SIZES or literal sizes."""
    dtypes: tuple[torch.dtype, ...] = FLOATS


LAYOUTS: dict[str, Layout] = {
    "q": Layout((("T", "HK", "K"),)),
    "k": Layout((("T", "HK", "K"),)),
    "v": Layout((("T", "HV", "V"),)),
    "g": Layout((("T", "HV"), ("T", "HV", "K")), (torch.float32,)),
    "beta": Layout((("T", "HV"),)),
    "cu_seqlens": Layout((("N+1",),), (torch.int64,)),
    "initial_state": Layout((("N", "HV", "K", "V"),)),
    "has_initial_state": Layout((("N",),), (torch.bool,)),
    "pool": Layout((("slots", "HV", "K", "V"),)),
    "slot_indices": Layout((("N",), ("N", "columns")), INTEGERS),
    "conv_input": Layout((("T", "D"),)),
    "conv_weight": Layout((("D", "W"),)),
    "conv_bias": Layout((("D",),)),
    "conv_state": Layout((("N", "D", "W-1"),)),
    "a": Layout((("T", "HV"),)),
    "b": Layout((("T", "HV"),)),
    "A_log": Layout((("HV",),)),
    "dt_bias": Layout((("HV",),)),
    "z": Layout((("T", "HV", "V"),)),
    "norm_weight": Layout((("V",),)),
    "conv_pool": Layout((("slots", "D", "W-1"),)),
    "read_slot_indices": Layout((("N",),), INTEGERS),
    "conv_output": Layout((("T", "D"),)),
    "core_output": Layout((("T", "HV", "V"),)),
    "draft": Layout((("N",),), INTEGERS),
    "num_accepted": Layout((("N",),), INTEGERS),
    "state_columns": Layout((("N",), ("N", "columns")), INTEGERS),
    "observed_output": Layout((("T", "HV", "V"),)),
    "observed_core_output": Layout((("T", "HV", "V"),)),
    "observed_final_state": Layout((("N", "HV", "K", "V"),)),
    "observed_conv_state": Layout((("N", "D", "W-1"),)),
    "observed_layer_output": Layout((("T", "hidden"),)),
}
RULE = ("q", "k", "v", "g", "beta", "cu_seqlens")
REQUIRED: dict[str, tuple[str, ...]] = {
    "rule": RULE,
    "core": (*RULE, "conv_input", "conv_weight", "a", "b", "A_log", "dt_bias"),
    "verify": (*RULE, "draft", "num_accepted"),
}
# The tensor that defines each size, and the axis; any tensor later in the table must follow it.
SIZES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("v", ("T", "HV", "V")),
    ("k", ("T", "HK", "K")),
    ("cu_seqlens", ("N+1",)),
    ("conv_weight", ("D", "W")),
)
# What an engine computed may hold anything: that is the evidence. The finite claim is about inputs.
OBSERVED = "observed_"
# Tensors whose first axis is the token, so that a bad row can be named by token and sequence.
PER_TOKEN = frozenset(name for name, layout in LAYOUTS.items() if layout.shapes[0][0] == "T")


def check_tensors(tensors: Mapping[str, Tensor], op: str, *, finite: bool, where: str) -> None:
    """Raise BadInput, one line starting with `where`, for the first way in which tensors are not canonical.

    finite: whether the maker claims that every input tensor is finite (observed_* are not covered).
    """
    for problem in problems(tensors, op, finite=finite):
        raise BadInput(f"{where}: {problem}")


def problems(tensors: Mapping[str, Tensor], op: str, *, finite: bool) -> Iterator[str]:
    """Every way in which the tensors are not canonical, most basic first; stop at the first to be safe."""
    if op not in REQUIRED:
        yield f"op is {op!r}; this version knows {', '.join(REQUIRED)}"
        return
    yield from _names(tensors, op)
    sizes: dict[str, int] = {}
    yield from _measure(tensors, sizes)
    yield from _shapes(tensors, sizes)
    yield from _sequences(tensors["cu_seqlens"], sizes["T"])
    yield from _states(tensors)
    yield from _verify(tensors)
    if finite:
        yield from _finite(tensors)


def first_nonfinite(name: str, tensor: Tensor, cu_seqlens: Tensor | None) -> str | None:
    """Where the tensor's first NaN or Inf stands, in words, or None."""
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    bad = ~torch.isfinite(tensor)
    if not bool(bad.any()):
        return None
    index = [int(i) for i in bad.nonzero()[0]]
    value = float(tensor[tuple(index)])
    if name in PER_TOKEN and cu_seqlens is not None:
        sequence, token = locate(cu_seqlens, index[0])
        place = f"token {token} of sequence {sequence}"
        return f"{value} at {place} (row {index[0]}, index {index[1:]})"
    return f"{value} at index {index}"


def _names(tensors: Mapping[str, Tensor], op: str) -> Iterator[str]:
    for name in REQUIRED[op]:
        if name not in tensors:
            have = ", ".join(sorted(tensors)) or "none"
            yield f"tensor {name} is missing, op {op!r} needs it (there are: {have}); write it too"
    for name in tensors:
        if name not in LAYOUTS:
            near = difflib.get_close_matches(name, LAYOUTS, n=1, cutoff=0.8)
            if near:
                yield f"tensor {name} is unknown; did you mean {near[0]}?"


def _measure(tensors: Mapping[str, Tensor], sizes: dict[str, int]) -> Iterator[str]:
    for name, symbols in SIZES:
        if name not in tensors:
            continue
        tensor = tensors[name]
        if tensor.dim() != len(symbols):
            yield _rank(name, tensor, (symbols,))
        for symbol, size in zip(symbols, tensor.shape, strict=False):
            if sizes.setdefault(symbol, size) != size:
                other = f"{_definer(symbol)} has {symbol}={sizes[symbol]}"
                yield f"{name} has {symbol}={size} but {other}; write the tensors of one call"
    sizes["N"] = sizes["N+1"] - 1
    if "W" in sizes:
        sizes["W-1"] = sizes["W"] - 1
    for symbol in ("HK", "HV", "K", "V"):
        if sizes[symbol] < 1:
            yield f"{_definer(symbol)} has {symbol}=0; a case needs at least one"
    if sizes["HV"] % sizes["HK"]:
        yield (
            f"{sizes['HV']} value heads (v) are no multiple of {sizes['HK']} key heads (k); "
            "each value head h reads key head h // (HV/HK)"
        )


def _shapes(tensors: Mapping[str, Tensor], sizes: dict[str, int]) -> Iterator[str]:
    for name, layout in LAYOUTS.items():
        if name not in tensors:
            continue
        tensor = tensors[name]
        if tensor.dtype not in layout.dtypes:
            allowed = " or ".join(_dtype(d) for d in layout.dtypes)
            yield f"{name} is {_dtype(tensor.dtype)}; a case keeps it as {allowed}: convert it first"
        for symbols in layout.shapes:
            if len(symbols) == tensor.dim():
                break
        else:
            yield _rank(name, tensor, layout.shapes)
        for axis, symbol in enumerate(symbols):
            size = tensor.shape[axis]
            if size != sizes.setdefault(symbol, size):
                expected = ", ".join(f"{s}={sizes[s]}" if s in sizes else s for s in symbols)
                yield (
                    f"{name} has shape {list(tensor.shape)} but [{expected}] is expected "
                    f"({symbol} as in {_definer(symbol)}); write the tensors of one call"
                )
    if "conv_weight" in tensors:
        channels = 2 * sizes["HK"] * sizes["K"] + sizes["HV"] * sizes["V"]
        if sizes["D"] != channels:
            yield (
                f"conv_weight has {sizes['D']} channels but q|k|v of this case have {channels} "
                "(2*HK*K + HV*V); write the weight of the same layer"
            )


def _sequences(cu: Tensor, n_tokens: int) -> Iterator[str]:
    if len(cu) < 2:
        yield f"cu_seqlens has {len(cu)} entries; it needs N+1, at least [0, {n_tokens}]"
        return
    if int(cu[0]) != 0:
        yield f"cu_seqlens starts at {int(cu[0])}; it must start at 0"
    falls = (cu[1:] < cu[:-1]).nonzero()
    if len(falls):
        at = int(falls[0])
        yield (
            f"cu_seqlens is not monotone: entry {at + 1} is {int(cu[at + 1])} after {int(cu[at])}; "
            "write cumulative lengths"
        )
    if int(cu[-1]) != n_tokens:
        yield (
            f"cu_seqlens ends at {int(cu[-1])} but q has {n_tokens} tokens; "
            f"re-capture, or write the first {min(int(cu[-1]), n_tokens)} tokens alone"
        )


def _states(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    pool, slots, fresh = (tensors.get(n) for n in ("pool", "slot_indices", "has_initial_state"))
    conv_past = {"conv_state", "conv_pool"} & set(tensors)
    if pool is not None and "initial_state" in tensors:
        yield "has both initial_state and pool; keep one: pool with slot_indices, or the gathered state"
    if len(conv_past) == 2:
        yield "has both conv_state and conv_pool; keep one: a pool with slot_indices, or the gathered state"
    if (pool is None) != (slots is None) and not (pool is None and "conv_pool" in tensors):
        have, lack = ("pool", "slot_indices") if slots is None else ("slot_indices", "pool")
        yield f"has {have} without {lack}; write both, or initial_state instead"
    stateless = pool is None and "initial_state" not in tensors and not conv_past
    if fresh is not None and stateless and bool(fresh.any()):
        yield (
            f"has_initial_state is true for sequence {int(fresh.nonzero()[0])} but there is neither "
            "initial_state nor pool; write the state, or false"
        )
    yield from _conv_slots(tensors)
    if pool is None or slots is None:
        return
    bad = ((slots >= pool.shape[0]) | (slots < -1)).nonzero()
    if len(bad):
        index = tuple(int(i) for i in bad[0])
        yield (
            f"slot_indices{list(index)} is {int(slots[index])} but pool has {pool.shape[0]} slots; "
            f"use 0..{pool.shape[0] - 1}, or -1 for padding"
        )
    yield from _shared_slots(slots, tensors["cu_seqlens"])


def _conv_slots(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Slots of a convolution's pool: those it leaves its states in, and those it starts from."""
    pool = tensors.get("conv_pool")
    if pool is None:
        if "read_slot_indices" in tensors:
            yield "has read_slot_indices without conv_pool; write both, or conv_state instead"
        return
    if "slot_indices" not in tensors:
        yield "has conv_pool without slot_indices; write both, or conv_state instead"
        return
    for name in ("slot_indices", "read_slot_indices"):
        slots = tensors.get(name)
        if slots is None:
            continue
        bad = ((slots >= pool.shape[0]) | (slots < -1)).flatten().nonzero()
        if len(bad):
            yield (
                f"{name}[{int(bad[0])}] is {int(slots.flatten()[bad[0]])} but conv_pool has {pool.shape[0]} "
                f"slots; use 0..{pool.shape[0] - 1}, or -1 for padding"
            )
    if "pool" not in tensors:
        yield from _shared_slots(tensors["slot_indices"], tensors["cu_seqlens"])


def _shared_slots(slots: Tensor, cu: Tensor) -> Iterator[str]:
    """Two sequences with tokens in one slot would race; an empty sequence writes nothing."""
    owner: dict[int, int] = {}
    lengths = (cu[1:] - cu[:-1]).tolist()
    for sequence, row in enumerate(slots.reshape(len(slots), -1).tolist()):
        for slot in row:
            if slot < 0 or not lengths[sequence]:
                continue
            if slot in owner:
                yield (
                    f"slot_indices gives slot {slot} to sequence {owner[slot]} and to sequence {sequence}; "
                    "each needs its own, padding is -1"
                )
            owner[slot] = sequence


def _verify(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Drafts fit their calls; what was accepted is a column, or without columns a token of the call."""
    draft, accepted = tensors.get("draft"), tensors.get("num_accepted")
    slots = tensors.get("slot_indices")
    columns = slots.shape[1] if slots is not None and slots.dim() == 2 else None
    cu = tensors["cu_seqlens"]
    for sequence, length in enumerate((cu[1:] - cu[:-1]).tolist()):
        drafted = length if draft is None else int(draft[sequence])
        if not 0 <= drafted <= length:
            yield f"draft[{sequence}] is {drafted} of {length} tokens; give 0..{length}"
        taken = 1 if accepted is None else int(accepted[sequence])
        if columns is not None and not 1 <= taken <= columns:
            yield f"num_accepted[{sequence}] is {taken} but slot_indices has columns 1..{columns}; give one"
        elif columns is not None and length > columns:
            yield (
                f"sequence {sequence} has {length} tokens but slot_indices has {columns} columns; "
                "a step needs one per token"
            )
        elif columns is None and accepted is not None and not 0 <= taken <= length:
            yield f"num_accepted[{sequence}] is {taken} of {length} tokens; give 0..{length}"


def _finite(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    for name, tensor in tensors.items():
        if name.startswith(OBSERVED):
            continue
        found = first_nonfinite(name, tensor, tensors.get("cu_seqlens"))
        if found:
            yield (
                f"{name} holds {found} but the header says that the case is finite; "
                "re-capture, or write it again with finite=False to judge it as it is"
            )


def _rank(name: str, tensor: Tensor, shapes: tuple[tuple[str, ...], ...]) -> str:
    expected = " or ".join(f"[{', '.join(s)}]" for s in shapes)
    batched = tensor.dim() == len(shapes[0]) + 1 and tensor.dim() > 0 and tensor.shape[0] == 1
    remedy = "drop the leading batch dimension" if batched else "write the packed layout"
    return f"{name} has shape {list(tensor.shape)} but {expected} is expected; {remedy}"


def _definer(symbol: str) -> str:
    for name, symbols in SIZES:
        if symbol in symbols:
            return name
    return {"N": "cu_seqlens", "W-1": "conv_weight", "slots": "pool"}.get(symbol, "the other tensors")


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

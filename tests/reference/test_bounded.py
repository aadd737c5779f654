"""The reference stands alone, and its memory does not grow with the number of tokens."""

from __future__ import annotations

import ast
import sys
import weakref
from pathlib import Path

import pytest
import torch
from gdncheck.reference import chunk, conv, recurrence
from gdncheck.reference.chunk import chunk_form
from gdncheck.reference.conv import causal_conv
from gdncheck.reference.truth import truth
from torch.utils._python_dispatch import TorchDispatchMode

REFERENCE = Path(chunk.__file__).parent


@pytest.mark.parametrize("path", sorted(REFERENCE.glob("*.py")), ids=lambda path: path.name)
def test_a_reference_module_imports_more_than_torch(path):
    allowed = {"torch", *sys.stdlib_module_names}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            # Relative, and no further up than this folder.
            assert node.level == 1 or (node.level == 0 and (node.module or "").split(".")[0] in allowed)


class PeakBytes(TorchDispatchMode):
    """Bytes of live storages that operations made while it was on, `given` tensors' own left out."""

    def __init__(self, given):
        super().__init__()
        self.given = {x.untyped_storage().data_ptr() for x in given}
        self.holders, self.sizes, self.live, self.peak = {}, {}, 0, 0

    def release(self, key):
        self.holders[key] -= 1
        if not self.holders[key]:
            self.live -= self.sizes.pop(key)
            del self.holders[key]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes():
                key = tensor.untyped_storage().data_ptr()
                if key in self.given:
                    continue
                if key not in self.holders:
                    self.holders[key], self.sizes[key] = 0, tensor.untyped_storage().nbytes()
                    self.live += self.sizes[key]
                    self.peak = max(self.peak, self.live)
                self.holders[key] += 1
                weakref.finalize(tensor, self.release, key)
        return result


def peak_beside_results(run, *given):
    with PeakBytes(given) as bytes_:
        results = run()
    return bytes_.peak - sum(x.untyped_storage().nbytes() for x in results)


def rule_case(T, dtype=torch.float32):
    make = torch.Generator().manual_seed(0)
    k = torch.nn.functional.normalize(torch.randn(T, 2, 16, generator=make), dim=-1)
    v = torch.randn(T, 4, 16, generator=make)
    g, beta = -torch.rand(T, 4, generator=make), torch.rand(T, 4, generator=make)
    return {name: x.to(dtype) for name, x in {"q": k, "k": k, "v": v, "g": g, "beta": beta}.items()}


@pytest.mark.parametrize("form", ["chunk", "truth", "truth with a bad token", "recurrence", "conv"])
def test_memory_beyond_inputs_and_outputs_grows_with_the_number_of_tokens(form, monkeypatch):
    monkeypatch.setitem(chunk.PIECE_BYTES, "cpu", 1 << 22)
    monkeypatch.setattr(recurrence, "BLOCK_ENTRIES", 1 << 14)
    monkeypatch.setattr(conv, "BLOCK_ENTRIES", 1 << 14)

    def peak(T):
        case = rule_case(T)
        if form == "conv":
            weight, x = torch.ones(64, 4), case["v"].flatten(1)
            return peak_beside_results(lambda: causal_conv(x, weight), x, weight)
        if form == "recurrence":
            return peak_beside_results(lambda: recurrence.recurrence(**case), *case.values())
        if form == "chunk":
            return peak_beside_results(
                lambda: [(r := chunk_form(**case)).output, r.final_state], *case.values()
            )
        if form != "truth":
            case["g"][100] = 0.5
            case["v"][300] = float("nan")
        return peak_beside_results(lambda: truth(**case), *case.values())

    # Bookkeeping of a few integers per token (conv) or chunk is all that may grow.
    allowed = 16 if form == "conv" else 1
    assert peak(4000) <= peak(1000) + allowed * 3000


def test_the_peak_meter_misses_a_tensor_that_grows_with_the_number_of_tokens():
    def peak(T):
        return peak_beside_results(lambda: [(torch.ones(T, 10).double() * 2).sum(0)])

    assert peak(4000) - peak(1000) >= 3000 * 10 * 8


def test_one_piece_holds_more_than_its_budget(monkeypatch):
    for budget in (1 << 22, 1 << 24):
        monkeypatch.setitem(chunk.PIECE_BYTES, "cpu", budget)
        case = rule_case(3000)
        assert peak_beside_results(lambda: truth(**case), *case.values()) <= 1.1 * budget  # noqa: B023

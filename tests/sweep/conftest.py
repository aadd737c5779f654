"""What the sweep's tests share: small cases, and the planted kernels found by import path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gdncheck.capture.make import make
from gdncheck.compare.sweep.sweep import sweep


@pytest.fixture(autouse=True)
def _one_thread():
    """Small cases: a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_case():
    """make('qwen', ...) at 7 tokens and two heads of 16 x 16."""

    def build(**options):
        shape = {"lengths": [7], "k_heads": 1, "v_heads": 2, "dims": (16, 16), "state": "random", "seed": 1}
        return make(options.pop("family", "qwen"), **{**shape, **options})

    return build


@pytest.fixture
def sweep_of(monkeypatch, small_case):
    """sweep_of('planted kernel', case options, only=...) -> SweepReport."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def run(name, case=None, **options):
        kernel = name if "." in name else f"planted:{name}"
        return sweep(small_case(**(case or {})), kernels=[kernel], device="cpu", **options)

    return run

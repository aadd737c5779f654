"""The faulty kernels of tests/faulty, by name, for the families of publicly reported faults."""

import sys
from pathlib import Path

import pytest
import torch

FOLDER = str(Path(__file__).parent.parent / "faulty")
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)


@pytest.fixture(autouse=True)
def _one_thread():
    """Small cases: a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def bench():
    """One worker with all faulty kernels."""
    from faulty_run import Bench

    with Bench() as opened:
        yield opened

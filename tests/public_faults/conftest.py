"""The faulty kernels of tests/faulty, by name, for the families of publicly reported faults."""

import sys
from pathlib import Path

import pytest

FOLDER = str(Path(__file__).parent.parent / "faulty")
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)


@pytest.fixture(scope="module")
def bench():
    """One worker with all faulty kernels."""
    from faulty_run import Bench

    with Bench() as opened:
        yield opened

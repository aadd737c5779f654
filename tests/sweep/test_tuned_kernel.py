"""The axis autotune on import-path kernels: their own tuners are found, pinned, and the bad pin is named."""

from __future__ import annotations

import pytest
from gdncheck.compare.sweep.jsonout import document

COPY = "planted_copy_kernel"


EARLY = pytest.param("gdncheck.kernels.planted_triton:rule", marks=pytest.mark.slow)


@pytest.mark.parametrize("kernel", ["late_triton:rule", EARLY])
def test_pins_of_a_kernel_by_import_path_are_not_found(kernel, processes):
    report = processes(kernel, {"lengths": [20, 7], "dims": (32, 32)}, only=["autotune"])
    plain = document(report)
    tried = [row["config"]["autotune"] for row in plain["results"] if row["verdict"] != "skipped"]
    assert tried[:4] == ["tuner", *(f"{COPY}:BLOCK={size}" for size in (64, 128, 256))]
    assert plain["first_nonfinite"] is None
    assert plain["first_wrong"]["deviations"] == {"autotune": f"{COPY}:BLOCK=128"}
    assert plain["first_wrong"]["place"]["tensor"] == "state"

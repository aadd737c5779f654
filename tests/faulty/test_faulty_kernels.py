"""Every faulty kernel of the table fails: by a right tier, at the right place; its unbroken twin passes.

The kernels run in a worker and are judged by the whole of `session` and `judge`. What each verdict may say is
data (`faulty_model.Fault`); a fault that no tier can see is in the table with the reason, and must pass.
"""

from __future__ import annotations

import random

import pytest
from faulty_base import BASES, namespace
from faulty_model import CASES
from faulty_run import POOLS, Bench, case_of
from faulty_table import FAULTS
from gdncheck.compare.diff import diff

ROWS = [(name, case) for name, fault in FAULTS.items() for case in fault.cases]
UNSEEN = [name for name, fault in FAULTS.items() if fault.unseen]
RESETS = "minus-inf"


@pytest.fixture(scope="module")
def bench():
    with Bench() as opened:
        yield opened


@pytest.mark.parametrize(("fault", "case"), ROWS, ids=[f"{f}-{c}" for f, c in ROWS])
def test_a_faulty_kernel_slips_through_or_is_misplaced(fault, case, bench):
    complaint = bench.complaint(fault, case, bench.judge(fault, case))
    assert not complaint, complaint


@pytest.mark.parametrize("case", [*CASES, *POOLS])
def test_the_unbroken_chunk_kernel_is_accused(case, bench):
    asked = "all" if case in ("packed", "alone", "fresh", "pool", "raw") else "quick"
    ruling = bench.judge("chunk", case, relations=asked).ruling
    wanted = "out-of-contract" if case == RESETS else "pass"
    assert ruling.verdict == wanted, ruling.reason


@pytest.mark.parametrize("case", ["packed", "fp32", "fresh", RESETS])
def test_the_unbroken_recurrence_is_accused(case, bench):
    ruling = bench.judge("recurrent", case, relations="all" if case == "packed" else "quick").ruling
    assert ruling.verdict == "pass", ruling.reason


def test_the_table_holds_too_few_faults_or_one_without_an_expectation():
    assert len(FAULTS) - len(UNSEEN) >= 100
    for name, fault in FAULTS.items():
        assert fault.tiers, name
        assert set(fault.cases) <= {*CASES, *POOLS}, name


@pytest.mark.parametrize("fault", UNSEEN)
def test_a_fault_that_is_called_unseen_does_nothing_at_all(fault):
    """It must be a fault: some bit differs from the unbroken twin's, or its edit ran and left the bits."""
    ran = []

    def counted(edit):
        return lambda value, run: ran.append(1) or edit(value, run)

    entry = FAULTS[fault]
    case = case_of(entry.cases[0])
    fields = {n: case[n] for n in ("q", "k", "v", "g", "beta", "cu_seqlens")}
    fields |= {"state": case["initial_state"], "scale": case.scale, "l2norm": case.options.qk == "raw"}
    edits = {point: counted(edit) for point, edit in entry.edits.items()}
    broken, _ = BASES[entry.base](namespace(**fields), edits, {})
    sound, _ = BASES[entry.base](namespace(**fields), {}, {})
    assert ran
    assert float((broken.float() - sound.float()).abs().max()) < 0.05 * float(sound.float().abs().max())


def test_a_faulty_kernel_by_import_path_is_judged_otherwise():
    """The same through the library's front door: a name, its own worker, nothing declared."""
    report = diff(
        case_of("packed"), kernels=["faulty_kernels:beta_squared", "faulty_kernels:chunk"], device="cpu"
    )
    assert [r.verdict for r in report.results] == ["fail", "pass"]
    assert report.exit_status == 1


GRID = [
    {"dtype": dtype, "dims": dims, "k_heads": k_heads, "v_heads": v_heads, "seed": seed}
    for seed, (dtype, dims, k_heads, v_heads) in enumerate(
        [
            ("bf16", (64, 32), 2, 4),
            ("fp16", (32, 32), 2, 4),
            ("fp16", (32, 64), 4, 8),
            ("fp32", (32, 64), 2, 4),
            ("fp32", (64, 64), 4, 8),
            ("bf16", (128, 128), 2, 4),
            ("bf16", (32, 32), 2, 8),
        ],
        start=1,
    )
]
# Faults of which the verdict does not depend on the precision of the case.
GROSS = [
    name
    for name, fault in FAULTS.items()
    if fault.cases == ("packed",) and fault.verdict == "fail" and not fault.unseen and 4 not in fault.tiers
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "grid", GRID, ids=lambda g: f"{g['dtype']}-{g['dims']}-{g['k_heads']}-{g['v_heads']}"
)
def test_a_faulty_kernel_slips_through_in_another_precision_or_shape(grid):
    dice = random.Random(grid["seed"])
    slipped = []
    with Bench(grid) as bench:
        for name in dice.sample(GROSS, 30):
            ruling = bench.judge(name, "packed").ruling
            # With K unlike V a transposed state does not even multiply.
            if ruling.verdict not in ("fail", "error"):
                slipped.append(f"{name}: {ruling.verdict}: {ruling.reason}")
        ruling = bench.judge("chunk", "packed").ruling
    assert ruling.verdict == "pass", ruling.reason
    assert not slipped, "\n".join(slipped)

"""Contracts as data: every clause has a source, casts are those of the emulation, relations are all named."""

import subprocess
import sys

import pytest
from gdncheck.capture.errors import BadInput
from gdncheck.kernels.contracts_fla import contract_for
from gdncheck.reference.precision import PROFILES

NAMES = ("fla.chunk", "fla.recurrent", "transformers.chunk", "emulation.chunk", "emulation.recurrent")
# numerics.md, tier 4.
RELATIONS = (
    "causality", "isolation", "run-to-run", "split-concat", "prefix-state", "head-permutation",
    "sequence-permutation", "slot-permutation", "power-of-two-scaling", "beta-zero", "batch-invariance",
    "call-order", "first-vs-warm", "across-processes", "unowned",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("version", [None, "0.4.0", "0.6.0"])
def test_every_relation_has_its_word_and_reason(name, version):
    contract = contract_for(name, version)
    for relation in RELATIONS:
        clause = contract.find(f"relation.{relation}")
        assert clause is not None, relation
        assert clause.value in ("promised", "observed", "not promised")
        assert ": " in clause.source, f"{relation} gives no reason"


@pytest.mark.parametrize("name", NAMES)
def test_clause_ids_are_unique_and_sourced(name):
    clauses = contract_for(name, None).clauses
    assert len({c.id for c in clauses}) == len(clauses)
    assert all(c.source for c in clauses)


@pytest.mark.parametrize(
    ("name", "version", "chunk_size", "profile"),
    [
        ("fla.chunk", "0.4.0", 64, "fla-0.4"),
        ("fla.chunk", "0.4.0", 16, "fla-0.4"),
        ("fla.chunk", "0.4.2", 64, "fla-0.4"),
        ("fla.chunk", "0.5.0", 64, "fla-0.6"),
        ("fla.chunk", "0.5.1", 16, "fla-0.6-small"),
        ("fla.chunk", "0.6.0", 64, "fla-0.6"),
        ("fla.chunk", "0.6.0", 32, "fla-0.6-small"),
        ("fla.recurrent", "0.6.0", 64, "fla-recurrent"),
        ("transformers.chunk", None, 64, "hf-torch"),
        ("package.kernel", None, 64, "generic"),
    ],
)
def test_casts_are_those_that_the_emulation_executes(name, version, chunk_size, profile):
    contract = contract_for(name, version, chunk_size)
    table = PROFILES[profile]
    assert contract.value("precision.profile") == profile
    assert contract.rounding() == dict(table.casts)
    dots = {c.id.removeprefix("dot."): c.value for c in contract.clauses if c.id.startswith("dot.")}
    assert dots == dict(table.dots)


def test_versions_differ_where_their_sources_do():
    old, new = contract_for("fla.chunk", "0.4.0"), contract_for("fla.chunk", "0.6.0")
    assert old.value("chunk_size") == [64]
    assert new.value("chunk_size") == [16, 32, 64]
    assert old.value("heads.ratio") != new.value("heads.ratio")
    assert old.value("dot.solve") is None
    assert new.value("dot.solve") == "tf32"


@pytest.mark.parametrize(
    ("clause", "last_with"),
    [("lengths.empty", "0.5.0"), ("triton", "0.5.1"), ("context-parallel", None)],
)
def test_a_clause_ends_with_another_version_than_the_source(clause, last_with):
    """The versions between those that were read: an empty sequence, block pointers, a splitting kernel."""
    declared = [
        version
        for version in ("0.3.2", "0.4.0", "0.4.1", "0.4.2", "0.5.0", "0.5.1", "0.5.2", "0.6.0")
        if contract_for("fla.chunk", version).find(clause) is not None
    ]
    if last_with is None:
        assert declared[0] == "0.4.2"
        assert declared[-1] == "0.6.0"
    else:
        assert declared[-1] == last_with


def test_run_to_run_is_promised_by_all_and_other_processes_by_no_tuned_kernel():
    for name in NAMES:
        assert contract_for(name, None).relation("run-to-run") == "promised"
    assert contract_for("fla.chunk", None).relation("across-processes") == "not promised"
    assert contract_for("fla.recurrent", None).relation("across-processes") == "promised"


def test_an_operation_that_a_family_lacks_is_named():
    with pytest.raises(BadInput, match=r"no contract for fla\.conv; known here: fla\.chunk"):
        contract_for("fla.conv", None)


def test_a_contract_needs_no_kernel_package():
    code = (
        "import sys; import gdncheck.kernels.emulation, gdncheck.kernels.contracts_fla as c; "
        "c.contract_for('fla.chunk', '0.6.0'); "
        "print([m for m in ('triton', 'fla', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""docs/kernels.md is what the contracts say: no clause, kernel or version is missing or told otherwise."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from gdncheck.kernels import manual, registry
from gdncheck.kernels.contract import Clause, Contract
from gdncheck.kernels.keep import pins

ROOT = Path(__file__).resolve().parents[2]
KERNELS = sorted(registry.own_kernels())


def test_the_page_in_docs_is_stale_or_edited_by_hand():
    assert (ROOT / "docs" / "kernels.md").read_text() == manual.manual(), "run: make docs"


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_clause_of_a_tested_version_is_not_on_the_page(kernel):
    page = manual.manual()
    section = page[page.index(f"\n## {kernel}\n") :].partition("\n## ")[2].partition("\n## ")[0]
    contracts = manual.contracts_of(kernel)
    assert contracts
    for version, contract in contracts.items():
        assert version in section
        for clause in contract.clauses:
            assert clause.id.removeprefix("relation.") in section, clause.id
            assert manual._cell(manual._value(clause.value)) in section, clause


def test_a_tested_version_is_left_out():
    told = {version for kernel in KERNELS for version in manual.contracts_of(kernel)}
    assert {name.partition("==")[2] for name in pins()} <= told


def test_a_clause_that_holds_in_some_versions_is_told_as_if_in_all():
    def clause(value):
        return Clause(id="gate.space", kind="domain", applies_to="g", value=value, source="a file")

    versions = {name: Contract(kernel=f"x@{name}", clauses=(clause("log"),)) for name in ("1", "2", "3", "4")}
    same = manual.clauses_of(versions)
    assert [span for _, span in same.values()] == [["1", "2", "3", "4"]]
    versions["4"] = msgspec.structs.replace(versions["4"], clauses=(clause("linear"),))
    rows = [pair for _, pair in sorted(manual.clauses_of(versions).items())]
    told = "\n".join(manual._table(rows, list(versions)))
    assert "log (in 1 to 3)" in told
    assert "linear (in 4)" in told

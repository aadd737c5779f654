"""A finding is run again as it was kept; mended kernels, other failures and machines are told apart."""

from __future__ import annotations

import json

import msgspec
import pytest
from gdncheck.capture.casefile import read_case, write_case
from gdncheck.capture.errors import BadInput
from gdncheck.compare.finding import facts_in, find, with_facts
from gdncheck.compare.replay import dumps, lines, replay
from gdncheck.compare.store import RunStore


def test_a_kept_failure_does_not_come_again(inside, leak):
    found = replay(leak.path)
    assert found.outcome == "same"
    assert found.exit_status == 1
    assert found.rate.failures == found.rate.runs == 3
    assert found.changed == {}
    assert "the same failure as was kept" in "\n".join(lines(found))


def test_a_mended_kernel_still_fails_or_is_not_named(inside, leak):
    found = replay(leak.path, "shrinkable:leaks_mended")
    assert found.outcome == "passes"
    assert found.exit_status == 0
    assert found.changed["kernel"] == ("shrinkable:leaks", "shrinkable:leaks_mended")


def test_another_failure_passes_for_the_one_that_was_kept(inside, leak):
    found = replay(leak.path, "shrinkable:swapped")
    assert found.outcome == "another failure"
    assert found.exit_status == 1
    assert json.loads(dumps(found))["kept"]["kernel"] == "shrinkable:leaks"


def test_another_driver_is_not_named(inside, leak, tmp_path):
    case = read_case(leak.path)
    facts = facts_in(case)
    machine = {**facts.machine, "gpu": {"name": "NVIDIA H20", "driver": "550.1", "cuda": "12.4"}}
    path = tmp_path / "elsewhere.safetensors"
    write_case(with_facts(case, msgspec.structs.replace(facts, machine=machine)), path)
    assert replay(path).changed["GPU"][0] == "NVIDIA H20"


def test_a_plain_case_needs_no_kernel(inside, leak_start):
    with pytest.raises(BadInput, match="name one with --kernel"):
        replay(leak_start)
    assert replay(leak_start, "shrinkable:leaks").outcome == "same"


def test_a_finding_of_a_store_is_not_found_by_its_first_digits(inside, leak, leak_start, tmp_path):
    run = tmp_path / "night"
    with RunStore.open(run, parameters={"what": "fuzz"}, resume=False) as store:
        digest = store.add_finding(
            leak.signature, {"attempt": {"verdict": "fail", "reason": "r"}}, status="shrunk",
            case_file=store.put_case(leak_start), shrunk_file=store.put_case(leak.case),
            options={"seed": 0, "device": "cpu"}, failures=3, runs=3,
        )  # fmt: skip
    words = f"{run}/{digest[:6]}"
    assert find(words).case.n_tokens == 2
    assert find(words, original=True).case.n_tokens == leak_start.n_tokens
    for original in (False, True):
        assert replay(words, original=original).outcome == "same"
    with pytest.raises(BadInput, match="no finding starts so"):
        find(f"{run}/ffffffffffffffff")


def test_a_word_that_is_neither_file_nor_finding_ends_in_a_traceback(tmp_path):
    with pytest.raises(BadInput, match="neither a case file nor RUN/SIGNATURE"):
        find(tmp_path / "nothing")

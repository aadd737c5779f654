"""Gates in the wrong space are blamed on the input, whichever way round, and sound ones on nobody."""

from __future__ import annotations

import msgspec
import pytest
from gdncheck.capture.make import make
from gdncheck.compare.soundness import soundness_of
from gdncheck.compare.witness import Witness

FAMILIES = ("qwen", "long-memory", "mixed-decay", "tiny-decay")


def soundness(case):
    return soundness_of(Witness(case, device="cpu", seed=0))


def declared(case, gate_space):
    return msgspec.structs.replace(case, options=msgspec.structs.replace(case.options, gate_space=gate_space))


def cases(family):
    for seed in range(3):
        yield make(family, lengths=(40 + seed, 3, 20), seed=seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_log_gate_declared_linear_is_not_named(family):
    for case in cases(family):
        found = soundness(declared(case, "linear"))
        assert not found.sound
        assert found.place["tensor"] == "g"
        assert "linear" in found.reason


@pytest.mark.parametrize("family", ["qwen", "long-memory"])
def test_a_linear_gate_declared_log_is_not_named(family):
    for case in cases(family):
        found = soundness(case.with_tensors(g=case["g"].exp()))
        assert not found.sound
        assert found.place["tensor"] == "g"
        assert "linear" in found.reason


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gate_in_the_space_it_declares_is_accused(family):
    for case in cases(family):
        assert soundness(case).sound
        assert soundness(declared(case.with_tensors(g=case["g"].exp()), "linear")).sound

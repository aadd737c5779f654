"""$GDNCHECK_TUNE: how a process's kernels choose their configuration where a call does not say."""

from __future__ import annotations

import pytest
from gdncheck.capture.errors import BadInput
from gdncheck.kernels import autotune


def chosen(tune):
    with autotune.pinned({}, tune):
        return autotune._tune


def test_a_call_that_says_nothing_ignores_the_variable(monkeypatch):
    monkeypatch.delenv(autotune.TUNE_VARIABLE, raising=False)
    assert chosen("stock") == "stock"
    monkeypatch.setenv(autotune.TUNE_VARIABLE, "never")
    assert chosen("stock") == "never"


def test_a_call_that_says_how_obeys_the_variable_instead(monkeypatch):
    monkeypatch.setenv(autotune.TUNE_VARIABLE, "never")
    assert chosen("fresh") == "fresh"


def test_pins_of_an_adapter_inside_a_call_forget_how_it_tunes():
    with autotune.pinned({}, "never"):
        assert chosen(None) == "never"


def test_a_word_that_means_nothing_is_taken_for_a_way_to_tune(monkeypatch):
    monkeypatch.setenv(autotune.TUNE_VARIABLE, "off")
    before = autotune._tune
    with pytest.raises(BadInput, match="'off'; use stock, never, fresh"), autotune.pinned({}, "stock"):
        pass
    assert autotune._tune == before

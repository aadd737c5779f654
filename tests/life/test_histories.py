"""Histories: drawn by number, stored, cut down without changing a token, and never without sense."""

from __future__ import annotations

from random import Random

import pytest
import torch
from gdncheck.capture.errors import BadInput
from gdncheck.compare.life.draw import draw_history
from gdncheck.compare.life.legal import sensible
from gdncheck.compare.life.named import NAMED, named_history
from gdncheck.compare.life.steps import (
    Arrive,
    Call,
    Decode,
    Finish,
    Preempt,
    Prefill,
    Resume,
    Verify,
    dumps,
    read_history,
    step_words,
    write_history,
)
from gdncheck.compare.life.tokens import Drawn, Sizes


def kinds(history):
    return {type(s) for s in history.steps} | {
        type(r) for s in history.steps if isinstance(s, Call) for r in s.rows
    }


def test_a_history_is_not_a_function_of_seed_and_number():
    first = draw_history(5, 3, 150)
    assert dumps(first) == dumps(draw_history(5, 3, 150))
    assert first.steps != draw_history(5, 4, 150).steps
    assert first.steps != draw_history(6, 3, 150).steps
    assert draw_history(5, 3, 60).steps == first.steps[:60]


def test_a_kind_of_event_is_never_drawn():
    histories = [draw_history(2, n) for n in range(3)]
    everything = {Arrive, Call, Preempt, Resume, Finish, Prefill, Decode, Verify}
    assert set().union(*map(kinds, histories)) == everything
    calls = [s for h in histories for s in h.steps if isinstance(s, Call)]
    rows = [r for c in calls for r in c.rows]
    assert {s.source for h in histories for s in h.steps if isinstance(s, Resume)} == {
        "kept", "checkpoint", "zero",
    }  # fmt: skip
    assert {c.padding for c in calls if c.padded} == {"-1", "0", "stale"}
    assert any(isinstance(r, Prefill) and r.tokens == 1 for r in rows)
    assert any(r.keep for r in rows if not isinstance(r, Verify))
    assert {0, 3} <= {r.accepted for r in rows if isinstance(r, Verify)}
    mixed = [c for c in calls if {type(r) for r in c.rows} >= {Prefill, Decode}]
    assert mixed


@pytest.mark.parametrize("seed", range(4))
def test_a_part_of_a_history_makes_no_sense(seed, told):
    """Whatever delta debugging leaves over can be run, and stays as it is when asked again."""
    dice = Random(seed)
    history = draw_history(9, seed, 120)
    kept = tuple(s for s in history.steps if dice.random() < 0.5)
    part = sensible(history.with_steps(kept))
    assert sensible(part) == part
    assert 0 < len(part.steps) <= len(kept)
    assert told(part, judged=False).failure is None


def test_a_token_depends_on_what_else_is_in_the_history():
    tokens = Drawn(7, Sizes(dtype="bfloat16"))
    alone = tokens.rule([(4, 9, False)])
    among = tokens.rule([(0, 0, False), (4, 9, False), (4, 9, True)])
    for name, value in alone.items():
        assert torch.equal(value[0], among[name][1]), name
        assert name == "g" or not torch.equal(among[name][1], among[name][2]), name
    assert torch.equal(
        tokens.conv([(4, 9, False)])[0], Drawn(7, Sizes(dtype="bfloat16")).conv([(4, 9, False)])[0]
    )
    assert not torch.equal(Drawn(8, Sizes()).rule([(4, 9, False)])["v"], alone["v"].float())


def test_tokens_leave_the_domain():
    tokens = Drawn(3, Sizes(key_dim=16))
    x = tokens.rule([(s, p, False) for s in range(3) for p in range(40)])
    assert bool((x["k"].double().square().sum(-1) <= 1 + 1e-6).all())
    assert bool((x["g"] < 0).all())
    assert bool(((x["beta"] > 0) & (x["beta"] < 1)).all())
    assert 0.8 < float(x["v"].std()) < 1.2


def test_a_stored_history_is_another_one(tmp_path):
    history = draw_history(1, 2, 80)
    write_history(history, tmp_path / "h.json")
    assert read_history(tmp_path / "h.json") == history
    assert len((tmp_path / "h.json").read_text().splitlines()) == len(history.steps) + 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "no history"),
        ('{"steps": [{"do": "dance"}]}', "no history"),
        ('{"steps": [], "format": 9}', "format 9"),
        ('{"steps": [], "slots": 1}', "1 slots"),
    ],
)
def test_a_file_that_is_no_history_ends_in_a_traceback(tmp_path, text, words):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=words) as error:
        read_history(path)
    assert "\n" not in str(error.value)
    with pytest.raises(BadInput, match="cannot be read"):
        read_history(tmp_path / "absent.json")


@pytest.mark.parametrize("name", NAMED)
def test_a_named_history_leaves_a_token_out(name, told):
    lengths = [9, 1, 0, 6, 2]
    run = told(named_history(name, lengths), judged=False)
    assert run.failure is None
    assert all((s, t) in run.outputs for s, n in enumerate(lengths) for t in range(n))
    assert set(run.states) >= {0, 1, 3, 4}
    assert run.padded == (8 if name == "padded" else 0)


def test_a_step_has_no_words():
    assert all(step_words(s) for s in draw_history(1, 1, 100).steps)

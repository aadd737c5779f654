"""The ledger: each rule fires on its breach, with a line that names who and when, and is silent otherwise."""

from __future__ import annotations

import pytest
import torch
from gdncheck.compare.life.ledger import Ledger


@pytest.fixture
def pool():
    return torch.zeros(6, 1, 2, 2)


@pytest.fixture
def ledger(pool):
    """Slot 1: sequence 0 at position 5, written at step 3; slot 2: a rejected guess of it at position 6."""
    made = Ledger("state", pool)
    for slot, position, rejected in ((1, 5, False), (2, 6, True)):
        pool[slot] = float(slot)
        made.write(3, slot, 0, position, pool[slot], rejected=rejected)
    return made


def read(ledger, pool, slot, sequence, start):
    return ledger.check_read(7, slot, sequence, start, f"sequence {sequence}", pool[slot])


def test_a_sequence_reads_its_own_last_write(ledger, pool):
    assert read(ledger, pool, 1, 0, 5) is None


def test_a_fresh_sequence_reads_a_slot_that_is_zero(ledger, pool):
    assert read(ledger, pool, 4, 9, 0) is None
    pool[1] = 0
    ledger.clear(6, 1, pool[1])
    assert read(ledger, pool, 1, 9, 0) is None


@pytest.mark.parametrize(
    ("slot", "sequence", "start", "rule", "words"),
    [
        (1, 4, 0, "read", "sequence 4 read slot 1, last written at step 3 by sequence 0 (position 5)"),
        (4, 4, 2, "read", "sequence 4 read slot 4, never written"),
        (1, 0, 6, "position", "sequence 0 has seen 6 tokens"),
        (2, 0, 6, "position", "a rejected guess"),
    ],
)
def test_a_wrong_read_is_silent(ledger, pool, slot, sequence, start, rule, words):
    breach = read(ledger, pool, slot, sequence, start)
    assert breach.rule == rule
    assert words in breach.line
    assert (breach.step, breach.slot) == (7, slot)


def test_bits_that_changed_since_are_read_in_silence(ledger, pool):
    pool[1] += 1
    assert read(ledger, pool, 1, 0, 5).rule == "content"


def test_a_slot_of_a_sequence_that_has_ended_is_still_its_own(ledger, pool):
    ledger.end(4, 0, "was preempted", 5)
    assert read(ledger, pool, 1, 0, 5) is None, "its checkpoint stays"
    ledger.end(5, 0, "finished")
    breach = read(ledger, pool, 1, 0, 5)
    assert breach.rule == "read"
    assert "which finished at step 5" in breach.line


def test_the_only_copy_of_a_state_is_written_over(ledger, pool):
    assert ledger.check_write(7, 1, 4, "sequence 4", {(0, 5)}).rule == "owner"
    assert ledger.check_write(7, 1, 4, "sequence 4", {(0, 8)}) is None, "nobody reads it again"
    assert ledger.check_write(7, 1, 0, "sequence 0", {(0, 5)}) is None, "its own"
    ledger.copy(5, 1, 3, pool[1])
    assert ledger.check_write(7, 1, 4, "sequence 4", {(0, 5)}) is None, "there is a copy"
    assert ledger.check_write(7, 0, 4, "sequence 4", set()).rule == "owner", "slot 0 is nobody's"


@pytest.mark.parametrize(("padded", "words"), [([], "the call changed"), ([1], "a padded row wrote")])
def test_a_slot_that_nobody_was_to_write_may_change(ledger, pool, padded, words):
    assert ledger.check_kept(7, pool, [4], padded) is None
    pool[4] = 3
    pool[0] = 3
    assert ledger.check_kept(7, pool, [4], padded) is None
    pool[1, 0, 1, 1] = torch.nan
    breach = ledger.check_kept(7, pool, [4], padded)
    assert breach.rule == "unowned"
    assert words in breach.line
    assert "by sequence 0 (position 5)" in breach.line


def test_nan_that_stays_is_taken_for_a_change(pool):
    pool[3] = torch.nan
    assert Ledger("state", pool).check_kept(1, pool.clone(), [], []) is None


def test_a_padded_row_shares_a_slot_with_a_row(ledger, pool):
    assert ledger.check_kept(7, pool, [4], [4]).rule == "unowned"
    assert ledger.check_kept(7, pool, [4], [0, -1]) is None

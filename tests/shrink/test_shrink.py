"""A failing case shrinks to what its fault needs; never to another fault, unsound input or a larger case."""

from __future__ import annotations

import msgspec
import pytest
import torch
from gdncheck.capture.casefile import read_case
from gdncheck.capture.errors import BadInput
from gdncheck.compare.finding import facts_in
from gdncheck.compare.shrink import reduce
from gdncheck.compare.soundness import soundness_of
from gdncheck.compare.witness import Witness


def test_a_boundary_fault_keeps_tokens_heads_or_values_that_it_does_not_need(shrunk, small_case):
    found = shrunk("boundary", small_case(129), deviations={"split": "at-63", "state": "slot-order"})
    assert found.case.lengths == [65]
    assert found.case["v"].shape[1] == found.case["q"].shape[1] == 1
    assert found.case.get("initial_state") is None
    assert found.deviations == {"split": "at-63"}, "a deviation that does not matter is still there"
    assert found.confirmed
    assert float(found.case["beta"].max()) > 0.9
    assert found.stopped == "smallest"


def test_the_nearest_passing_case_is_missing_or_fails(leak):
    near = leak.neighbour
    assert near is not None
    assert near.attempt.verdict == "pass"
    assert near.case.n_tokens <= leak.case.n_tokens


def test_a_leak_between_neighbours_loses_one_of_them(leak):
    assert leak.case.n_sequences == 2
    assert leak.case.n_tokens == 2
    assert leak.case["v"].shape[1] == 1


def test_a_swapped_state_is_not_brought_to_one_token(shrunk, small_case):
    found = shrunk("swapped", small_case(40, 9))
    assert (found.case.n_tokens, found.case.n_sequences, found.case["v"].shape[1]) == (1, 1, 1)


def test_shrinking_slips_to_another_fault(shrunk, small_case):
    found = shrunk("two_faults", small_case(130))
    assert found.case.n_tokens == 71, "the other fault shows at 6 tokens"
    assert found.fault.kind == "nonfinite"


@pytest.mark.slow
def test_a_flake_is_lost_or_believed_after_one_run(shrunk, small_case):
    said = []
    found = shrunk("flaky", small_case(40), report=lambda text, *numbers: said.append(text))
    assert found.case.n_tokens == 21
    assert found.case["v"].shape[1] == 1
    assert 0.05 < found.start_rate.value < 0.5
    assert any("up to" in text and "runs for each candidate" in text for text in said)
    assert found.rate.runs > 3, "a flake was confirmed by as many runs as a steady failure"


@pytest.mark.parametrize(
    ("name", "kind", "lengths"), [("seems_to_crash", "crash", [21]), ("seems_to_hang", "timeout", [17])]
)
def test_a_crash_or_a_hang_is_not_shrunk(shrunk, small_case, name, kind, lengths):
    found = shrunk(name, small_case(60, 17, 9))
    assert found.fault.kind == kind
    assert found.case.lengths == lengths
    assert found.case["v"].shape[1] == 1
    assert found.neighbour is not None


def test_the_result_is_larger_than_the_start_or_unsound(shrunk, small_case, leak):
    smallest = shrunk("leaks", leak.case, runs=30)
    for found in (leak, smallest):
        assert found.size <= found.start_size
        assert soundness_of(Witness(found.case)).sound
    assert smallest.size.elements == leak.size.elements, "what was smallest is not any more"


def test_a_case_that_does_not_fail_is_shrunk(shrunk, small_case):
    with pytest.raises(BadInput, match="does not fail on it: pass"):
        shrunk("sound", small_case(5))


def test_another_signature_than_the_one_asked_for_is_shrunk(shrunk, small_case):
    with pytest.raises(BadInput, match=r"fails, but not as 0{16} says: its signature is [0-9a-f]{16}"):
        shrunk("leaks", small_case(5, 5), signature="0" * 16)


def test_the_signature_of_the_start_is_refused(shrunk, leak):
    for wanted in (leak.signature, leak.signature.digest):
        assert shrunk("leaks", leak.case, signature=wanted, runs=6).signature == leak.signature


def test_kept_files_lack_the_facts_that_a_replay_needs(leak):
    facts = facts_in(read_case(leak.path))
    assert facts is not None
    assert facts.kernel == "shrinkable:leaks"
    assert facts.signature == leak.signature.digest
    assert facts.kind == "wrong"
    assert read_case(reduce.passing_path(leak.path)).n_tokens > 0
    left = [path.name for path in leak.path.parent.iterdir() if "jsonl" in path.name]
    assert left == [], "the journal is left over"


def test_a_budget_of_runs_loses_what_was_reached_or_cannot_go_on(shrunk, leak_start, leak, tmp_path):
    out = tmp_path / "small.safetensors"
    first = shrunk("leaks", leak_start, out=out, runs=15)
    assert first.stopped == "runs"
    assert read_case(out).n_tokens == first.case.n_tokens < leak_start.n_tokens
    second = shrunk("leaks", leak_start, out=out)
    assert second.stopped == "smallest"
    assert second.case.n_tokens == 2
    assert second.tried < leak.tried, "what the first one tried is tried again"


def test_an_interrupt_loses_the_best_so_far(shrunk, small_case, tmp_path, monkeypatch):
    out = tmp_path / "small.safetensors"
    kept = []
    accept = reduce.Journal.accept

    def interrupting(journal, candidate):
        accept(journal, candidate)
        kept.append(candidate.case.n_tokens)
        if len(kept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(reduce.Journal, "accept", interrupting)
    found = shrunk("leaks", small_case(30, 40, 20), out=out)
    assert found.stopped == "interrupted"
    assert found.exit_status == 130
    assert read_case(out).n_tokens == found.case.n_tokens


def test_a_pool_stays_where_gathered_states_would_do(shrunk, small_case):
    case = small_case(6, 5)
    state = case["initial_state"]
    pool = torch.cat([state, state * 0 + 7.0])
    pooled = case.with_tensors(
        initial_state=None, pool=pool, slot_indices=torch.tensor([1, 0], dtype=torch.int32)
    )
    assert shrunk("leaks", pooled, runs=9).case.get("pool") is None


def test_the_report_of_a_shrink_is_no_document(leak):
    from gdncheck.compare.shrink.report import document, lines

    found = leak
    plain = document(found)
    assert plain["smallest"]["tokens"] == 2
    assert plain["fault"] == msgspec.to_builtins(found.fault)
    assert plain["neighbour"]["verdict"] == "pass"
    text = "\n".join(lines(found))
    assert "passes:" in text
    assert "fails:" in text

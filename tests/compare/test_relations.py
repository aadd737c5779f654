"""Relations: each breach fires at its place, a sound kernel is silent, each proves that it was exercised."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from gdncheck.compare.inputs import inputs_of
from gdncheck.compare.relations import causality, causality_cuts, isolation, run_to_run


def outcomes_of(result, name):
    return [o for o in result.ruling.outcomes if o.check == name]


def test_a_result_that_moves_is_taken_for_rounding(honest, case_of, verdict_on, as_rule):
    def moving(q, k, v, g, beta, **options):
        output, state = honest.chunk(q, k, v, g, beta, **options)
        moving.calls += 1
        output[75, 1, 3] *= 1 + 2.0**-7 * (moving.calls % 2)
        return output, state

    moving.calls = 0
    result = verdict_on(as_rule(moving), case_of())
    assert (result.verdict, result.ruling.rule, result.ruling.tier) == ("fail", "run-to-run", 4)
    place = result.ruling.worst_tile
    assert (place.class_, place.sequence, place.head, place.token) == ("moves", 2, 1, 4)


def test_a_moving_result_is_forgiven_only_by_a_clause(honest, case_of, verdict_on, as_rule):
    def moving(q, k, v, g, beta, **options):
        output, state = honest.chunk(q, k, v, g, beta, **options)
        moving.calls += 1
        output[75, 1, 3] *= 1 + 2.0**-7 * (moving.calls % 2)
        return output, state

    moving.calls = 0
    clause = {"id": "relation.run-to-run", "kind": "relation", "applies_to": "run-to-run", "source": "test"}
    clause["value"] = "not promised"
    result = verdict_on(as_rule(moving), case_of(), capabilities={"clauses": [clause]})
    assert result.verdict == "pass", result.ruling.reason


def test_a_quiet_leak_from_later_tokens_is_below_every_tolerance(honest, case_of, verdict_on, as_rule):
    def leaking(q, k, v, g, beta, **options):
        output, state = honest.recurrent(q, k, v, g, beta, **options)
        cu = options["cu_seqlens"].tolist()
        for start, end in pairwise(cu):
            if end - start > 1:
                output[start:end] += 1e-3 * v[end - 1]
        return output, state

    result = verdict_on(as_rule(leaking), case_of(dtype="fp32", lengths=[70, 1, 130]))
    fired = outcomes_of(result, "causality")
    assert result.verdict == "fail"
    assert [o.status for o in fired] == ["fires"]
    assert fired[0].place.token == 0


def test_a_state_shared_between_sequences_is_missed(honest, case_of, verdict_on, as_rule):
    def sharing(q, k, v, g, beta, **options):
        output, state = honest.chunk(q, k, v, g, beta, **options)
        if state.shape[0] > 1:
            state[1] += 1e-3 * state[0]
        return output, state

    result = verdict_on(as_rule(sharing), case_of())
    fired = [o for o in outcomes_of(result, "isolation") if o.status == "fires"]
    assert result.verdict == "fail"
    assert fired
    assert (fired[0].place.tensor, fired[0].place.sequence) == ("state", 1)


def test_a_kernel_that_is_right_alone_and_wrong_in_company_passes(honest, case_of, verdict_on, as_rule):
    """One sequence in the case; packed between strangers the kernel starts it from the neighbour's state."""

    def company(q, k, v, g, beta, **options):
        if len(options["cu_seqlens"]) > 2 and options["initial_state"] is not None:
            options["initial_state"] = options["initial_state"].roll(1, 0)
        return honest.chunk(q, k, v, g, beta, **options)

    result = verdict_on(as_rule(company), case_of(lengths=[90]))
    assert (result.verdict, result.ruling.rule) == ("fail", "isolation")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_sound_kernel_breaks_a_relation(dtype, honest, case_of, verdict_on, as_rule):
    for lengths in ([90], [40, 1, 0, 65], [1, 1]):
        result = verdict_on(honest.chunk, case_of(dtype=dtype, lengths=lengths))
        relations = [o for o in result.ruling.outcomes if o.tier == 4]
        assert result.verdict == "pass", result.ruling.reason
        assert {o.check for o in relations} >= {"run-to-run", "isolation"}
        assert {o.status for o in relations} <= {"ok", "not-applicable"}, relations
        asked = {o.check: o for o in relations if o.status == "ok"}
        assert set(asked) >= {
            "run-to-run",
            "isolation",
            "beta-zero",
            "prefix-state",
            "batch-invariance",
            "call-order",
        }
        assert all(o.numbers["exercised"] > 0 for o in asked.values())


def test_a_relation_that_was_not_exercised_counts_as_held(case_of, verdict_on, as_rule):
    def deaf(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
        n = len(cu_seqlens) - 1
        return torch.zeros_like(v), torch.zeros(n, v.shape[1], q.shape[-1], v.shape[-1])

    result = verdict_on(deaf, case_of())
    assert result.verdict == "fail"
    assert {o.status for name in ("causality", "isolation") for o in outcomes_of(result, name)} == {
        "not-applicable"
    }


def test_changed_calls_leave_the_domain_or_what_must_not_change(case_of):
    inputs = inputs_of(case_of(lengths=[40, 1, 30]))
    isolated = isolation.plan(inputs, seed=3)
    planned = [*causality.plan(inputs, seed=3), *isolated]
    assert len(planned) == 5
    for expectation in planned:
        poisoned = expectation in isolated[2:]
        kept, changed = expectation.output_rows[0], expectation.changed_rows
        assert sorted([*kept.tolist(), *changed.tolist()]) == list(range(71))
        for name in ("q", "k", "v", "g", "beta"):
            before, after = getattr(inputs, name), getattr(expectation.inputs, name)
            assert torch.equal(before[kept], after[kept])
            assert not torch.equal(before[changed], after[changed])
            assert bool(torch.isfinite(after[kept if poisoned else slice(None)]).all())
            assert not poisoned or bool(torch.isnan(after[changed]).all())
        if poisoned:
            continue
        assert float(expectation.inputs.g.max()) <= 0
        assert 0 <= float(expectation.inputs.beta.min()) <= float(expectation.inputs.beta.max()) <= 1
    assert run_to_run.plan(inputs, seed=0)[0].inputs is inputs


def test_a_row_read_past_the_end_and_multiplied_by_zero_goes_unseen(honest, case_of, verdict_on, as_rule):
    """A sequence reads the row behind its last one; 0 * x shows only where x is not finite."""

    def past_the_end(q, k, v, g, beta, **options):
        output, state = honest.chunk(q, k, v, g, beta, **options)
        output = output.clone()
        for end in options["cu_seqlens"][1:-1].tolist():
            output[end - 1] += 0 * v[end].sum().to(output.dtype)
        return output, state

    for lengths in ([40, 1, 30], [90]):
        result = verdict_on(as_rule(past_the_end), case_of(lengths=lengths))
        assert (result.verdict, result.ruling.rule) == ("fail", "isolation"), result.ruling.reason
        place = result.ruling.worst_tile
        assert place.class_ == "nan"
        assert place.token == lengths[place.sequence] - 1


@pytest.mark.parametrize("distance", [1, 2, 3])
@pytest.mark.parametrize("token", [0, 15, 62, 86])
def test_a_leak_into_one_token_far_below_rounding_goes_unseen(
    token, distance, honest, case_of, verdict_on, as_rule
):
    """The output is float32, so no rounding swallows a ten-thousandth of a later value."""

    def leaky(q, k, v, g, beta, **options):
        output, state = honest.chunk(q, k, v, g, beta, **options)
        output = output.float()
        if len(output) > token + distance:
            output[token, 1] += 1e-4 * v[token + distance, 1].float()
        return output, state

    result = verdict_on(as_rule(leaky), case_of(lengths=[90]))
    assert result.verdict == "fail", result.ruling.reason
    assert result.ruling.rule in ("silent-queries", "causality", "causality-cuts"), result.ruling.reason
    place = result.ruling.worst_tile
    assert (place.tensor, place.sequence, place.head, place.token) == ("output", 0, 1, token)


@pytest.mark.parametrize("lengths", [[90], [1, 65, 30]])
def test_a_leak_through_the_scores_of_one_row_goes_unseen(lengths, honest, case_of, verdict_on, as_rule):
    """Row 40 of a sequence sees two tokens ahead, by a ten-thousandth of their score."""

    def leaky(q, k, v, g, beta, **options):
        output, state = honest.chunk(q, k, v, g, beta, **options)
        output = output.float()
        for start, end in zip(
            options["cu_seqlens"].tolist(), options["cu_seqlens"].tolist()[1:], strict=False
        ):
            if end - start > 42:
                row = start + 40
                score = (q[row, 0].float() * k[row + 2, 0].float()).sum()
                output[row, 1] += 1e-4 * score * v[row + 2, 1].float()
        return output, state

    result = verdict_on(as_rule(leaky), case_of(lengths=lengths))
    assert result.verdict == "fail", result.ruling.reason
    assert result.ruling.rule in ("causality", "causality-cuts"), result.ruling.reason
    place = result.ruling.worst_tile
    assert (place.head, place.token) == (1, 40)


def test_cuts_leave_a_short_sequence_or_its_last_token_out():
    cuts = causality_cuts.choose_cuts([130, 1, 0, 9])
    assert {n for n, _, _ in cuts} == {0, 3}
    chosen = {cut for n, cut, _ in cuts if n == 0}
    assert {64, 128, 129, 16, 2, 3} <= chosen | {3}
    assert sum(stop for _, _, stop in cuts) <= causality_cuts.TOKENS
    assert all(0 < cut < stop <= (130, 1, 0, 9)[n] for n, cut, stop in cuts)
    assert causality_cuts.choose_cuts([1, 0]) == []

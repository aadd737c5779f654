"""Relations: each breach fires at its place, a sound kernel is silent, each proves that it was exercised."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from gdncheck.compare.inputs import inputs_of
from gdncheck.compare.relations import causality, isolation, run_to_run


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
    planned = [*causality.plan(inputs, seed=3), *isolation.plan(inputs, seed=3)]
    assert len(planned) == 3
    for expectation in planned:
        kept, changed = expectation.output_rows[0], expectation.changed_rows
        assert sorted([*kept.tolist(), *changed.tolist()]) == list(range(71))
        for name in ("q", "k", "v", "g", "beta"):
            before, after = getattr(inputs, name), getattr(expectation.inputs, name)
            assert torch.equal(before[kept], after[kept])
            assert not torch.equal(before[changed], after[changed])
            assert bool(torch.isfinite(after).all())
        assert float(expectation.inputs.g.max()) <= 0
        assert 0 <= float(expectation.inputs.beta.min()) <= float(expectation.inputs.beta.max()) <= 1
    assert run_to_run.plan(inputs, seed=0)[0].inputs is inputs

"""States stored inside a prefill: another sequence's, another chunk's or nobody's is caught and named.

Page sizes that the chunk size does not divide, packed lengths, memory that nobody wrote.
"""

from __future__ import annotations

import random

import pytest
import torch
from gdncheck.compare.checkpoints import MOST, Stored, at_chunk_starts, at_every, chosen, states_at
from gdncheck.compare.inputs import call_of, inputs_of
from gdncheck.compare.relations import checkpoints
from gdncheck.compare.relations.run import run_relation
from gdncheck.compare.trial import Trial
from gdncheck.compare.witness import Witness
from gdncheck.reference.emulation import emulate_chunk
from gdncheck.reference.recurrence import recurrence


def exporting(fault=None, stored=torch.float32):
    """A chunk kernel in bf16 that keeps the state after every page of tokens."""

    def rule(
        q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens, checkpoint_every=None
    ):  # fmt: skip
        keywords = {"scale": scale, "precision": "fla-0.4"}
        result = emulate_chunk(
            q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens, **keywords
        )
        output = result.output.to(v.dtype)
        if checkpoint_every is None:
            return output, result.final_state
        page, pages, starts = checkpoint_every, [], []
        for n, (a, b) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False)):
            state = torch.zeros_like(result.final_state[:1])
            state = state if initial_state is None else initial_state[n : n + 1].float()
            own, before = [], state
            for at in range(a, b - page + 1, page):
                rows = slice(at, at + page)
                before, state = state, emulate_chunk(
                    *(x[rows] for x in (q, k, v, g, beta)), initial_state=state, **keywords
                ).final_state  # fmt: skip
                own.append(before if fault == "the state before the page" else state)
            pages.append(own)
            starts.append(len(own))
        flat = [state for own in pages for state in own]
        if fault == "the neighbour's":
            flat = [state for own in pages[1:] + pages[:1] for state in own]
        if fault == "one page late":
            flat = [own[min(i + 1, len(own) - 1)] for own in pages for i in range(len(own))]
        kept = torch.cat(flat).to(stored) if flat else result.final_state[:0].to(stored)
        if fault == "the last not written":
            kept[-1] = torch.nan
        if fault == "the last left zero":
            kept[-1] = 0
        if fault == "one head of one page":
            kept[len(kept) // 2, -1] = kept[len(kept) // 2 - 1, -1]
        if fault == "transposed":
            kept = kept.transpose(-1, -2).contiguous()
        if fault == "none at the end":
            kept = kept[:-1]
        return output, result.final_state, kept

    rule.gdncheck_capabilities = {"profile": "fla-0.4", "checkpoints": "every"}
    return rule


FAULTS = {
    "the state before the page": "it is the state ",
    "the neighbour's": "",
    "one page late": "it is the state ",
    "the last not written": "was not written",
    "the last left zero": "off by 1",
    "one head of one page": "it is the state ",
    "transposed": "",
    "none at the end": "came back for",
}


def outcomes(kernel, case):
    witness = Witness(case)
    first = kernel.run([call_of(case)])[0]
    trial = Trial(witness, kernel.info, first.outputs["output"], first.outputs["final_state"])
    return run_relation(kernel, trial, checkpoints.NAME, seed=0, steady=True)


def drawn(case_of, seed, **more):
    dice = random.Random(seed)
    lengths = [dice.randint(100, 150) for _ in range(3)]
    return case_of(
        dice.choice(["qwen", "gaussian", "exact"]), lengths=lengths, dims=(8, 8), seed=seed, **more
    )


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 6))])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_states_of_the_prefixes_are_accepted_at_every_page_size(in_process, case_of, seed, stored):
    case = drawn(case_of, seed)
    if case.origin.family == "exact" and stored == torch.bfloat16:
        case = drawn(case_of, seed + 100)
    found = outcomes(in_process(exporting(stored=stored), exporting().gdncheck_capabilities), case)
    assert [o.status for o in found] == ["ok"] * len(checkpoints.PAGES), [o.reason for o in found]
    assert all(o.numbers["exercised"] > 0 for o in found)


@pytest.mark.parametrize("fault", sorted(FAULTS))
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_wrong_stored_state_fires_and_says_whose_it_is(in_process, case_of, fault, seed):
    kernel = in_process(exporting(fault), exporting().gdncheck_capabilities)
    found = outcomes(kernel, drawn(case_of, seed))
    fired = [o for o in found if o.status == "fires"]
    assert fired, fault
    assert any(FAULTS[fault] in o.reason for o in fired), [o.reason for o in fired]


@pytest.mark.slow
def test_public_row_27_packed_500_700_900(in_process, case_of):
    case = case_of("qwen", lengths=[500, 700, 900], dims=(8, 8), v_heads=1, seed=27)
    sound, wrong = (
        outcomes(in_process(exporting(f), exporting().gdncheck_capabilities), case)
        for f in (None, "the neighbour's")
    )
    assert all(o.status == "ok" for o in sound)
    assert any(o.status == "fires" and "sequence 1" in o.reason for o in wrong)


def test_kernel_that_exports_nothing_is_not_asked(in_process, case_of, honest):
    found = outcomes(in_process(honest.chunk, {"profile": "fla-0.4"}), drawn(case_of, 1))
    assert [o.status for o in found] == ["not-applicable"]
    assert "exports no states" in found[0].reason


def test_places_of_chunks_and_pages():
    assert at_chunk_starts([130, 0, 64], 64) == [
        Stored(0, 0, 0), Stored(1, 0, 64), Stored(2, 0, 128), Stored(3, 2, 0),
    ]  # fmt: skip
    assert at_every([130, 0, 64], 64) == [Stored(0, 0, 64), Stored(1, 0, 128), Stored(2, 2, 64)]
    many = at_every([6400], 10)
    kept = chosen(many)
    assert len(kept) == MOST
    assert kept[0] == many[0]
    assert kept[-1] == many[-1]


@pytest.mark.parametrize("seed", range(3))
def test_true_states_are_those_of_the_recurrence(case_of, seed):
    case = drawn(case_of, seed)
    inputs = inputs_of(case)
    places = chosen(at_chunk_starts(case.lengths, 48), 3)
    found = states_at(inputs, places)
    for place, state in zip(places, found, strict=True):
        start = int(case["cu_seqlens"][place.sequence])
        rows = slice(start, start + place.token)
        _, want = recurrence(
            *(case[x][rows] for x in ("q", "k", "v", "g", "beta")), scale=case.scale,
            initial_state=case["initial_state"][place.sequence : place.sequence + 1],
            l2norm=case.options.qk == "raw",
        )  # fmt: skip
        assert torch.allclose(state, want[0], rtol=1e-12, atol=1e-12)

"""Contract differences: what a kernel declares is named with its size, cancels between two that share it, and
excuses nothing else."""

from __future__ import annotations

import msgspec
import pytest
import torch
from gdncheck.capture.casefile import write_case
from gdncheck.compare.diff import report_of
from gdncheck.compare.jsonout import document
from gdncheck.compare.pairwise import pairs_of
from gdncheck.compare.report import pair_lines, reasons
from gdncheck.compare.session import Settings, diff_one
from gdncheck.compare.soundness import soundness_of
from gdncheck.compare.witness import Witness
from gdncheck.kernels.contract import Clause

EPS = Clause(id="l2norm.eps", kind="transform", applies_to="q, k", value=1e-5, source="test")
OFFSET = Clause(id="gate.alpha-offset", kind="transform", applies_to="g", value=1e-3, source="test")
BETA = Clause(id="beta.dtype", kind="transform", applies_to="beta", value="bfloat16", source="test")


@pytest.fixture(scope="module")
def case(case_of):
    """Raw keys small enough for the eps of an l2norm to matter in the first sequence only."""
    made = case_of(lengths=[70, 40], k_heads=1, v_heads=2, seed=3)
    size = torch.full((110, 1, 1), 1.0)
    size[:70] = 0.01
    tensors = {name: (made[name].float() * size).to(made[name].dtype) for name in ("q", "k")}
    changed = made.with_tensors(g=made["g"] * 0.1, **tensors)
    return msgspec.structs.replace(changed, options=msgspec.structs.replace(changed.options, qk="raw"))


def with_eps(honest, eps):
    def normalise(x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)

    def rule(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
        return honest.chunk(
            normalise(q), normalise(k), v, g, beta, scale=scale, initial_state=initial_state,
            output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        )  # fmt: skip

    return rule


def declared(*clauses):
    return {"l2norm": "in_kernel", "profile": "fla-0.4", "clauses": [msgspec.to_builtins(c) for c in clauses]}


def test_a_declared_transform_is_unnamed_or_has_no_size(case, honest, verdict_on):
    result = verdict_on(with_eps(honest, 1e-5), case, capabilities=declared(EPS))
    assert result.verdict == "pass", result.ruling.reason
    (difference,) = result.ruling.contract_differences
    assert difference.clause == "l2norm.eps"
    assert 60 <= difference.tokens <= 70, "the second sequence's keys are too large to feel the eps"
    assert 0.005 < difference.size < 0.5
    assert difference.text.startswith(f"l2norm eps 1e-05: {difference.tokens} tokens, ")
    assert difference.text.endswith(" %")
    assert difference.text in result.ruling.reason
    assert result.ruling.error["output"] < result.ruling.error_pure["output"] / 2


def test_a_transform_that_is_declared_and_not_done_passes(case, honest, verdict_on):
    result = verdict_on(with_eps(honest, 1e-6), case, capabilities=declared(EPS), relations="none")
    assert result.verdict in ("fail", "suspect")
    assert not result.ruling.contract_differences


def test_a_clause_without_effect_is_named(case, honest, verdict_on):
    """beta is bf16 already, and nothing departs from the pure truth."""
    result = verdict_on(with_eps(honest, 1e-6), case, capabilities=declared(BETA), relations="none")
    assert result.verdict == "pass"
    assert result.ruling.contract_differences == ()
    assert result.ruling.error == result.ruling.error_pure


def test_strict_forgives_a_contract_difference(case, honest, verdict_on):
    result = verdict_on(with_eps(honest, 1e-5), case, capabilities=declared(EPS), relations="none")
    for strict, status in ((False, 0), (True, 1)):
        report = report_of(
            [result], [], all_layers=False, strict=strict, settings=Settings(), seconds=1.0, command=""
        )
        assert report.exit_status == status


@pytest.mark.parametrize("fault", ["nan", "leak"])
def test_a_clause_excuses_a_nan_or_a_leak(fault, case, honest, verdict_on):
    def broken(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
        output, state = with_eps(honest, 1e-5)(
            q,
            k,
            v,
            g,
            beta,
            scale=scale,
            initial_state=initial_state,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
        )
        output = output.clone()
        if fault == "nan":
            output[80, 0, 0] = float("nan")
        else:
            output[:40] += 1e-2 * v[41:81]
        return output, state

    result = verdict_on(broken, case, capabilities=declared(EPS), relations="quick")
    assert result.verdict == "fail"


@pytest.fixture(scope="module")
def answers(case, honest, in_process):
    """Three kernels on one case: two share a clause, the third has none."""

    def build(*kernels):
        witness, trials = Witness(case), []
        sound, settings = soundness_of(witness), Settings(relations="none")
        results = [
            diff_one(in_process(function, declared(*clauses)), witness, sound, settings, trials=trials)
            for function, clauses in kernels
        ]
        return results, trials

    return build


def test_a_pair_blames_a_shared_clause_or_keeps_a_one_sided_one(answers, honest):
    small, usual = with_eps(honest, 1e-5), with_eps(honest, 1e-6)
    results, trials = answers((small, (EPS,)), (small, (EPS,)), (usual, ()))
    assert [r.verdict for r in results] == ["pass"] * 3
    same, one_sided, again = pairs_of(trials)
    assert same.difference == same.under_contracts == {"output": 0.0, "state": 0.0}
    assert (same.shared, same.one_sided) == (("l2norm.eps 1e-05",), ())
    assert one_sided.one_sided == again.one_sided == ("l2norm.eps 1e-05",)
    assert one_sided.shared == ()
    assert one_sided.under_contracts["output"] < 0.02
    assert one_sided.difference["output"] > 1.5 * one_sided.under_contracts["output"]


def test_a_pair_of_one_kernel_or_of_two_cases_is_made_up(answers, honest, case_of, in_process):
    _, trials = answers((with_eps(honest, 1e-6), ()))
    assert pairs_of(trials) == []
    witness, others = Witness(case_of(lengths=[20])), []
    diff_one(
        in_process(honest.chunk), witness, soundness_of(witness), Settings(relations="none"), trials=others
    )
    assert pairs_of([*trials, *others]) == []


def test_report_and_json_lose_pairs_differences_or_the_pure_error(answers, honest):
    results, trials = answers((with_eps(honest, 1e-5), (EPS,)), (with_eps(honest, 1e-6), ()))
    report = report_of(
        results,
        [],
        all_layers=False,
        strict=True,
        settings=Settings(),
        seconds=1.0,
        command="",
        pairs=pairs_of(trials),
    )
    (line,) = pair_lines(report)
    assert "less l2norm.eps 1e-05" in line
    assert any("l2norm eps 1e-05" in text for text in reasons(report))
    plain = document(report)
    assert plain["pairs"][0]["one_sided"] == ["l2norm.eps 1e-05"]
    assert plain["results"][0]["contract_differences"][0]["tokens"] > 0
    assert set(plain["results"][0]["error_pure"]) == {"output", "state"}
    assert plain["results"][0]["stages"] == []


def test_a_case_file_gives_other_differences_than_the_case(case, honest, in_process, tmp_path):
    from gdncheck.capture.casefile import read_case

    path = tmp_path / "case.safetensors"
    write_case(case, path)
    witness = Witness(read_case(path))
    result = diff_one(
        in_process(with_eps(honest, 1e-5), declared(EPS)),
        witness,
        soundness_of(witness),
        Settings(relations="none"),
    )
    assert [d.clause for d in result.ruling.contract_differences] == ["l2norm.eps"]

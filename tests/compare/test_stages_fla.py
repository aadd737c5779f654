"""Stages of the real kernel: fla's own stage functions, in Triton's interpreter, against float64."""

from __future__ import annotations

import json

import pytest
from gdncheck.capture.casefile import write_case
from gdncheck.compare.diff import diff

from gdncheck.cli import cli

pytest.importorskip("triton")


def test_a_sound_stage_of_fla_is_accused_or_unnamed_in_the_json(case_of, tmp_path):
    from click.testing import CliRunner

    path = tmp_path / "case.safetensors"
    case = case_of(lengths=[66], k_heads=1, v_heads=1, dims=(32, 32))
    write_case(case.with_tensors(g=case["g"] * 0.2), path)
    words = ["diff", str(path), "--kernel", "fla.chunk", "--stages", "--relations", "none", "--json"]
    result = CliRunner().invoke(cli, [*words, "--device", "cpu"], standalone_mode=False)
    plain = json.loads(result.output)["results"][0]
    assert plain["verdict"] == "pass", plain["reason"]
    assert [s["stage"] for s in plain["stages"]] == ["cumsum", "kkt", "solve", "wu", "state", "output"]
    for stage in plain["stages"]:
        assert (stage["made"], stage["handed_on"], stage["place"]) == (False, False, None), stage
        assert stage["ratio"] < 2


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen", "parallel-keys", "no-decay", "mixed-decay"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_sound_stage_of_fla_is_accused_on_a_hard_case(family, dtype, case_of):
    case = case_of(family, lengths=[66, 1, 17], k_heads=1, v_heads=2, dims=(32, 64), dtype=dtype)
    report = diff(case, kernels=["fla.chunk"], stages=True, relations="none", device="cpu")
    (result,) = report.results
    assert result.verdict == "pass", result.ruling.reason
    assert len(result.stages) == 6
    assert not any(s.made or s.handed_on for s in result.stages)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["fla.chunk", "fla.recurrent"])
def test_the_real_kernel_breaks_a_relation_that_it_promises_or_is_not_asked(kernel, case_of):
    case = case_of(lengths=[70, 20] if kernel == "fla.chunk" else [12, 9], k_heads=1, v_heads=2)
    (result,) = diff(case, kernels=[kernel], relations="all", device="cpu").results
    assert result.verdict == "pass", result.ruling.reason
    held = {o.check: o for o in result.ruling.outcomes if o.tier == 4 and o.status == "ok"}
    asked = {"run-to-run", "causality", "isolation", "fresh-memory", "unowned", "beta-zero", "prefix-state"}
    asked |= {"split-concat", "head-permutation", "sequence-permutation", "batch-invariance", "call-order"}
    assert set(held) >= asked | {"first-vs-warm"}
    assert all(outcome.numbers["exercised"] > 0 for name, outcome in held.items() if name in asked)

"""Cases captured from live models hold exactly what the rule was handed, and a bad model is found out.

One process (`live_session.py`) runs the models; the tests judge what it left. The second set of
parameters runs the same under transformers 5.7, which keeps the rule on the layer, repeats key heads and
caches the state in bfloat16.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gdncheck.capture.casefile import read_case
from gdncheck.capture.checkpoint import expected_bytes, model_shape
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
CLASSES = ["Qwen3_5MoeGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3NextGatedDeltaNet"]
LENGTHS = [64, 1, 2, 4, 1]  # the calls of live_session, the last of them generated
LAYERS = [0, 2]
BF16 = 2.0**-8  # relative half-ulp


@pytest.fixture(
    scope="module",
    params=["installed", pytest.param("5.7.0", marks=pytest.mark.slow)],
)
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Session:
    out = tmp_path_factory.mktemp("live")
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if request.param != "installed":
        environment["PYTHONPATH"] = str(another_transformers(request.param, tmp_path_factory))
    script = Path(__file__).with_name("live_session.py")
    run = subprocess.run(
        [sys.executable, str(script), str(out), str(ROOT / "models" / "tiny-qwen35moe")],
        env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    facts = json.loads((out / "facts.json").read_text())
    if request.param != "installed":
        assert facts["transformers"] == request.param
    return Session(out, facts)


def another_transformers(version: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("transformers")
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(target)]
    run = subprocess.run([*command, f"transformers=={version}", "numpy<2.4"], capture_output=True, text=True)
    if run.returncode:
        pytest.skip(f"transformers {version} cannot be fetched: {run.stderr.strip().splitlines()[-1]}")
    return target


class Session:
    """What live_session.py left."""

    def __init__(self, out: Path, facts: dict[str, Any]) -> None:
        self.out, self.facts = out, facts
        self.release = tuple(int(part) for part in facts["transformers"].split(".")[:2])

    def case(self, name: str, layer: int, call: int) -> dict[str, Tensor]:
        return load_file(self.out / f"{name}.{layer}.{call}.safetensors")

    def spied(self, name: str, layer: int, call: int) -> dict[str, Tensor]:
        return load_file(self.out / f"{name}.spy.{layer}.{call}.safetensors")

    def captured(self, run: str, layer: int, call: int = 0) -> dict[str, Tensor]:
        return read_case(self.out / run / f"layer{layer:03d}.call{call:04d}.safetensors").tensors

    def run(self, name: str) -> dict[str, Any]:
        return self.facts["checkpoints"][name]


def calls() -> list[tuple[int, int]]:
    return [(layer, call) for layer in LAYERS for call in range(len(LENGTHS))]


# What was handed over.


@pytest.mark.parametrize("name", CLASSES)
def test_case_holds_what_the_rule_was_handed_bit_for_bit(session: Session, name: str) -> None:
    for layer, call in calls():
        case, seen = session.case(name, layer, call), session.spied(name, layer, call)
        repeats = seen["q"].shape[2] // case["q"].shape[1]
        for tensor in ("q", "k"):
            assert case[tensor].shape == (LENGTHS[call], 2, 8)
            assert torch.equal(case[tensor].repeat_interleave(repeats, 1), seen[tensor][0])
            assert case[tensor].dtype == seen[tensor].dtype
        for tensor in ("v", "g", "beta"):
            assert torch.equal(case[tensor], seen[tensor][0]), (tensor, layer, call)
            assert case[tensor].dtype == seen[tensor].dtype
        assert torch.equal(case["observed_output"], seen["output"][0])
        assert torch.equal(case["observed_final_state"], seen["final_state"])
        assert ("initial_state" in case) == (call > 0)
        if call:
            assert torch.equal(case["initial_state"], seen["initial_state"])
            assert case["initial_state"].dtype == seen["initial_state"].dtype


@pytest.mark.parametrize("name", CLASSES)
def test_calls_are_numbered_and_called_prefill_or_decode(session: Session, name: str) -> None:
    facts = session.facts["classes"][name]
    assert facts["calls"] == [[layer, call] for call in range(len(LENGTHS)) for layer in LAYERS]
    words = ["prefill", "decode", "prefill", "prefill", "decode"]
    assert facts["phases"] == [word for word in words for _ in LAYERS]
    assert facts["positions"] == sum(LENGTHS)


@pytest.mark.parametrize("name", CLASSES)
def test_hooks_change_no_bit_of_the_logits_and_leave_nothing_behind(session: Session, name: str) -> None:
    facts = session.facts["classes"][name]
    assert facts["hooks change nothing"]
    assert facts["hooks left"] == 0
    assert facts["seams restored"]


@pytest.mark.parametrize("name", CLASSES)
def test_backend_names_the_function_that_ran(session: Session, name: str) -> None:
    modelling = {"Qwen3_5MoeGatedDeltaNet": "qwen3_5_moe", "Qwen3_5GatedDeltaNet": "qwen3_5"}.get(
        name, "qwen3_next"
    )
    for backend in session.facts["classes"][name]["backends"]:
        assert backend.startswith(f"transformers.models.{modelling}.modeling_{modelling}.torch_")


# What the tensors mean: the rule and the core around it, recomputed in float64.


def replay(case: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Output [T, HV, V] and final state [1, HV, K, V] of the recurrence, l2norm included, in float64."""
    q, k, v, g, beta = (case[name].double() for name in ("q", "k", "v", "g", "beta"))
    q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    repeats = v.shape[1] // q.shape[1]
    q, k = q.repeat_interleave(repeats, 1) * q.shape[-1] ** -0.5, k.repeat_interleave(repeats, 1)
    state = torch.zeros(v.shape[1], k.shape[2], v.shape[2], dtype=torch.float64)
    if "initial_state" in case:
        state = case["initial_state"][0].double()
    outputs = []
    for t in range(len(v)):
        state = state * g[t].exp()[:, None, None]
        error = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + torch.einsum("hk,hv->hkv", k[t], error)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outputs), state[None]


def close(found: Tensor, expected: Tensor, relative: float) -> None:
    scale = expected.double().abs().max().clamp_min(1e-30)
    worst = (found.double() - expected.double()).abs().max() / scale
    assert worst <= relative, f"off by {worst:.2e} of the largest value"


@pytest.mark.parametrize("name", CLASSES)
def test_recurrence_in_float64_reproduces_the_observed_output_and_state(session: Session, name: str) -> None:
    for layer, call in calls():
        case = session.case(name, layer, call)
        output, state = replay(case)
        # 5.7 normalises q and k in bfloat16 before it goes on in float32; 5.24 in float32.
        early = session.release < (5, 8)
        close(case["observed_output"], output, 4 * BF16 if early else 1.5 * BF16)
        close(case["observed_final_state"], state, 4 * BF16 if early else 1e-5)


@pytest.mark.parametrize("name", CLASSES)
def test_conv_and_gate_of_the_core_reproduce_the_rule_inputs(session: Session, name: str) -> None:
    for layer, call in calls():
        case = session.case(name, layer, call)
        weight, x = case["conv_weight"].double(), case["conv_input"].double()
        before = torch.zeros(x.shape[1], weight.shape[1] - 1, dtype=torch.float64)
        if call:
            before = case["conv_state"][0].double()
        padded = torch.cat([before.T, x])
        windows = padded.unfold(0, weight.shape[1], 1)  # [T, D, W]
        mixed = torch.nn.functional.silu((windows * weight).sum(-1))
        parts = mixed.split([case["q"][0].numel(), case["k"][0].numel(), case["v"][0].numel()], dim=-1)
        for tensor, expected in zip("qkv", parts, strict=True):
            close(case[tensor].flatten(1), expected, 4 * BF16)
        gate = -case["A_log"].double().exp() * torch.nn.functional.softplus(
            case["a"].double() + case["dt_bias"].double()
        )
        close(case["g"], gate, 1e-5)
        close(case["beta"], case["b"].double().sigmoid(), 1.5 * BF16)
        kept = padded[len(x) :].T
        assert torch.equal(case["observed_conv_state"][0].double(), kept)


@pytest.mark.parametrize("name", CLASSES)
def test_norm_of_the_core_reproduces_the_core_output(session: Session, name: str) -> None:
    for layer, call in calls():
        case = session.case(name, layer, call)
        o = case["observed_output"].double()
        normed = o / torch.sqrt((o * o).mean(-1, keepdim=True) + 1e-6) * case["norm_weight"].double()
        close(case["observed_core_output"], normed * torch.nn.functional.silu(case["z"].double()), 4 * BF16)
        assert case["observed_layer_output"].shape == (LENGTHS[call], 32)


@pytest.mark.parametrize("name", CLASSES)
def test_each_call_starts_from_the_states_that_the_last_one_left(session: Session, name: str) -> None:
    for layer, call in calls():
        if not call:
            continue
        case, last = session.case(name, layer, call), session.case(name, layer, call - 1)
        handed = case["initial_state"]
        assert torch.equal(handed, last["observed_final_state"].to(handed.dtype))
        assert torch.equal(case["conv_state"], last["observed_conv_state"])


@pytest.mark.parametrize("name", CLASSES)
def test_two_rows_of_a_batch_become_two_packed_sequences(session: Session, name: str) -> None:
    assert session.facts["classes"][name]["batch"] == [0, 10, 20]
    both = load_file(session.out / f"{name}.batch.safetensors")
    second = load_file(session.out / f"{name}.batch.second.safetensors")
    for tensor in ("q", "k", "v", "g", "beta", "conv_input", "z", "a", "b", "observed_output"):
        close(both[tensor][10:], second[tensor], 8 * BF16)
    assert not torch.equal(both["v"][:10], both["v"][10:])
    close(both["observed_final_state"][1:], second["observed_final_state"], 8 * BF16)


@pytest.mark.parametrize("name", CLASSES)
def test_padded_call_is_refused_with_the_number_of_padded_positions(session: Session, name: str) -> None:
    assert "3 masked positions" in session.facts["classes"][name]["padded"]


# Whole runs of a checkpoint.


def test_run_in_one_piece_equals_its_splits_put_together(session: Session) -> None:
    for layer in (1, 2):
        whole = session.captured("whole", layer)
        parts = [session.captured("split", layer, call) for call in range(4)]
        # The first call is shorter than the conv's window.
        assert [len(part["v"]) for part in parts] == [2, 40, 1, 41]
        for last, part in itertools.pairwise(parts):
            assert torch.equal(part["conv_state"], last["observed_conv_state"])
        for tensor in ("q", "k", "v", "g", "beta", "conv_input", "z", "observed_output"):
            close(torch.cat([part[tensor] for part in parts]), whole[tensor], 8 * BF16)
        close(parts[-1]["observed_final_state"], whole["observed_final_state"], 8 * BF16)


@pytest.mark.parametrize(
    ("run", "twin"),
    [
        ("offloaded", "split"),
        ("offloaded and stopped", "split"),
        ("stopped", "whole"),
        ("multimodal", "whole"),
        ("multimodal and stopped", "whole"),
    ],
)
def test_offload_early_stop_and_packaging_change_no_bit(session: Session, run: str, twin: str) -> None:
    assert session.run(run)["verdict"] == "pass", session.run(run)["reason"]
    assert len(session.run(run)["cases"]) == len(session.run(twin)["cases"]) > 0
    for written in session.run(run)["cases"]:
        one = session.captured(run, written["layer"], written["call"])
        other = session.captured(twin, written["layer"], written["call"])
        assert one.keys() == other.keys()
        for tensor, value in one.items():
            assert torch.equal(value, other[tensor]), tensor
            assert value.dtype == other[tensor].dtype


def test_sound_run_passes_and_says_what_was_checked(session: Session) -> None:
    result = session.run("whole")
    assert result["verdict"] == "pass"
    assert result["logits"] == {
        "checked": True,
        "reason": "",
        "n_positions": 84,
        "n_nonfinite": 0,
        "first": None,
    }
    for weights in result["weights"]:
        assert weights["n_weights"] == weights["n_compared"] == 18
        assert not weights["rounded"]


def test_early_stop_says_that_the_logits_were_not_checked(session: Session) -> None:
    for run in ("stopped", "offloaded and stopped"):
        assert not session.run(run)["logits"]["checked"]
        assert "stopped" in session.run(run)["reason"]


def test_text_becomes_the_ids_of_the_model_s_tokenizer(session: Session) -> None:
    assert session.run("text")["token_hash"] == session.run("whole")["token_hash"]
    assert session.run("text")["plans"] == 1, "the size of a text's capture was not told before writing"


def test_rule_capture_leaves_the_core_out_and_keeps_the_rule(session: Session) -> None:
    rule, core = session.captured("rule", 2), session.captured("whole", 2)
    assert set(rule) == {"q", "k", "v", "g", "beta", "cu_seqlens", "observed_output", "observed_final_state"}
    for tensor, value in rule.items():
        assert torch.equal(value, core[tensor])


def test_weights_rounded_on_loading_are_named(session: Session) -> None:
    for weights in session.run("float32")["weights"]:
        assert len(weights["rounded"]) == 18
        assert not weights["different"]


def test_size_told_before_is_the_size_on_disk(session: Session) -> None:
    shape = model_shape(session.out / "checkpoint")
    for run, what in (("whole", "core"), ("split", "core"), ("rule", "rule")):
        result = session.run(run)
        told = expected_bytes(shape, result["lengths"], what) * len(result["layers"])
        headers = 6000 * len(result["cases"])
        assert told * 0.9 - headers <= result["bytes"] <= told * 1.05 + headers


# A bad model.


def test_nan_in_a_captured_layer_s_weight_is_named_before_the_logits(session: Session) -> None:
    result = session.run("nan weight")
    assert result["verdict"] == "fail"
    assert "layer 2, weight linear_attn.in_proj_b.weight: nan at [5, 31]" in result["reason"]


def test_nan_behind_the_captured_layer_shows_in_the_logits(session: Session) -> None:
    result = session.run("nan weight in a later layer")
    assert result["verdict"] == "fail"
    assert result["logits"]["first"] == {"call": 0, "token": 0, "class": "nan"}
    assert result["logits"]["n_nonfinite"] == 84
    assert all(case["finite"] for case in result["cases"])


def test_nan_before_the_captured_layer_shows_in_its_inputs_though_stopped_early(session: Session) -> None:
    result = session.run("nan weight in an earlier layer")
    assert result["verdict"] == "fail"
    assert "layer004.call0000" in result["reason"]
    assert not result["cases"][0]["finite"]


def test_weight_that_the_checkpoint_lacks_is_named(session: Session) -> None:
    result = session.run("missing weight")
    assert result["verdict"] == "fail"
    assert "linear_attn.dt_bias: not in the checkpoint" in result["reason"]


def test_one_flipped_bit_between_file_and_memory_is_found(session: Session) -> None:
    tampered = session.run("tampered")
    assert tampered["before"]
    assert tampered["different"]["linear_attn.A_log"] == [
        "linear_attn.A_log: 1 of 6 values differ from the file, first at [5]"
    ]
    assert (
        "mlp.experts.gate_up_proj: 1 of 1024 values differ"
        in tampered["different"]["mlp.experts.1.up_proj.weight"][0]
    )

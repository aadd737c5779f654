"""Layout checks: each lie about a shape, a dtype or an index is named, and canonical cases pass."""

from __future__ import annotations

import re

import pytest
import torch
from gdncheck.capture.errors import BadInput
from gdncheck.capture.make import make
from gdncheck.capture.validate import LAYOUTS, REQUIRED, check_tensors

LENGTHS, HK, HV, K, V, W, HIDDEN = [5, 0, 3], 1, 2, 4, 3, 4, 7
T, N, D = 8, 3, 2 * HK * K + HV * V


def rule() -> dict[str, torch.Tensor]:
    return dict(make("qwen", lengths=LENGTHS, k_heads=HK, v_heads=HV, dims=(K, V), state="random").tensors)


def core() -> dict[str, torch.Tensor]:
    return rule() | {
        "conv_input": torch.zeros(T, D), "conv_weight": torch.zeros(D, W), "conv_bias": torch.zeros(D),
        "conv_state": torch.zeros(N, D, W - 1), "a": torch.zeros(T, HV), "b": torch.zeros(T, HV),
        "A_log": torch.zeros(HV), "dt_bias": torch.zeros(HV), "z": torch.zeros(T, HV, V),
        "norm_weight": torch.zeros(V), "observed_output": torch.zeros(T, HV, V),
        "observed_final_state": torch.zeros(N, HV, K, V), "observed_conv_state": torch.zeros(N, D, W - 1),
        "observed_layer_output": torch.zeros(T, HIDDEN),
    }  # fmt: skip


def pooled() -> dict[str, torch.Tensor]:
    tensors = rule()
    del tensors["initial_state"]
    return tensors | {
        "pool": torch.zeros(6, HV, K, V),
        "slot_indices": torch.tensor([5, -1, 2], dtype=torch.int32),
        "has_initial_state": torch.tensor([True, False, True]),
    }


def verify() -> dict[str, torch.Tensor]:
    return rule() | {"draft": torch.tensor([4, 0, 3]), "num_accepted": torch.tensor([5, 0, 1])}


GROUPS = {"rule": rule, "core": core, "verify": verify}


def refusal(tensors: dict[str, torch.Tensor], op: str = "rule", finite: bool = False) -> str:
    with pytest.raises(BadInput) as caught:
        check_tensors(tensors, op, finite=finite, where="case.safetensors")
    message = str(caught.value)
    assert message.startswith("case.safetensors: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("op", list(GROUPS))
def test_canonical_tensors_of_every_op_pass(op):
    check_tensors(GROUPS[op](), op, finite=True, where="case")


def test_pool_with_padding_and_channel_gate_pass():
    check_tensors(pooled(), "rule", finite=True, where="case")
    check_tensors(rule() | {"g": torch.zeros(T, HV, K)}, "rule", finite=True, where="case")


def test_no_tokens_and_empty_sequences_pass():
    for lengths in ([0], [0, 0], [0, 3, 0]):
        case = make("qwen", lengths=lengths, state="random")
        check_tensors(case.tensors, "rule", finite=True, where="case")


@pytest.mark.parametrize("op", list(GROUPS))
def test_each_missing_required_tensor_is_named(op):
    for name in REQUIRED[op]:
        tensors = GROUPS[op]()
        del tensors[name]
        assert f"tensor {name} is missing" in refusal(tensors, op)


@pytest.mark.parametrize("name", [n for n in LAYOUTS if n in core()])
def test_each_wrong_rank_size_and_dtype_is_named(name):
    tensor = core()[name]
    assert name in refusal(core() | {name: tensor.unsqueeze(0)}, "core")
    integer_like = tensor.dtype in (torch.int64, torch.bool)
    assert name in refusal(core() | {name: tensor.float() if integer_like else tensor.double()}, "core")
    sized = [axis for axis in range(tensor.dim()) if not (name == "observed_layer_output" and axis == 1)]
    for axis in sized:
        grown = torch.cat((tensor, tensor.narrow(axis, 0, 1)), axis)
        message = refusal(core() | {name: grown}, "core")
        assert re.search(r"shape|has \w|cu_seqlens|heads|channels", message), message


def test_batch_dimension_is_recognised():
    assert "drop the leading batch dimension" in refusal(rule() | {"q": rule()["q"].unsqueeze(0)})


def test_value_heads_that_are_no_multiple_of_key_heads():
    k = torch.zeros(T, 2, K)
    tensors = rule() | {
        "q": k,
        "k": k,
        "v": torch.zeros(T, 3, V),
        "g": torch.zeros(T, 3),
        "beta": torch.zeros(T, 3),
    }
    assert "no multiple" in refusal(tensors | {"initial_state": torch.zeros(N, 3, K, V)})


def test_gate_in_bf16_is_refused():
    assert "g is bfloat16" in refusal(rule() | {"g": rule()["g"].bfloat16()})


@pytest.mark.parametrize(
    ("cu", "word"),
    [
        ([0, 5, 4, 8], "not monotone"),
        ([1, 5, 5, 8], "starts at 1"),
        ([0, 5, 5, 7], "ends at 7 but q has 8 tokens"),
        ([0, 5, 5, 9], "ends at 9 but q has 8 tokens"),
        ([0, -1, 5, 8], "not monotone"),
    ],
)
def test_cu_seqlens_that_lie_are_refused(cu, word):
    assert word in refusal(rule() | {"cu_seqlens": torch.tensor(cu)})


def test_cu_seqlens_without_a_sequence_and_in_int32_are_refused():
    bare = rule()
    del bare["initial_state"]
    assert "at least" in refusal(bare | {"cu_seqlens": torch.tensor([0])})
    assert "int64" in refusal(rule() | {"cu_seqlens": rule()["cu_seqlens"].int()})


@pytest.mark.parametrize(
    ("slots", "word"),
    [
        ([5, -1, 6], "slot_indices[2] is 6"),
        ([5, -2, 1], "slot_indices[1] is -2"),
        ([2, 3, 2], "to sequence 0 and to"),
    ],
)
def test_slots_out_of_range_or_shared_are_refused(slots, word):
    assert word in refusal(pooled() | {"slot_indices": torch.tensor(slots)})


def test_slot_shared_with_an_empty_sequence_is_allowed():
    check_tensors(pooled() | {"slot_indices": torch.tensor([2, 2, 1])}, "rule", finite=True, where="case")


def test_half_a_pool_both_states_and_a_claimed_state_that_is_absent_are_refused():
    half = pooled()
    del half["slot_indices"]
    assert "without slot_indices" in refusal(half)
    assert "both" in refusal(pooled() | {"initial_state": torch.zeros(N, HV, K, V)})
    bare = rule()
    del bare["initial_state"]
    assert "sequence 1" in refusal(bare | {"has_initial_state": torch.tensor([False, True, False])})
    check_tensors(
        bare | {"has_initial_state": torch.zeros(N, dtype=torch.bool)}, "rule", finite=True, where="case"
    )


def test_convolution_of_another_layer_is_refused():
    tensors = core()
    for name in ("conv_input", "conv_weight", "conv_bias", "conv_state", "observed_conv_state"):
        axis = 1 if name in ("conv_input", "conv_state", "observed_conv_state") else 0
        tensors[name] = torch.cat((tensors[name], tensors[name].narrow(axis, 0, 1)), axis)
    assert "channels" in refusal(tensors, "core")


def test_drafts_and_acceptances_outside_the_sequence_are_refused():
    assert "draft[0]" in refusal(verify() | {"draft": torch.tensor([6, 0, 3])}, "verify")
    assert "num_accepted[2]" in refusal(verify() | {"num_accepted": torch.tensor([5, 0, 4])}, "verify")
    assert "num_accepted[0]" in refusal(verify() | {"num_accepted": torch.tensor([-1, 0, 0])}, "verify")


def test_misspelt_tensor_is_refused_and_a_foreign_one_is_carried():
    tensors = rule()
    state = tensors.pop("initial_state")
    assert "did you mean initial_state" in refusal(tensors | {"inital_state": state})
    check_tensors(rule() | {"logits": torch.zeros(3)}, "rule", finite=True, where="case")


@pytest.mark.parametrize("name", ["q", "beta", "g", "initial_state"])
def test_nonfinite_entry_is_refused_only_under_a_finite_claim(name):
    tensors = rule()
    tensors[name] = tensors[name].clone()
    tensors[name][2] = float("inf")
    assert f"{name} holds inf" in refusal(tensors, finite=True)
    check_tensors(tensors, "rule", finite=False, where="case")

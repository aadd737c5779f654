"""A convolution's pool in a case file: what fits, and the one line for what does not."""

from __future__ import annotations

import msgspec
import pytest
import torch
from gdncheck.capture.case import Case
from gdncheck.capture.casefile import read_case, write_case
from gdncheck.capture.errors import BadInput
from gdncheck.capture.make import make
from gdncheck.compare.ops.inputs import op_inputs


def core_case(**changed):
    """Three sequences of a small core whose past of the convolution lies in a pool; None leaves one out."""
    case = make("qwen", lengths=[5, 1, 2], k_heads=1, v_heads=2, dims=(16, 16), qk="raw")
    dice = torch.Generator().manual_seed(3)

    def numbers(*shape):
        return torch.randn(*shape, generator=dice).bfloat16()

    tensors = {
        **case.tensors,
        "conv_input": numbers(8, 64), "conv_weight": numbers(64, 4), "conv_pool": numbers(6, 64, 3),
        "slot_indices": torch.tensor([4, 0, -1]), "has_initial_state": torch.tensor([True, False, False]),
        "a": numbers(8, 2), "b": numbers(8, 2), "A_log": torch.zeros(2), "dt_bias": torch.zeros(2),
        **changed,
    }  # fmt: skip
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return Case(op="core", tensors=tensors, options=case.options, origin=case.origin)


def test_a_pool_of_the_convolution_alone_is_refused_or_lost(tmp_path):
    case = core_case(read_slot_indices=torch.tensor([1, 0, -1]))
    path = tmp_path / "core.safetensors"
    write_case(case, path)
    inputs = op_inputs(read_case(path), "conv")
    for name in ("conv_pool", "slot_indices", "read_slot_indices", "has_initial_state"):
        assert torch.equal(inputs.tensors[name], case[name]), name


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"slot_indices": None}, "conv_pool without slot_indices"),
        ({"slot_indices": torch.tensor([4, 6, -1])}, "slot_indices.1. is 6 but conv_pool has 6 slots"),
        ({"slot_indices": torch.tensor([4, 4, -1])}, "slot 4 to sequence 0 and to sequence 1"),
        ({"read_slot_indices": torch.tensor([9, 0, 1])}, "read_slot_indices.0. is 9 but conv_pool"),
        ({"conv_state": torch.zeros(3, 64, 3).bfloat16()}, "both conv_state and conv_pool"),
        (
            {"conv_pool": None, "slot_indices": None, "has_initial_state": None,
             "read_slot_indices": torch.tensor([1, 0, 2])},
            "read_slot_indices without conv_pool",
        ),
    ],
)  # fmt: skip
def test_a_pool_that_does_not_fit_is_taken(changed, message, tmp_path):
    with pytest.raises(BadInput, match=message):
        write_case(core_case(**changed), tmp_path / "core.safetensors")


def test_a_state_of_the_convolution_alone_counts_as_none(tmp_path):
    case = core_case(
        conv_pool=None, slot_indices=None, conv_state=torch.zeros(3, 64, 3).bfloat16(),
        has_initial_state=torch.tensor([True, True, False]),
    )  # fmt: skip
    write_case(case, tmp_path / "core.safetensors")
    assert msgspec.structs.asdict(case)["op"] == "core"

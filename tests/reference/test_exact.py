"""Exact cases: the assertion fires on what rounds, and a wrong integer names its owner."""

from __future__ import annotations

import pytest
import torch
from gdncheck.capture.case import Case, starting_state
from gdncheck.capture.make import make
from gdncheck.reference.exact import ExactReport, is_exact
from gdncheck.reference.exact_decode import decode_exact, exact_expected
from gdncheck.reference.exact_one_hot import is_proven
from gdncheck.reference.recurrence import recurrence

NAMES = ("q", "k", "v", "g", "beta")
LENGTHS = [70, 0, 1, 65]


def exact_case(family="exact", **arguments) -> Case:
    return make(family, **{"lengths": LENGTHS, "dims": (32, 8), "state": "random", "seed": 4, **arguments})


def report(case: Case, **changed) -> ExactReport:
    tensors = {name: changed.pop(name, case[name]) for name in NAMES}
    arguments = {
        "scale": case.scale, "cu_seqlens": case["cu_seqlens"], "initial_state": starting_state(case),
        "l2norm": case.options.qk == "raw", **changed,
    }  # fmt: skip
    return is_exact(**tensors, **arguments)


@pytest.mark.parametrize(
    ("dtype", "dims"),
    [("bf16", (32, 8)), ("fp16", (32, 8)), ("fp32", (32, 8)), ("bf16", (3, 5)), ("bf16", (64, 64))],
)
@pytest.mark.parametrize("family", ["exact", "exact-raw"])
def test_exact_families_hold_no_number_that_any_algorithm_rounds(family, dtype, dims):
    assert report(exact_case(family, dtype=dtype, dims=dims)) == ExactReport(True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_long_exact_cases_of_many_seeds_hold_no_number_that_rounds(dtype):
    for seed in range(20):
        case = exact_case(dtype=dtype, lengths=[300, 129], dims=(64, 32), seed=seed)
        assert report(case) == ExactReport(True)


def test_exact_case_may_store_its_state_in_bf16():
    assert report(exact_case(state_dtype="bf16"), state_dtype=torch.bfloat16).exact


@pytest.mark.parametrize("family", ["qwen", "no-decay", "gaussian", "identical-keys"])
def test_ordinary_cases_are_not_exact(family):
    assert not report(make(family, lengths=[20], dims=(8, 8))).exact


def changed(case: Case, name: str, value: float, at=(40, 1)) -> torch.Tensor:
    tensor = case[name].clone()
    tensor[at] = value
    return tensor


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("v", 0.5, "v holds 0.5"),
        ("beta", 0.5, "beta holds 0.5"),
        ("g", -1.0, "gate"),
        ("g", -700.0, "gate"),
        ("g", float("-inf"), "gate"),
        ("g", float("nan"), "gate"),
        ("v", float("nan"), "v"),
        ("v", 200.0, "exact in bfloat16"),
    ],
)
def test_one_number_that_rounds_is_named(name, value, word):
    case = exact_case()
    found = report(case, **{name: changed(case, name, value)})
    assert not found.exact
    assert word in found.reason


def test_half_beta_is_allowed_only_where_nothing_rounds():
    """beta = 1/2 is refused as a rule of the family, not by luck of the numbers."""
    case = exact_case()
    assert "beta" in report(case, beta=case["beta"] / 2).reason


def test_scale_that_is_no_power_of_two_is_named():
    assert "scale" in report(exact_case(), scale=0.3).reason


def test_keys_repeated_too_often_are_found_by_the_doubling_algorithm():
    case = exact_case(lengths=[64])
    one_key = torch.zeros_like(case["k"])
    one_key[..., 0] = 1
    found = report(case, k=one_key, beta=torch.ones_like(case["beta"]))
    assert not found.exact
    assert "doubling" in found.reason
    assert "chunk size" in found.reason


def test_key_norm_that_l2norm_does_not_hit_exactly_is_named():
    case = exact_case("exact-raw", dtype="fp32")
    assert "l2norm of k" in report(case, k=case["k"] * 2.0**-24).reason


def test_channel_gates_are_not_decided():
    case = exact_case()
    assert "channel" in report(case, g=torch.zeros(*case["g"].shape, 32)).reason


@pytest.mark.parametrize("family", ["exact", "exact-raw"])
def test_expected_values_are_the_recurrence_bit_for_bit(family):
    case = exact_case(family)
    arguments = {"scale": case.scale, "cu_seqlens": case["cu_seqlens"], "initial_state": starting_state(case)}
    raw = family == "exact-raw"
    output, state = exact_expected(*(case[n] for n in NAMES), **arguments, l2norm=raw)
    want_output, want_state = recurrence(*(case[n] for n in NAMES), **arguments, l2norm=raw)
    assert torch.equal(output.double(), want_output)
    assert torch.equal(state.double(), want_state)


class TestDecoder:
    case = exact_case()
    scale, cu_seqlens, start = case.scale, case["cu_seqlens"], starting_state(case)

    @property
    def arguments(self):
        return {"scale": self.scale, "cu_seqlens": self.cu_seqlens, "initial_state": self.start}

    def expected(self):
        return exact_expected(*(self.case[n] for n in NAMES), **self.arguments)

    def read(self, got, want):
        return decode_exact(got, want, v=self.case["v"], **self.arguments)

    def test_equal_tensors_decode_to_nothing(self):
        output, state = self.expected()
        assert self.read(output, output) is None
        assert self.read(state, state) is None

    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize(
        ("row", "owner"),
        [(0, "token 0 of sequence 0"), (70, "token 0 of sequence 2"), (80, "token 9 of sequence 3")],
    )
    def test_output_of_another_token_names_that_token(self, row, owner, sign):
        output, _ = self.expected()
        got = output.clone()
        got[64, 1] = (self.case["v"][row, 1].double() * self.case.scale * sign).to(got.dtype)
        reading = self.read(got, output)
        assert (reading.tensor, reading.sequence, reading.token, reading.head) == ("output", 0, 64, 1)
        assert reading.text.endswith(f"was read as {owner}")

    def test_value_of_another_head_names_the_head(self):
        output, _ = self.expected()
        got = output.clone()
        got[3, 2] = (self.case["v"][2, 0].double() * self.case.scale).to(got.dtype)
        assert self.read(got, output).text.endswith("was read as token 2 of sequence 0, head 0")

    def test_partly_wrong_row_is_matched_on_its_wrong_channels(self):
        output, _ = self.expected()
        got = output.clone()
        got[64, 1, 3:7] = (self.case["v"][90, 1, 3:7].double() * self.case.scale).to(got.dtype)
        assert self.read(got, output).text.endswith("was read as token 19 of sequence 3")

    def test_zeroed_row_nan_and_nonsense_are_told_apart(self):
        output, _ = self.expected()
        filled = int(output[:, 1].abs().sum(-1).nonzero()[5])
        for value, word in ((0.0, "zero"), (float("nan"), "not finite"), (1e4, "no row holds")):
            got = output.clone()
            got[filled, 1] = value
            assert word in self.read(got, output).text

    def test_state_of_the_neighbour_names_the_neighbour(self):
        _, state = self.expected()
        got = state.clone()
        got[1] = starting_state(self.case)[0]
        reading = self.read(got, state)
        assert (reading.tensor, reading.sequence, reading.token, reading.channel) == ("state", 1, None, 0)
        assert (
            "row 0 of the initial state of sequence 1 was read as row 0 of the initial state of sequence 0"
            in (reading.text)
        )

    def test_transposed_state_names_the_column(self):
        square = exact_case(dims=(8, 8), lengths=[0, 3])
        start = starting_state(square)
        reading = decode_exact(
            start.mT.contiguous(),
            start,
            v=square["v"],
            cu_seqlens=square["cu_seqlens"],
            scale=1.0,
            initial_state=start,
        )
        assert "was read as column 0 of the initial state of sequence 0" in reading.text


class TestProof:
    """`exact_one_hot` says yes only where forming every number says so too."""

    @pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
    @pytest.mark.parametrize("family", ["exact", "exact-raw"])
    def test_the_family_is_proven_and_its_numbers_agree(self, family, dtype):
        for seed in range(3):
            case = exact_case(family, dtype=dtype, dims=(8, 4), seed=seed)
            assert proven(case)
            assert report(case, walk=True).exact

    @pytest.mark.parametrize(
        ("name", "value"),
        [("k", 1.0), ("k", -1.0), ("k", 2.0), ("q", 2.0), ("beta", 2.0), ("v", 130.0), ("g", -746.5)],
    )
    def test_what_the_statement_does_not_cover_is_not_proven(self, name, value):
        case = exact_case()
        at = (40, 1, slice(0, 2)) if name in ("q", "k") else (40, 1)
        assert proven(case)
        assert not proven(case.with_tensors(**{name: changed(case, name, value, at)}))

    def test_a_channel_used_too_often_is_not_proven_in_one_sequence_but_is_in_two(self):
        case = exact_case(lengths=[18], state="none")
        k = torch.zeros_like(case["k"])
        k[:, :, 3] = 1
        often = case.with_tensors(k=k)
        assert not proven(often)
        seldom = often.with_tensors(cu_seqlens=torch.tensor([0, 8, 16, 18]))
        assert proven(seldom)
        assert report(seldom, walk=True).exact

    def test_resets_ungated_tokens_and_worst_repeats_stay_exact(self):
        """All values at their limit, every channel used as often as it may be, resets in between."""
        generator = torch.Generator().manual_seed(1)
        for _ in range(5):
            case = exact_case(lengths=[64], dims=(8, 4))
            k = torch.zeros_like(case["k"])
            order = torch.arange(64)[torch.randperm(64, generator=generator)] % 8
            k[torch.arange(64), :, order] = 1
            signs = (torch.rand(case["v"].shape, generator=generator) < 0.5).to(case["v"].dtype)
            v = (2 * signs - 1) * 128
            g = torch.where(torch.rand(case["g"].shape, generator=generator) < 0.05, -1024.0, 0.0)
            worst = case.with_tensors(k=k, v=v, g=g, beta=torch.ones_like(case["beta"]))
            assert proven(worst)
            assert report(worst, walk=True).exact


def proven(case: Case) -> bool:
    """What the proof says of a case; raw keys of one length are brought to length 1."""
    q, k = case["q"], case["k"]
    if case.options.qk == "raw":
        q, k = q / q.abs().amax(), k / k.abs().amax()
    return is_proven(
        q, k, case["v"], case["g"], case["beta"], scale=case.scale, initial_state=starting_state(case),
        bounds=case["cu_seqlens"].tolist(), dtype=case["v"].dtype, state_dtype=torch.float32,
        largest_chunk=128,
    )  # fmt: skip

"""The case file: what is written comes back bit for bit, and no damaged or lying file passes for a case."""

from __future__ import annotations

import json

import msgspec
import pytest
import torch
from gdncheck.capture.case import CallOptions, Case, Origin
from gdncheck.capture.casefile import METADATA_KEY, hash_of, read_case, read_header, write_case
from gdncheck.capture.errors import BadInput
from gdncheck.capture.make import make
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

TINY = {"lengths": [5, 0, 3], "k_heads": 1, "v_heads": 2, "dims": (4, 3)}


@pytest.fixture
def case() -> Case:
    return make("qwen", **TINY, state="random")


@pytest.fixture
def path(tmp_path, case):
    return write_case(case, tmp_path / "case.safetensors")


def refused(path, **options) -> str:
    """The one line with which reading ends; it names the file."""
    with pytest.raises(BadInput) as caught:
        read_case(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message


def rewrite(path, *, tensors=None, change=None, drop=(), document=None) -> None:
    """The same file with other tensors or another header, as a liar or a tired colleague would write it."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()[METADATA_KEY]) if document is None else document
        kept = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    header = {key: value for key, value in {**header, **(change or {})}.items() if key not in drop}
    save_file({**kept, **(tensors or {})}, path, metadata={METADATA_KEY: json.dumps(header)})


def test_every_tensor_and_header_field_comes_back(tmp_path, case):
    origin = Origin(
        kind="capture", layer=17, call=3, phase="prefill", token_hash="ab", engine="vllm", backend="fla"
    )
    options = CallOptions(qk="raw", scale=0.5, gate_space="log", rms_eps=1e-5)
    full = msgspec.structs.replace(
        case, origin=origin, options=options, model_config={"layer_types": ["a"]}, fingerprint={"gpu": None}
    )
    back = read_case(write_case(full, tmp_path / "a" / "case.safetensors"))
    assert back.tensors.keys() == full.tensors.keys()
    for name, tensor in full.tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)
    for name in ("op", "origin", "options", "model_config", "fingerprint", "finite"):
        assert getattr(back, name) == getattr(full, name)
    assert back.content_hash == hash_of(full)


def test_tensors_that_share_storage_or_are_views_are_written(tmp_path, case):
    shared = case.with_tensors(q=case["k"], v=torch.cat((case["v"], case["v"]), -1)[..., ::2])
    back = read_case(write_case(shared, tmp_path / "c.safetensors"))
    assert torch.equal(back["q"], case["k"])
    assert torch.equal(back["v"], shared["v"])


@pytest.mark.parametrize("name", ["q", "g", "beta", "cu_seqlens", "initial_state"])
def test_hash_changes_with_any_tensor(case, name):
    changed = case[name].clone()
    changed.view(-1)[-1] += 1
    assert hash_of(case.with_tensors(**{name: changed})) != hash_of(case.with_tensors(**{name: case[name]}))


def test_hash_changes_with_the_header_and_dtype_but_not_with_the_path(case, tmp_path):
    other = msgspec.structs.replace(case, options=CallOptions(scale=0.5))
    assert hash_of(other) != hash_of(case)
    one, two = (read_case(write_case(case, tmp_path / f"{n}.safetensors")) for n in "ab")
    assert one.content_hash == two.content_hash
    assert hash_of(case.with_tensors(beta=case["beta"].float())) != hash_of(
        case.with_tensors(beta=case["beta"])
    )


def test_file_cut_anywhere_is_refused_in_one_line(path, tmp_path):
    whole = path.read_bytes()
    cut = tmp_path / "cut.safetensors"
    for size in {0, 1, 7, 8, 9, *range(10, len(whole), len(whole) // 40), len(whole) - 1}:
        cut.write_bytes(whole[:size])
        message = refused(cut)
        assert any(word in message for word in ("cut short", "empty", "not a safetensors file")), message


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bit_anywhere_is_refused_or_harmless(path, tmp_path, data):
    whole = bytearray(path.read_bytes())
    length = int.from_bytes(whole[:8], "little")
    in_header = data.draw(st.booleans())
    at = data.draw(st.integers(0, 7 + length) if in_header else st.integers(8 + length, len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    damaged = tmp_path / "flipped.safetensors"
    damaged.write_bytes(whole)
    try:
        back = read_case(damaged)
    except BadInput as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    assert in_header, "a flipped bit of a tensor passed the hash"
    assert hash_of(back) == hash_of(read_case(path))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(junk=st.binary(max_size=200))
def test_junk_is_refused_in_one_line(tmp_path, junk):
    junk_file = tmp_path / "junk.safetensors"
    junk_file.write_bytes(junk)
    refused(junk_file)


def test_missing_file_directory_and_empty_file_say_which(tmp_path):
    assert "no such file" in refused(tmp_path / "absent.safetensors")
    assert "directory" in refused(tmp_path)
    empty = tmp_path / "empty.safetensors"
    empty.touch()
    assert "empty" in refused(empty)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"format_version": 2}, "update gdncheck"),
        ({"format_version": "1"}, "format version"),
        ({"format_version": None}, "format version"),
        ({"op": "prefill"}, "op is 'prefill'"),
        ({"options": {"qk": "unknown"}}, "qk"),
        ({"options": {"scale": "big"}}, "scale"),
        ({"options": {"scal": 1.0}}, "did you mean 'scale'"),
        ({"option": {}}, "did you mean 'options'"),
        ({"origin": 3}, "origin"),
        ({"finite": "yes"}, "finite"),
        ({"content_hash": "0" * 64}, "changed after it was written"),
        ({"model_config": {"hidden": 1}}, "changed after it was written"),
    ],
)
def test_header_that_lies_is_refused(path, change, word):
    rewrite(path, change=change)
    assert word in refused(path)


def test_changed_tensor_is_found_by_the_hash_and_passes_only_unchecked(path, case):
    rewrite(path, tensors={"v": case["v"] * 2})
    assert "content hash" in refused(path)
    assert torch.equal(read_case(path, check_hash=False)["v"], case["v"] * 2)


def test_nonfinite_under_a_finite_claim_names_tensor_and_token(path, case):
    v = case["v"].clone()
    v[6, 1, 2] = float("nan")
    rewrite(path, tensors={"v": v}, drop=("content_hash",))
    message = refused(path)
    assert "v holds nan at token 1 of sequence 2" in message
    assert "finite=False" in message


def test_writer_records_nonfinite_input_instead_of_lying(tmp_path, case):
    v = case["v"].clone()
    v[3] = float("inf")
    back = read_case(write_case(case.with_tensors(v=v), tmp_path / "c.safetensors"))
    assert back.finite is False
    assert bool(back["v"][3].isinf().all())


def test_nan_that_the_engine_produced_is_no_lie(tmp_path, case):
    observed = torch.full_like(case["v"], float("nan"))
    back = read_case(write_case(case.with_tensors(observed_output=observed), tmp_path / "c.safetensors"))
    assert back.finite is True
    assert bool(back["observed_output"].isnan().all())


def test_file_written_by_hand_with_a_bare_header_gets_defaults(tmp_path, case):
    path = tmp_path / "hand.safetensors"
    tensors = {name: case[name].clone() for name in ("q", "k", "v", "g", "beta")}
    save_file(tensors, path, metadata={METADATA_KEY: "{}"})
    back = read_case(path)
    assert back.lengths == [8]
    assert (back.op, back.options, back.finite) == ("rule", CallOptions(), True)
    assert back.content_hash is not None


def test_file_without_our_metadata_says_what_to_add(tmp_path, case):
    path = tmp_path / "bare.safetensors"
    save_file({"q": case["q"].clone()}, path)
    assert "metadata" in refused(path)
    save_file({"q": case["q"].clone()}, path, metadata={METADATA_KEY: "[1"})
    assert "no JSON" in refused(path)
    save_file({"q": case["q"].clone()}, path, metadata={METADATA_KEY: "[1]"})
    assert "no JSON object" in refused(path)


def test_refused_or_failed_write_leaves_nothing_and_keeps_the_old_file(tmp_path, case):
    path = tmp_path / "c.safetensors"
    with pytest.raises(BadInput, match="g has shape"):
        write_case(case.with_tensors(g=case["g"][:-1]), path)
    assert list(tmp_path.iterdir()) == []
    write_case(case, path)
    before = path.read_bytes()
    with pytest.raises(BadInput, match="scale"):
        write_case(msgspec.structs.replace(case, options=CallOptions(scale=float("nan"))), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_place_that_cannot_be_written_is_one_line(tmp_path, case):
    for bad in (tmp_path, tmp_path / "c.safetensors" / "below.safetensors"):
        (tmp_path / "c.safetensors").write_text("a file")
        with pytest.raises(BadInput) as caught:
            write_case(case, bad)
        assert "\n" not in str(caught.value)


def test_header_alone_is_read_without_the_tensors(path):
    header = read_header(path)
    assert header.origin.family == "qwen"
    assert header.content_hash is not None

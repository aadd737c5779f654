"""The version cache: what is kept, what is refused, and that nothing half-written is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile

import pytest
from gdncheck.capture.errors import BadInput, CannotRun
from gdncheck.kernels import cache
from gdncheck.kernels.cache import version_key

NEEDED = "fla/ops/gated_delta_rule/chunk.py"
FILES = {
    "fla/__init__.py": "",
    "fla/utils.py": "version = 1\n",
    NEEDED: "def chunk(): ...\n",
    "fla/layers/gdn.py": "import transformers\n",
    "setup_everything.py": "raise SystemExit\n",
}


def wheel(tmp_path, version="0.4.9", files=FILES, name="fla-core", metadata_version=None):
    path = tmp_path / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {metadata_version or version}\n\nVersion: 7\n"
    with zipfile.ZipFile(path, "w") as archive:
        for filename, text in files.items():
            archive.writestr(filename, text)
        archive.writestr(f"{name.replace('-', '_')}-{version}.dist-info/METADATA", metadata)
    return path


def everything_in(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def test_more_or_less_than_the_kernels_is_kept(tmp_path):
    root = tmp_path / "cache"
    record = cache.fetch("fla@0.4.9", cache_dir=root, from_wheel=wheel(tmp_path))
    directory = cache.find("fla", "0.4.9", root)
    kept = {name for name in everything_in(directory) if (directory / name).is_file()}
    assert kept == {"fla/__init__.py", "fla/utils.py", NEEDED, "fla_core-0.4.9.dist-info/METADATA"}
    assert (record.n_files, record.pinned) == (4, False)
    beside = json.loads(directory.with_name("0.4.9.json").read_text())
    assert (beside["version"], beside["sha256"]) == ("0.4.9", record.sha256)
    assert cache.cached(root) == [record]
    assert sorted(os.listdir(root)) == ["kernels"], "something is left of the fetch"


def test_a_cached_version_needs_the_network_again(tmp_path, monkeypatch):
    root = tmp_path / "cache"
    record = cache.fetch("fla@0.4.9", cache_dir=root, from_wheel=wheel(tmp_path))
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("pip was called"))
    assert cache.fetch("fla@0.4.9", cache_dir=root) == record


def test_a_second_wheel_of_a_version_mixes_with_the_first(tmp_path):
    root = tmp_path / "cache"
    cache.fetch("fla@0.4.9", cache_dir=root, from_wheel=wheel(tmp_path))
    other = {NEEDED: "second\n", "fla/ops/new.py": "", "fla/__init__.py": ""}
    record = cache.fetch("fla@0.4.9", cache_dir=root, from_wheel=wheel(tmp_path, files=other))
    directory = cache.find("fla", "0.4.9", root)
    assert (directory / NEEDED).read_text() == "second\n"
    assert not (directory / "fla/utils.py").exists()
    assert cache.cached(root) == [record]


BAD_MEMBERS = ["fla/ops/../../../evil.py", "fla/ops/..\\evil.py", "fla/ops/a/../b.py"]


@pytest.mark.parametrize("member", BAD_MEMBERS)
def test_an_archive_writes_outside_its_directory(tmp_path, member):
    root = tmp_path / "cache"
    before = set(everything_in(tmp_path))
    path = wheel(tmp_path, files={**FILES, member: "evil"})
    with pytest.raises(BadInput, match="refused"):
        cache.fetch("fla@0.4.9", cache_dir=root, from_wheel=path)
    assert cache.find("fla", "0.4.9", root) is None
    assert set(everything_in(tmp_path)) - before == {path.name, "cache"}


def test_a_link_in_an_archive_is_made(tmp_path):
    path = wheel(tmp_path)
    with zipfile.ZipFile(path, "a") as archive:
        link = zipfile.ZipInfo("fla/ops/link.py")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(BadInput, match="not an ordinary file"):
        cache.fetch("fla@0.4.9", cache_dir=tmp_path / "cache", from_wheel=path)


def test_an_archive_that_unfolds_to_too_much_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "MAX_UNPACKED", 10_000)
    path = wheel(tmp_path, files={**FILES, "fla/ops/zeros.py": "0" * 20_000})
    with pytest.raises(BadInput, match="unfold"):
        cache.fetch("fla@0.4.9", cache_dir=tmp_path / "cache", from_wheel=path)


@pytest.mark.parametrize("cut", [0, 10, 200, -30])
def test_a_truncated_wheel_is_kept_in_part(tmp_path, cut):
    path = wheel(tmp_path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(BadInput, match="no wheel") as raised:
        cache.fetch("fla@0.4.9", cache_dir=tmp_path / "cache", from_wheel=path)
    assert "\n" not in str(raised.value)
    assert everything_in(tmp_path / "cache") == []


WRONG_WHEELS = [
    (dict(version="0.4.8"), "is fla-core 0.4.8, not fla-core 0.4.9"),
    (dict(name="other"), "is other 0.4.9"),
    (dict(files={"fla/__init__.py": ""}), f"looked for {NEEDED}"),
]


@pytest.mark.parametrize(("made", "words"), WRONG_WHEELS)
def test_another_package_or_layout_is_taken_for_the_kernel(tmp_path, made, words):
    with pytest.raises(BadInput, match=words):
        cache.fetch("fla@0.4.9", cache_dir=tmp_path / "cache", from_wheel=wheel(tmp_path, **made))


def test_other_content_under_a_tested_version_is_taken(tmp_path):
    with pytest.raises(BadInput, match="sha256"):
        cache.fetch("fla@0.6.0", cache_dir=tmp_path / "cache", from_wheel=wheel(tmp_path, "0.6.0"))
    assert everything_in(tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("name", "words"),
    [("fla", "give the version"), ("fla@", "give the version"), ("fla@../../x", "give the version"),
     ("fla@0.0.1", "layout of that version is unknown"), ("nothing@1.0", "can be fetched"),
     ("fla.chunk@0.6.0", "fla@0.6.0")],
)  # fmt: skip
def test_a_wrong_name_reaches_pip(tmp_path, monkeypatch, name, words):
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("pip was called"))
    with pytest.raises(BadInput, match=words):
        cache.fetch(name, cache_dir=tmp_path)


def pip_says(monkeypatch, stderr):
    done = subprocess.CompletedProcess([], 1, "", stderr)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: done)


def test_an_unknown_version_and_a_dead_network_are_told_alike(tmp_path, monkeypatch):
    refusal = "ERROR: Could not find fla-core==0.4.9 (from versions: {})\nERROR: No match\n"
    pip_says(monkeypatch, refusal.format("0.4.0, 0.6.0"))
    with pytest.raises(BadInput, match=r"it has 0\.4\.0, 0\.6\.0"):
        cache.fetch("fla@0.4.9", cache_dir=tmp_path)
    pip_says(monkeypatch, "WARNING: Retrying\n" + refusal.format("none"))
    with pytest.raises(CannotRun, match="--from-wheel"):
        cache.fetch("fla@0.4.9", cache_dir=tmp_path)
    pip_says(monkeypatch, f"{sys.executable}: No module named pip\n")
    with pytest.raises(CannotRun, match="pip is not installed"):
        cache.fetch("fla@0.4.9", cache_dir=tmp_path)
    assert everything_in(tmp_path) == []


def test_prune_removes_another_version_or_leaves_files(tmp_path):
    root = tmp_path / "cache"
    for version in ("0.4.7", "0.4.9", "0.10.0"):
        cache.fetch(f"fla@{version}", cache_dir=root, from_wheel=wheel(tmp_path, version))
    assert [r.version for r in cache.cached(root)] == ["0.4.7", "0.4.9", "0.10.0"]
    with pytest.raises(BadInput, match="not in the cache"):
        cache.prune(["fla@0.4.7", "fla@1.0"], cache_dir=root)
    assert [r.version for r in cache.prune(["fla@0.4.7"], cache_dir=root)] == ["0.4.7"]
    assert [r.version for r in cache.cached(root)] == ["0.4.9", "0.10.0"]
    cache.prune(cache_dir=root)
    assert everything_in(root) == ["kernels", "kernels/fla"]


def test_versions_are_ordered_as_text():
    ordered = [
        "0.3.2",
        "0.4.dev1",
        "0.4.0a2",
        "0.4.0rc1",
        "0.4",
        "0.4.post1",
        "0.4.1",
        "0.4.10",
        "0.19.1",
        "0.33.0",
        "1.0.dev3",
        "1.0",
    ]
    assert sorted(reversed(ordered), key=version_key) == ordered
    assert version_key("0.4") == version_key("0.4.0") == version_key("0.4.0+cu128")


@pytest.mark.slow
def test_the_real_package_index_gives_the_tested_wheel(tmp_path):
    record = cache.fetch("fla@0.6.0", cache_dir=tmp_path)
    assert record.pinned
    assert (cache.find("fla", "0.6.0", tmp_path) / NEEDED).is_file()
    with pytest.raises(BadInput, match="it has"):
        cache.fetch("fla@99.0", cache_dir=tmp_path)

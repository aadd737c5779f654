"""Kernel names: every valid form is read and written back; every wrong one is told in one line."""

from __future__ import annotations

import importlib.metadata
import subprocess

import pytest
from gdncheck.capture.errors import BadInput, CannotRun
from gdncheck.kernels import registry
from gdncheck.kernels.registry import KernelName, parse_name, resolve
from hypothesis import given
from hypothesis import strategies as st

PLAIN = st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True)
VERSIONS = r"[0-9](\.[0-9]{1,2}){0,3}(rc1|\.dev0|\+cu128)?"
WHERE = st.one_of(
    st.just({}),
    st.builds(lambda v: {"version": v}, st.from_regex(VERSIONS, fullmatch=True)),
    st.builds(lambda p: {"path": p}, st.sampled_from(["../vllm", ".", "/a b/c", "x:y"])),
    st.builds(lambda r: {"revision": r}, st.sampled_from(["main", "v0.19.1", "a1b2c3", "fix/gdn"])),
)


@given(PLAIN, st.sampled_from(registry.OPS), WHERE)
def test_a_registered_name_is_read_differently_than_written(family, op, where):
    name = KernelName(family=family, op=op, **where)
    assert parse_name(str(name)) == name


@given(st.lists(PLAIN, min_size=1, max_size=3), st.lists(PLAIN, min_size=1, max_size=2))
def test_an_import_path_is_read_differently_than_written(module, attribute):
    name = KernelName(module=".".join(module), attribute=".".join(attribute))
    assert parse_name(str(name)) == name


WRONG = [
    "", "fla", "fla.", ".chunk", "fla.chunk@", "fla.chunk@path:", "fla.chunk@git:", "fla.chunk@newest",
    "fla chunk", "a:b:c", "mod:", ":f", "mod:f()", "../kern:f", "fla.chunk@1 2", "kern.py:f", "dir/kern.py:f",
]  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_name_is_taken(text):
    with pytest.raises(BadInput) as raised:
        parse_name(text)
    assert "\n" not in str(raised.value)
    if ".py" in text:
        assert "kern:f" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("fla.chnk", "fla.chunk"),
        ("fla.recurent@0.6.0", "fla.recurrent"),
        ("transformer.chunk", "transformers.chunk"),
    ],
)
def test_a_slip_of_the_pen_gets_no_suggestion(text, near):
    with pytest.raises(BadInput) as raised:
        resolve(text)
    assert f"did you mean {near}" in str(raised.value)
    assert "emulation.chunk" in str(raised.value), "known kernels are not named"
    assert "\n" not in str(raised.value)


def test_an_installed_kernel_gets_another_version_or_path():
    installed = importlib.metadata.version("fla-core")
    for text in ("fla.chunk", f"fla.chunk@{installed}"):
        spec = resolve(text)
        assert (spec.name, spec.version, spec.sys_path) == (f"fla.chunk@{installed}", installed, ())


def test_a_version_that_is_not_cached_is_taken_for_the_installed_one(tmp_path):
    with pytest.raises(CannotRun, match=r"gdncheck kernels fetch fla@0\.0\.1"):
        resolve("fla.chunk@0.0.1", cache_dir=tmp_path)


def test_a_missing_package_is_not_told_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setattr(registry, "installed_version", lambda package: None)
    with pytest.raises(CannotRun, match="pip install fla-core"):
        resolve("fla.chunk")
    assert registry.default_kernels() == []


def test_a_version_is_taken_for_a_kernel_that_has_none():
    with pytest.raises(BadInput, match="no versions"):
        resolve("emulation.chunk@1.0")


def test_a_working_tree_is_not_put_first(tmp_path):
    spec = resolve(f"fla.chunk@path:{tmp_path}")
    assert spec.sys_path == (str(tmp_path.resolve()),)
    with pytest.raises(BadInput, match="no directory"):
        resolve("fla.chunk@path:/no/such/directory")


def git(directory, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run(["git", "-C", str(directory), *identity, *arguments], check=True, capture_output=True)


def test_a_revision_is_not_the_commit_that_it_names(tmp_path):
    clone = tmp_path / "clone"
    clone.mkdir()
    git(clone, "init", "-q")
    for text in ("one", "two"):
        (clone / "fla.txt").write_text(text)
        git(clone, "add", ".")
        git(clone, "commit", "-q", "-m", text)
        git(clone, "tag", text)
    (clone / "fla.txt").write_text("not committed")
    sources, cache_dir = {"fla": str(clone)}, tmp_path / "cache"
    for text in ("one", "two", "one"):
        spec = resolve(f"fla.chunk@git:{text}", cache_dir=cache_dir, sources=sources)
        with open(f"{spec.sys_path[0]}/fla.txt") as file:
            assert file.read() == text
    assert (clone / "fla.txt").read_text() == "not committed"
    with pytest.raises(BadInput, match="no revision"):
        resolve("fla.chunk@git:three", cache_dir=cache_dir, sources=sources)
    with pytest.raises(BadInput, match="--source fla=DIR"):
        resolve("fla.chunk@git:one", cache_dir=cache_dir)


class _EntryPoint:
    name, value = "other", "somebody.gdn_kernels"


def test_a_kernel_of_another_package_is_not_found(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [_EntryPoint])
    spec = resolve("other.chunk")
    assert (spec.module, spec.attribute, spec.name) == ("somebody.gdn_kernels", "chunk", "other.chunk")
    with pytest.raises(BadInput, match=r"other\.\*"):
        resolve("nobody.chunk")


def test_every_adapter_has_what_the_registry_reads():
    for name, adapter in registry.own_kernels().items():
        contract = adapter.contract_for(registry.installed_version(adapter.package))
        assert contract.kernel.partition("@")[0] == name
        assert len({clause.id for clause in contract.clauses}) == len(contract.clauses)
        assert adapter.capabilities.devices


def test_default_kernels_are_not_those_that_are_installed():
    names = registry.default_kernels()
    assert f"fla.chunk@{importlib.metadata.version('fla-core')}" in names
    assert not any(name.startswith("emulation") for name in names)
    assert [resolve(name).name for name in names] == names

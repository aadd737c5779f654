"""Modules are found where the user has them and never in gdncheck's own folders."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest
from gdncheck.kernels import searchpath
from gdncheck.kernels.searchpath import use_search_path


@pytest.fixture
def clean(monkeypatch):
    """The import system of this process is put back after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A repository laid out like ours, with a user's module beside the folders of the layers."""
    for layer in searchpath.LAYERS:
        (tmp_path / layer).mkdir()
        (tmp_path / layer / "__init__.py").write_text("")
    (tmp_path / "user_kernel_of_test.py").write_text("import user_library_of_test\n")
    (tmp_path / "user_library_of_test").mkdir()
    (tmp_path / "user_library_of_test" / "ops.py").write_text("x = 1\n")
    monkeypatch.setattr(searchpath, "kernels_path", [str(tmp_path / "kernels")])
    return tmp_path


def found(name):
    return importlib.util.find_spec(name)


def test_our_folders_are_importable_from_the_root(clean, root):
    for layer in searchpath.LAYERS:
        assert found(layer) is None
    use_search_path((), [str(root)])
    assert {layer: found(layer) for layer in searchpath.LAYERS} == dict.fromkeys(searchpath.LAYERS)
    assert importlib.import_module("user_kernel_of_test") is not None
    assert importlib.import_module("user_library_of_test.ops").x == 1


def test_our_root_on_pythonpath_makes_our_folders_importable(clean, root):
    sys.path.insert(0, str(root))
    assert found("kernels") is not None, "the test's own setting does not show the fault"
    use_search_path((), ())
    assert found("kernels") is None
    assert found("user_kernel_of_test") is not None


def test_a_users_own_package_called_kernels_is_hidden(clean, root, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "kernels").mkdir()
    (elsewhere / "kernels" / "__init__.py").write_text("mine = True\n")
    use_search_path((), [str(root), str(elsewhere)])
    assert found("kernels").origin == str(elsewhere / "kernels" / "__init__.py")


def test_a_users_directory_shadows_what_is_installed(clean, root):
    (root / "msgspec.py").write_text("raise RuntimeError\n")
    use_search_path((), [str(root)])
    assert found("msgspec").origin != str(root / "msgspec.py")


def test_a_version_cache_does_not_come_first(clean, tmp_path):
    (tmp_path / "msgspec.py").write_text("")
    use_search_path([str(tmp_path)], ())
    sys.modules.pop("msgspec_unrelated", None)
    assert importlib.machinery.PathFinder.find_spec("msgspec").origin == str(tmp_path / "msgspec.py")

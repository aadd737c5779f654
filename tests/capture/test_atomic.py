"""A file is written whole or not at all, and may be read by whom the umask allows."""

from __future__ import annotations

import os

import pytest
from gdncheck.capture.atomic import atomic_path
from gdncheck.capture.casefile import write_case
from gdncheck.capture.errors import BadInput
from gdncheck.capture.make import make


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_case_file_is_private_although_the_umask_shares_it(tmp_path, umask):
    before = os.umask(umask)
    try:
        path = write_case(make("qwen", lengths=(3,)), tmp_path / "case.safetensors")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_failed_write_leaves_half_a_file_or_loses_the_old_one(tmp_path):
    target = tmp_path / "case.safetensors"
    target.write_text("old")

    def write_half() -> None:
        with atomic_path(target) as temporary:
            temporary.write_text("ne")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        write_half()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_directory_as_target_is_not_refused(tmp_path):
    with pytest.raises(BadInput, match="is a directory"), atomic_path(tmp_path):
        pytest.fail("the body must not run")

"""The fingerprint names software and hardware, and nothing that points to a person or a machine."""

from __future__ import annotations

import getpass
import json
import platform
import sys
from pathlib import Path

import torch
from gdncheck.capture.fingerprint import fingerprint, package_version


def test_versions_are_told_without_importing_the_packages():
    before = {name for name in ("triton", "fla", "transformers", "vllm") if name in sys.modules}
    found = fingerprint()
    assert found["packages"]["torch"] == package_version("torch")
    assert found["python"] == platform.python_version()
    assert package_version("no-such-package-anywhere") is None
    assert {name for name in ("triton", "fla", "transformers", "vllm") if name in sys.modules} == before


def test_nothing_private_is_told():
    text = json.dumps(fingerprint())
    words = [platform.node(), str(Path.home()), str(Path.cwd()), sys.prefix]
    words += [getpass.getuser()] if len(getpass.getuser()) > 3 else []
    assert not [word for word in words if len(word) > 3 and word in text]


def test_gpu_is_told_only_where_there_is_one():
    assert (fingerprint()["gpu"] is not None) == torch.cuda.is_available()

"""A family of kernels that exists only in tests: one torch file, released in wheels or kept in a git clone.

Its chunk kernel is the recurrence; LINE is the statement that a release gets wrong, BROKEN the text that
makes a release that cannot be loaded.
"""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

LINE = "S = decay * S"
WRONG = "S = decay * S if t else S"  # forgets the first token's decay
BROKEN = "import a_package_that_nobody_has\n"
SOURCE = """\
import torch
from gdncheck.kernels.contract import Capabilities, Contract
from gdncheck.kernels.interface import KernelInfo


class Chunk:
    capabilities = Capabilities()

    def __init__(self, version=None):
        self.version = version

    def describe(self):
        name = "toy.chunk" + (f"@{self.version}" if self.version else "")
        return KernelInfo(
            name=name, version=self.version, capabilities=self.capabilities, contract=Contract(kernel=name)
        )

    def run(self, call):
        x = {n: t.double() if t.is_floating_point() else t for n, t in call.tensors.items()}
        q, k = x["q"], x["k"]
        if call.options.qk == "raw":
            q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        share = x["v"].shape[1] // q.shape[1]
        q, k = (y.repeat_interleave(share, 1) for y in (q, k))
        bounds = x["cu_seqlens"].tolist()
        rows, states = [], []
        for n, (start, end) in enumerate(zip(bounds, bounds[1:])):
            S = x["initial_state"][n]
            for t in range(end - start):
                at = start + t
                decay = x["g"][at].exp()[:, None, None]
                {line}
                read = torch.einsum("hk,hkv->hv", k[at], S)
                u = x["beta"][at][:, None] * (x["v"][at] - read)
                S = S + torch.einsum("hk,hv->hkv", k[at], u)
                rows.append(call.options.scale * torch.einsum("hk,hkv->hv", q[at], S))
            states.append(S)
        output = torch.stack(rows).to(call.tensors["v"].dtype)
        return {"output": output, "final_state": torch.stack(states).float()}


KERNELS = {"chunk": Chunk}
""".replace("{line}", LINE)


def release(folder: Path, version: str, source: str) -> None:
    """A wheel of the family in a folder."""
    with zipfile.ZipFile(folder / f"toy_gdn-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("toy_adapter.py", source)
        info = f"toy_gdn-{version}.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: toy-gdn\nVersion: {version}\n\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def git(clone: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
    command = ["git", "-C", str(clone), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(clone: Path, source: str, title: str) -> str:
    """Commit the file with this text; the commit's hash."""
    (clone / "toy_adapter.py").write_text(source)
    git(clone, "add", "toy_adapter.py")
    git(clone, "commit", "--quiet", "--allow-empty", "-m", title)
    return git(clone, "rev-parse", "HEAD")

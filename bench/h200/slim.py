"""Make small wheels that hold an engine's GDN kernels only, to carry to a machine without a network.

usage: python bench/h200/slim.py WHEEL... --out FOLDER

The result has the original's name and METADATA and the files that gdncheck keeps; `gdncheck kernels fetch
NAME@VERSION --from-wheel FILE` takes it, and knows it by the hash of its kernel files where the version
is one that was tested. vllm 0.19.1: 413 MB becomes 0.06 MB.
"""

from __future__ import annotations

import argparse
import os
import re
import zipfile
from pathlib import Path

from gdncheck.capture.errors import BadInput
from gdncheck.kernels.cache import version_key
from gdncheck.kernels.keep import KEEP, Kept


def line_for(wheel: Path) -> Kept:
    """The table's line for a wheel file. Raises BadInput where it is of no known distribution or version."""
    match = re.match(r"(?P<name>[^-]+)-(?P<version>[^-]+)-", wheel.name)
    name = match["name"].replace("_", "-") if match else ""
    for kept in KEEP:
        if match and kept.distribution == name:
            at, until = version_key(match["version"]), kept.until
            if version_key(kept.since) <= at and (until is None or at < version_key(until)):
                return kept
    raise BadInput(f"{wheel.name}: kept are wheels of {', '.join(sorted({k.distribution for k in KEEP}))}")


def slim(wheel: Path, folder: Path) -> Path:
    """Write the small wheel into `folder`; returns its path."""
    kept = line_for(wheel)
    target = folder / wheel.name
    unfinished = target.with_suffix(".tmp")
    with (
        zipfile.ZipFile(wheel) as full,
        zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as small,
    ):
        for name in full.namelist():
            if not name.endswith("/") and kept.holds(name):
                small.writestr(name, full.read(name))
    os.replace(unfinished, target)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for wheel in options.wheels:
        small = slim(wheel, options.out)
        print(f"{small.name}: {wheel.stat().st_size} -> {small.stat().st_size} bytes")


if __name__ == "__main__":
    main()

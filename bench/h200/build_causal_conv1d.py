"""Build the CUDA package causal-conv1d for one GPU architecture, from its source archive, without a network.

usage: python bench/h200/build_causal_conv1d.py causal_conv1d-1.6.0.tar.gz [--arch 90] [--jobs 16]
       [--into DIRECTORY] [--only-compile]

The one idea: the package's own build makes eleven architectures of forward, backward and update kernels, for
nine pairs of dtypes in one file each. Inference needs neither the backward nor the other architectures, so
each source is cut by its explicit instantiations, one input dtype a unit, and the units compile at once;
backward entry points are there and say that they were left out. The flags are setup.py's of 1.6.0. What is
installed is the package's own Python, the module `causal_conv1d_cuda` and metadata, into --into (default: the
running Python's site-packages). --only-compile makes the objects and stops; a CPU build of torch will do.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from gdncheck.kernels.flashinfer_build import find_compiler, toolkit_root
from torch.utils import cpp_extension

MODULE = "causal_conv1d_cuda"
DTYPES = ("float", "at::Half", "at::BFloat16")
# setup.py, extra_compile_args of nvcc.
FLAGS = (
    "-O3", "-std=c++17", "-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT16_OPERATORS__", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT162_OPERATORS__", "-U__CUDA_NO_BFLOAT162_CONVERSIONS__",
    "--expt-relaxed-constexpr", "--expt-extended-lambda", "--use_fast_math", "-Xcompiler", "-fPIC",
)  # fmt: skip
INSTANTIATION = re.compile(r"^template void \w+<([\w:]+), [\w:]+>\(.*\);\s*$", re.MULTILINE)
NO_BACKWARD = """
#include <torch/extension.h>
#include <c10/cuda/CUDAStream.h>
#include "causal_conv1d.h"
template <typename input_t, typename weight_t>
void causal_conv1d_bwd_cuda(ConvParamsBwd &, cudaStream_t) { TORCH_CHECK(false, "built without backward"); }
template <typename input_t, typename weight_t>
void causal_conv1d_channellast_bwd_cuda(ConvParamsBwd &, cudaStream_t) {
  TORCH_CHECK(false, "built without backward");
}
"""


def sources(package: Path) -> list[Path]:
    """The .cu files, cut into one unit per input dtype."""
    units = []
    for name in ("causal_conv1d_fwd", "causal_conv1d_update"):
        text = (package / "csrc" / f"{name}.cu").read_text()
        found = {match[1] for match in INSTANTIATION.finditer(text)}
        if found != set(DTYPES):
            raise SystemExit(f"{name}.cu has instantiations for {sorted(found)}, not for {sorted(DTYPES)}")
        for dtype in DTYPES:
            kept = INSTANTIATION.sub(lambda match, own=dtype: match[0] if match[1] == own else "", text)
            unit = package / "csrc" / f"{name}_{dtype.rpartition(':')[2].lower()}.cu"
            unit.write_text(kept)
            units.append(unit)
    return units


def without_backward(package: Path) -> Path:
    """A source with the backward entry points that the module's own file names."""
    pairs = [(a, b) for a in DTYPES for b in DTYPES]
    made = [
        f"template void {name}<{a}, {b}>(ConvParamsBwd &, cudaStream_t);"
        for name in ("causal_conv1d_bwd_cuda", "causal_conv1d_channellast_bwd_cuda")
        for a, b in pairs
    ]
    source = package / "csrc" / "no_backward.cpp"
    source.write_text(NO_BACKWARD + "\n".join(made) + "\n")
    return source


def run(command: list[str]) -> float:
    """Run one compiler; its seconds. Ends the build with what it said where it fails."""
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return time.monotonic() - started


def compile_all(package: Path, arch: str, jobs: int, only_compile: bool) -> list[Path]:
    """Every unit's object, compiled at once."""
    if only_compile and torch.version.cuda is None:
        # What a CPU build of torch leaves out of its headers; it holds no more than how c10_cuda was built.
        macros = package / "csrc" / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h"
        macros.parent.mkdir(parents=True)
        macros.write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
    nvcc = find_compiler()
    toolkit = toolkit_root(nvcc) / "include"
    folders = [*cpp_extension.include_paths(), package / "csrc", toolkit]
    folders += [toolkit / "cccl"] if (toolkit / "cccl").is_dir() else []
    includes = [word for folder in folders for word in ("-isystem", str(folder))]
    includes += ["-isystem", sysconfig.get_path("include")]
    target = ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
    commands = {unit: [nvcc, *FLAGS, *target] for unit in sources(package)}
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    host = ["c++", "-O2", "-std=c++17", "-fPIC", abi, f"-DTORCH_EXTENSION_NAME={MODULE}"]
    host += ["-DTORCH_API_INCLUDE_EXTENSION_H"]
    for source in (package / "csrc" / "causal_conv1d.cpp", without_backward(package)):
        commands[source] = host
    objects = {unit: unit.with_suffix(".o") for unit in commands}
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        waiting = {
            unit: pool.submit(run, [*command, *includes, "-c", str(unit), "-o", str(objects[unit])])
            for unit, command in commands.items()
        }
        for unit, one in waiting.items():
            print(f"  {unit.name}: {one.result():.1f} s", flush=True)
    return list(objects.values())


def link(objects: list[Path], library: Path) -> None:
    """The Python module."""
    folders = [*cpp_extension.library_paths(), str(toolkit_root(find_compiler()) / "lib64")]
    libraries = ("c10", "c10_cuda", "torch_cpu", "torch_cuda", "torch", "torch_python", "cudart")
    run(
        ["c++", "-shared", *map(str, objects), *(f"-L{folder}" for folder in folders)]
        + [f"-Wl,-rpath,{folder}" for folder in folders]
        + [f"-l{name}" for name in libraries]
        + ["-o", str(library)]
    )


def install(package: Path, library: Path, into: Path) -> None:
    """The package, its module, and metadata that names its version."""
    version = re.search(r'__version__ = "([^"]+)"', (package / "causal_conv1d" / "__init__.py").read_text())
    assert version is not None
    shutil.copytree(package / "causal_conv1d", into / "causal_conv1d", dirs_exist_ok=True)
    shutil.copy2(library, into / library.name)
    metadata = into / f"causal_conv1d-{version[1]}.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: causal-conv1d\nVersion: {version[1]}\n"
        "Summary: built without backward by build_causal_conv1d.py\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--arch", default="90")
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--into", type=Path, default=Path(sysconfig.get_path("purelib")))
    parser.add_argument("--only-compile", action="store_true")
    given = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as work, tarfile.open(given.archive) as archive:
        archive.extractall(work, filter="data")
        package = next(path.parent for path in Path(work).glob("*/setup.py"))
        objects = compile_all(package, given.arch, given.jobs, given.only_compile)
        if not given.only_compile:
            library = Path(work) / f"{MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"
            link(objects, library)
            given.into.mkdir(parents=True, exist_ok=True)
            install(package, library, given.into)
            print(f"installed into {given.into}")
    print(f"causal-conv1d for sm_{given.arch}: {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    sys.exit(main())

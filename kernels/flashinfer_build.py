"""Compiles FlashInfer's GDN prefill from the sources its wheel carries, once per machine and version.

The idea: upstream's own build makes 32 instances (two dtypes, four switches) through ninja and the
whole package. Production passes bf16 with a gate and beta, so only grouped heads (yes, no) and an
initial state (yes, no) vary: four instances and two launcher files, compiled with upstream's flags for
compute_90a. The launcher refers to the other 28 as well; the library is linked with lazy binding, so
they need not exist until called. The result needs an SM90 GPU and apache-tvm-ffi, not flashinfer.

Leaves to others: fetching and unpacking the wheel (`cache`, `keep`), loading and calling (`flashinfer`).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from ..capture.errors import BadInput, CannotRun

LIBRARY_NAME = "gdn_prefill_sm90.so"
TEMPLATE = "csrc/gdn_prefill_sm90_kernel_inst.jinja"
LAUNCHERS = ("csrc/gdn_prefill_launcher.cu", "csrc/prefill_kernel_delta_rule_sm90.cu")
INCLUDES = ("include", "csrc", "cutlass/include", "cutlass/tools/util/include")
# flashinfer 0.6.6, jit/core.py gen_jit_spec and jit/gdn.py: the flags that decide the arithmetic
# (fast math, C++20, the architecture) and the switches that its headers read.
NVCC_FLAGS = (
    "-std=c++20", "-O3", "-DNDEBUG", "-use_fast_math", "--expt-relaxed-constexpr",
    "--compiler-options=-fPIC", "-static-global-template-stub=false",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED", "-DFLAT_SM90A_ENABLED",
    "-DFLASHINFER_ENABLE_F16", "-DFLASHINFER_ENABLE_BF16",
    "-DFLASHINFER_ENABLE_FP8_E4M3", "-DFLASHINFER_ENABLE_FP8_E5M2",
    "-DFLASHINFER_ENABLE_FP8_E8M0", "-DFLASHINFER_ENABLE_FP4_E2M1",
)  # fmt: skip


class Instance(msgspec.Struct, frozen=True):
    """One compiled variant of the prefill kernel (bf16, with gate and beta)."""

    is_gva: bool
    """More value heads than key heads."""
    init_state: bool
    """Starts from a given state instead of zeros."""

    @property
    def name(self) -> str:
        return f"gdn_prefill_kernel_bf16_g{int(self.is_gva)}b1a1i{int(self.init_state)}"

    def render(self, template: str) -> str:
        """The instance's source: upstream's template with its five names filled in.

        Raises BadInput where the template has a placeholder that is not one of the five.
        """
        values = {
            "dtype": "nv_bfloat16",
            "is_gva": str(self.is_gva).lower(),
            "needs_beta": "true",
            "needs_alpha": "true",
            "init_state": str(self.init_state).lower(),
        }
        for name, value in values.items():
            template = template.replace("{{ " + name + " }}", value)
        if "{{" in template:
            unknown = template[template.index("{{") :].split("}}")[0] + "}}"
            raise BadInput(
                f"{TEMPLATE}: unknown placeholder {unknown}; this version's sources are not those of "
                "flashinfer 0.6.6 (gdncheck kernels fetch flashinfer@0.6.6)"
            )
        return template


INSTANCES = tuple(Instance(gva, state) for gva, state in itertools.product((False, True), repeat=2))


def toolkit_root(nvcc: str) -> Path:
    """The CUDA toolkit that a compiler belongs to: where its headers lie."""
    for start in (Path(nvcc).resolve().parent.parent, Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))):
        if (start / "include" / "cuda_runtime.h").is_file():
            return start
    raise CannotRun(f"no CUDA headers beside {nvcc}; set CUDA_HOME to a CUDA 12.8 or newer toolkit")


def find_compiler() -> str:
    """Path of nvcc. Raises CannotRun where there is none."""
    named = os.environ.get("CUDACXX") or shutil.which("nvcc")
    beside = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
    found = named or (str(beside) if beside.is_file() else None)
    if found is None:
        raise CannotRun(
            "flashinfer.chunk is compiled at first use and nvcc is not there; install the CUDA toolkit "
            "(12.8 or newer), or copy a built gdn_prefill_sm90.so into the cache"
        )
    return found


def ffi_includes() -> list[Path]:
    """Header folders of apache-tvm-ffi, found without importing it."""
    from importlib.util import find_spec

    spec = find_spec("tvm_ffi")
    if spec is None or not spec.submodule_search_locations:
        raise CannotRun(
            "flashinfer.chunk needs apache-tvm-ffi; run: pip install 'apache-tvm-ffi>=0.1.6,<0.2'"
        )
    root = Path(next(iter(spec.submodule_search_locations)))
    return [root / "include", root / "3rdparty" / "dlpack" / "include"]


def compile_commands(
    data: Path, work: Path, nvcc: str, instances: tuple[Instance, ...] = INSTANCES
) -> Iterator[tuple[Path, list[str]]]:
    """(source, command without -o) for every source; writes the rendered sources into `work`.

    data: the kept folder `flashinfer/data` of the wheel.
    """
    template_path = data / TEMPLATE
    if not template_path.is_file():
        raise BadInput(f"{data}: no {TEMPLATE}; looked for the sources of flashinfer 0.6.6's GDN prefill")
    template = template_path.read_text()
    sources = []
    for instance in instances:
        source = work / f"{instance.name}.cu"
        source.write_text(instance.render(template))
        sources.append(source)
    sources += [data / launcher for launcher in LAUNCHERS]
    folders = [sysconfig.get_path("include"), *ffi_includes(), *(data / name for name in INCLUDES)]
    # CUDA 13 moved its C++ library below include/cccl.
    folders += [folder for folder in [toolkit_root(nvcc) / "include" / "cccl"] if folder.is_dir()]
    includes = [word for folder in folders for word in ("-isystem", str(folder))]
    for source in sources:
        yield source, [nvcc, *NVCC_FLAGS, *includes, "-c", str(source)]


def build(
    data: Path, library: Path, *, jobs: int = 1, report: Callable[[str], None] = lambda line: None
) -> Path:
    """Compile and link; returns `library`, which appears only when complete.

    A build that is ended goes on where it was: finished objects wait in a folder beside the library,
    named by their command and source, and are removed with it once the library is linked.
    report: receives one line per object, with its seconds.
    Raises CannotRun with the compiler's first error line.
    """
    nvcc = find_compiler()
    work = library.with_name(f".{library.name}.objects")
    work.mkdir(parents=True, exist_ok=True)
    commands = list(compile_commands(data, work, nvcc))

    def compile_one(item: tuple[Path, list[str]]) -> Path:
        source, command = item
        target = work / f"{source.stem}.{_fingerprint(source, command)}.o"
        if target.is_file():
            report(f"{target.name}: there already")
            return target
        started = time.perf_counter()
        unfinished = target.with_suffix(f".{os.getpid()}")
        try:
            run_compiler([*command, "-o", str(unfinished)], source.name)
            os.replace(unfinished, target)
        finally:
            unfinished.unlink(missing_ok=True)
        report(f"{target.name}: {time.perf_counter() - started:.0f} s")
        return target

    with ThreadPoolExecutor(jobs) as pool:
        objects = list(pool.map(compile_one, commands))
    linked = library.with_name(f".{library.name}.{os.getpid()}")
    try:
        # -z lazy: 28 instances that nobody calls stay unresolved. The driver is asked for at run time
        # and the CUDA runtime linked in, so that no library of a toolkit is needed to load the result.
        command = [nvcc, "-shared", "-Xlinker", "-z", "-Xlinker", "lazy", *map(str, objects)]
        run_compiler([*command, "-o", str(linked)], library.name)
        os.replace(linked, library)
    finally:
        linked.unlink(missing_ok=True)
    shutil.rmtree(work)
    return library


def _fingerprint(source: Path, command: list[str]) -> str:
    """What an object depends on: its source and how it is compiled, without the folder it lies in."""
    text = "\0".join([source.read_text(), *command[1:-1]])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def run_compiler(command: list[str], what: str) -> None:
    """Run one compiler command; a failure is one line with the compiler's first error."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    lines = (done.stderr or done.stdout).splitlines()
    telling = (line for line in lines if "error" in line or "cannot find" in line)
    first = next(telling, lines[0] if lines else "no message")
    raise CannotRun(f"{Path(command[0]).name} failed on {what}: {first.strip()}")


def main(argv: list[str] | None = None) -> int:
    """Command line: python -m gdncheck.kernels.flashinfer_build DATA LIBRARY --jobs 2."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "data", type=Path, help="folder flashinfer/data of an unpacked flashinfer 0.6.6 wheel"
    )
    parser.add_argument("library", type=Path, help=f"file to write, e.g. {LIBRARY_NAME}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    options = parser.parse_args(argv)
    started = time.perf_counter()
    try:
        library = build(
            options.data,
            options.library,
            jobs=options.jobs,
            report=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except (BadInput, CannotRun) as error:
        print(f"flashinfer_build: {error}", file=sys.stderr)
        return error.exit_status
    print(f"{library}: {library.stat().st_size} bytes in {time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

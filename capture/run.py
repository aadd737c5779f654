"""Capture GDN layers of a Hugging Face checkpoint: the library twin of `gdncheck capture`.

The idea: check everything that can be checked without the model, then let a child process
(`gdncheck.capture.child`) run it, and let its files appear only when the run is over. A capture that
fails or is interrupted leaves what was there before, and one that succeeds replaces all calls of the
layers it took, so a directory never mixes two runs of one layer.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

import msgspec

from .checkpoint import What, find_checkpoint, model_shape, select_layers
from .child import Errand
from .errors import BadInput, CannotRun
from .plan import check_room, make_plan
from .records import CaptureRequest, CaptureResult, Message, Plan
from .tokens import TokenFile, check_ids, read_tokens

DTYPES = ("auto", "bfloat16", "float16", "float32")


def capture(
    model: Path | str,
    *,
    tokens: Path | str | Sequence[int],
    layers: str | int | list[str | int] | list[str] | list[int],
    out: Path | str = "captures",
    what: What = "core",
    split: int | list[int] | None = None,
    decode: int = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: str = "auto",
    early_stop: bool = False,
    device_map: str | None = None,
    offload_folder: Path | str | None = None,
    max_memory: dict[str, str] | None = None,
    backend: Literal["auto", "torch", "installed"] = "auto",
    sys_path: Sequence[Path | str] = (),
    on_plan: Callable[[Plan], None] | None = None,
    progress: Callable[[str], None] | None = None,
) -> CaptureResult:
    """Run the checkpoint on frozen tokens and write one case per layer and call into `out`.

    model: checkpoint directory, or OWNER/NAME in the local Hugging Face cache.
    tokens: file (JSON ids, or *.txt for the model's tokenizer), or the ids themselves.
    layers: `17`, `0-2`, `0,17`, `all`, or a list of those; full-attention layers are refused.
    what: `rule` (q, k, v, g, beta, states, output) or `core` (also conv, gate and norm inputs).
    split: prefill calls: None for one, an int for one every that many tokens, a list of lengths.
    decode: greedy tokens generated after the prefill, each a call of its own.
    early_stop: load and run nothing behind the last layer asked for; the logits are then not checked.
    device_map, offload_folder, max_memory: as accelerate takes them; `disk` keeps every block on disk.
    backend: `torch` hides fla and causal-conv1d from transformers, `installed` does not; `auto` hides
    them on a CPU, where they cannot run.
    sys_path: directories put first on the child's import path (another transformers).
    on_plan: called with what will be written before anything is; progress: called with lines of news.

    Raises BadInput (model, layers, tokens, options) and CannotRun (transformers or a device missing, disk
    full, child killed). Returns the result whose verdict fails on non-finite logits or bad weights.
    """
    if what not in ("rule", "core"):
        raise BadInput(f"--what {what}: give rule or core")
    if dtype not in DTYPES:
        raise BadInput(f"--dtype {dtype}: give one of {', '.join(DTYPES)}")
    if decode and early_stop:
        raise BadInput(
            "--decode needs the logits, which --early-stop leaves out; "
            "put the tokens in the file and end --split with ones instead"
        )
    directory, out = find_checkpoint(model), Path(out)
    shape = model_shape(directory)
    chosen = select_layers(shape, layers)  # type: ignore[arg-type]
    source = tokens_of(tokens)
    if source.lengths is not None:
        if split is not None:
            raise BadInput(f"{source.path}: holds a list of calls and --split is given too; use one of them")
        split = source.lengths
    if source.ids is not None:
        check_ids(source.ids, shape.vocab_size, source.path)
        plan = make_plan(shape, len(source.ids), chosen, what, split=split, decode=decode, dtype=dtype)
        check_room(plan, out)
        if on_plan is not None:
            on_plan(plan)
    with scratch_directory(out) as scratch:
        request = CaptureRequest(
            directory=str(directory.resolve()), out=str(scratch.resolve()), layers=chosen, what=what,
            ids=source.ids, text=source.text, tokens_path=str(source.path), split=split, decode=decode,
            early_stop=early_stop, device=device, dtype=dtype, device_map=device_map,
            offload_folder=None if offload_folder is None else str(offload_folder),
            max_memory=max_memory or {}, backend=backend,
        )  # fmt: skip
        result = run_child(Errand(model_name=model_name(model), request=request), sys_path, on_plan, progress)
        return publish(result, scratch, out)


def tokens_of(tokens: Path | str | Sequence[int]) -> TokenFile:
    """A token file read, or ids taken as they are."""
    if isinstance(tokens, str | Path):
        return read_tokens(tokens)
    ids = [int(token) for token in tokens]
    if not ids:
        raise BadInput("tokens: no token given; give at least one id")
    return TokenFile(path=Path("tokens"), ids=ids)


def model_name(model: Path | str) -> str:
    """What cases call the model: OWNER/NAME, or the directory's own name; never a path."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else str(model)


@contextmanager
def scratch_directory(out: Path) -> Iterator[Path]:
    """A directory inside `out` that is gone afterwards; `out` too, if it was made here and stayed empty."""
    existed = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".capture.", suffix=".part", dir=out))
    except OSError as error:
        raise BadInput(f"{out}: cannot be written ({error.strerror}); choose another --out") from None
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if not existed and not any(out.iterdir()):
            out.rmdir()


def publish(result: CaptureResult, scratch: Path, out: Path) -> CaptureResult:
    """Move the new cases to `out` in place of all earlier calls of those layers."""
    fresh = {case.path for case in result.cases}
    for layer in result.layers:
        for old in out.glob(f"layer{layer:03d}.call*.safetensors"):
            if old.name not in fresh:
                old.unlink()
    for name in sorted(fresh):
        os.replace(scratch / name, out / name)
    cases = [msgspec.structs.replace(case, path=str(out / case.path)) for case in result.cases]
    return msgspec.structs.replace(result, cases=cases)


def run_child(
    errand: Errand,
    sys_path: Sequence[Path | str],
    on_plan: Callable[[Plan], None] | None,
    progress: Callable[[str], None] | None,
) -> CaptureResult:
    """Run one errand in a fresh interpreter. Raises what the child reports, CannotRun where it dies."""
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "gdncheck.capture.child"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=child_environment(sys_path),
        )  # fmt: skip
        try:
            return _listen(child, errand, on_plan, progress, log)
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()


def child_environment(sys_path: Sequence[Path | str]) -> dict[str, str]:
    """The parent's environment, cut off from the network and from a shadowing working directory."""
    environment = {
        **os.environ,
        "PYTHONSAFEPATH": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    paths = [str(Path(path).resolve()) for path in sys_path]
    if paths:
        inherited = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
        environment["PYTHONPATH"] = os.pathsep.join(paths + inherited)
    return environment


def _listen(
    child: subprocess.Popen[bytes],
    errand: Errand,
    on_plan: Callable[[Plan], None] | None,
    progress: Callable[[str], None] | None,
    log: IO[bytes],
) -> CaptureResult:
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(msgspec.json.encode(errand))
        child.stdin.close()
    except BrokenPipeError:
        pass  # it died at once; what follows says how
    for line in child.stdout:
        message = msgspec.json.decode(line, type=Message)
        if message.kind == "result" and message.result is not None:
            return message.result
        if message.kind == "bad-input":
            raise BadInput(message.text)
        if message.kind == "cannot-run":
            raise CannotRun(message.text)
        if message.plan is not None and on_plan is not None:
            on_plan(message.plan)
        elif message.text and progress is not None:
            progress(message.text)
    raise CannotRun(_cause_of_death(child.wait(), log))


def _cause_of_death(status: int, log: IO[bytes]) -> str:
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    last = f": {lines[-1][:200]}" if lines else ""
    if status >= 0:
        return f"the capture process ended with status {status}{last}"
    name = signal.Signals(-status).name
    remedy = "; out of memory? add --early-stop or --device-map disk" if -status == signal.SIGKILL else ""
    return f"the capture process was killed by {name}{remedy}{last}"

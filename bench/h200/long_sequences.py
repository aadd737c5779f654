"""Row 2 of the public faults: index arithmetic past 2^31, on one GPU.

usage: python bench/h200/long_sequences.py [--seconds 120] [--only TARGET]... [--work FOLDER] [--cpu]

One sequence longer than 2^31 / (HV K V) chunks (its stored states pass 2^31 elements), longer than
2^31 / (HV K) tokens (q, k, v do) and than 2^31 / (HV C) tokens (kkt does), and 16 sequences of 17,477 tokens
with 64 heads, packed and as a batch. The oracle is the run in parts, the state handed on in float32: every
chunk of the long run is compared with it bit for bit and by its RMS, and the parts are held to the float64
recurrence. The first failing length is found by bisection over chunks, or the kernel is shown clean to twice
the suspected length. A probe that kills its process counts as failing; the next child goes on after it.
Configurations are not tuned: the first of each kernel that the GPU can hold.
Results: bench/results/h200-long-sequences.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gdncheck.compare.jsonout import plain_numbers
from gdncheck.kernels import autotune, registry
from gdncheck.kernels.interface import KernelCall, RunOptions
from gdncheck.kernels.loading import load
from gdncheck.kernels.protocol import Open
from gdncheck.reference.truth import truth
from record import save

TARGETS = {
    "fla-0.4.0": "fla.chunk@0.4.0",
    "fla-0.6.0": "fla.chunk@0.6.0",
    "vllm-0.19.1": "vllm.chunk@0.19.1",
}
LIMIT = 2**31
CHUNK = 64
PIECE = 1 << 14  # tokens that are compared at a time, whole chunks
CLOSE = 2.0**-6  # RMS of a (chunk, head) against the parts: a few roundings of bf16, far below any leak
OVERWROTE = 9  # exit status of a child whose memory a kernel wrote to; the next one starts clean


class Sizes(argparse.Namespace):
    """Heads, dims and how long the longest probe is; small ones for a try without a GPU."""

    def __init__(self, cpu: bool) -> None:
        super().__init__()
        self.heads, self.dim = (2, 16) if cpu else (32, 128)
        self.part = 128 if cpu else 16_384
        self.limit = 2**15 if cpu else LIMIT
        self.packed = (3, 150, 2) if cpu else (16, 17_477, 64)

    @property
    def suspects(self) -> dict[str, int]:
        """Element counts that pass 2^31, and the most tokens at which they do not."""
        return {
            "stored states": self.limit // (self.heads * self.dim * self.dim) * CHUNK,
            "q, k, v": self.limit // (self.heads * self.dim),
            "kkt": self.limit // (self.heads * CHUNK),
        }


class Kernel:
    """One kernel, called on device tensors in this process."""

    def __init__(self, name: str, device: str) -> None:
        self.adapter, self.info, _ = load(Open(registry.resolve(name), device, ()))

    def __call__(self, x: dict[str, Tensor], state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        tensors = {**x} if state is None else {**x, "initial_state": state}
        with torch.no_grad(), autotune.pinned({}, tune="never"):
            outputs = self.adapter.run(KernelCall(tensors=tensors, options=RunOptions()))
        return outputs["output"], outputs["final_state"]

    def batch(self, x: dict[str, Tensor], n: int) -> Tensor:
        """The public function on [B, T, ...] without cu_seqlens: packed output."""
        arguments = {name: x[name].unflatten(0, (n, -1)) for name in ("q", "k", "v", "g", "beta")}
        with torch.no_grad(), autotune.pinned({}, tune="never"):
            output, _ = self.adapter.package_module.chunk_gated_delta_rule(
                **arguments, scale=x["q"].shape[-1] ** -0.5, output_final_state=False
            )
        return output.flatten(0, 1)


def drawn(tokens: int, heads: int, dim: int, device: str) -> dict[str, Tensor]:
    """Unit keys and queries, values, slow and fast gates; made in pieces, so that float32 stays small."""
    made = torch.Generator(device).manual_seed(tokens)
    x = {name: torch.empty(tokens, heads, dim, dtype=torch.bfloat16, device=device) for name in "qkv"}
    for start in range(0, tokens, 1 << 15):
        for name, tensor in x.items():
            rows = tensor[start : start + (1 << 15)]
            piece = torch.randn(rows.shape, generator=made, device=device)
            if name != "v":
                piece = piece / (piece.square().sum(-1, keepdim=True) + 1e-6).sqrt()
            rows.copy_(piece)
    speed = torch.exp(torch.empty(heads, device=device).uniform_(-7, 0, generator=made))
    x["g"] = -speed * torch.rand(tokens, heads, generator=made, device=device)
    x["beta"] = torch.randn(tokens, heads, generator=made, device=device).sigmoid().to(torch.bfloat16)
    return x


def cut(x: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """Tokens [start, stop) as one sequence."""
    part = {name: x[name][start:stop] for name in ("q", "k", "v", "g", "beta")}
    return {**part, "cu_seqlens": torch.tensor([0, stop - start], device=x["q"].device)}


class Parts:
    """The run in parts: the output of all tokens, and the state at every boundary."""

    def __init__(self, kernel: Kernel, x: dict[str, Tensor], part: int) -> None:
        self.kernel, self.x, self.part = kernel, x, part
        self.output = torch.empty_like(x["v"])
        self.states: list[Tensor | None] = [None]
        for start in range(0, len(x["v"]), part):
            stop = min(start + part, len(x["v"]))
            self.output[start:stop], state = kernel(cut(x, start, stop), self.states[-1])
            self.states.append(state.clone())

    def state_at(self, tokens: int) -> Tensor:
        """The state after so many tokens."""
        number, rest = divmod(tokens, self.part)
        start = self.states[number]
        if rest == 0:
            assert start is not None
            return start
        return self.kernel(cut(self.x, tokens - rest, tokens), start)[1]

    def against_float64(self) -> dict[str, float]:
        """Relative RMS of every part's output, and of the last state, against the recurrence from zero."""
        state, worst = None, 0.0
        for start in range(0, len(self.output), self.part):
            x = cut(self.x, start, min(start + self.part, len(self.output)))
            wanted, state = truth(**x, initial_state=state)
            worst = max(worst, relative(self.output[start : start + self.part], wanted))
        assert self.states[-1] is not None
        assert state is not None
        return {"worst_part": worst, "last_state": relative(self.states[-1], state)}


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).square().sum().sqrt() / wanted.square().sum().sqrt())


def compared(got: Tensor, wanted: Tensor) -> dict[str, Any]:
    """Bits, and RMS per (chunk, head), of two outputs [T, H, V]; the first tile that differs in earnest."""
    found: dict[str, Any] = {"same_bits": True, "wrong_tiles": 0, "nonfinite_tokens": 0, "first": None}
    for start in range(0, len(got), PIECE):
        a, b = got[start : start + PIECE], wanted[start : start + PIECE]
        if torch.equal(a.view(torch.int16), b.view(torch.int16)):
            continue
        found["same_bits"] = False
        a, b = in_chunks(a.float()), in_chunks(b.float())  # [chunks, C, H, V]
        found["nonfinite_tokens"] += int((~a.isfinite()).flatten(2).any(-1).sum())
        error, size = ((x.square().mean((1, 3))).sqrt() for x in (a - b, b))
        bad = ~(error <= CLOSE * size.clamp_min(1e-6))  # [chunks, H]
        found["wrong_tiles"] += int(bad.sum())
        if found["first"] is None and bool(bad.any()):
            chunk, head = bad.nonzero()[0].tolist()
            found["first"] = {"chunk": start // CHUNK + chunk, "token": start + chunk * CHUNK, "head": head}
    found["wrong"] = found["first"] is not None
    return found


def in_chunks(x: Tensor) -> Tensor:
    """[T, H, V] as [chunks, C, H, V], zeros behind the last token."""
    rest = -len(x) % CHUNK
    padded = torch.cat([x, x.new_zeros(rest, *x.shape[1:])]) if rest else x
    return padded.unflatten(0, (-1, CHUNK))


def digest(*tensors: Tensor) -> list[int]:
    """A sum over each tensor's bits: enough to see that somebody else wrote to it."""
    return [int(t.view(torch.int16).sum(dtype=torch.int64)) for t in tensors]


class Search:
    """Probes lengths of one kernel, remembering those that earlier children did."""

    def __init__(self, kernel: Kernel, sizes: Sizes, longest: int, part_file: Path, deadline: float) -> None:
        self.file, self.deadline = part_file, deadline
        self.known = {row["tokens"]: row for row in rows_of(part_file) if row["kind"] == "probe"}
        x = drawn(longest, sizes.heads, sizes.dim, "cuda" if torch.cuda.is_available() else "cpu")
        self.kernel, self.x = kernel, x
        self.parts = Parts(kernel, x, sizes.part)
        self.intact = self.digest()

    def digest(self) -> list[int]:
        """Of the inputs and of what probes are compared with."""
        return digest(self.x["q"], self.x["k"], self.x["v"], self.parts.output)

    def wrong(self, tokens: int) -> bool:
        """Whether a run of so many tokens departs from the run in parts."""
        if tokens not in self.known:
            if time.monotonic() > self.deadline:
                raise TimeoutError
            # Written first: if this kills the process, the line without an end says at which length.
            write(self.file, {"kind": "started", "tokens": tokens})
            output, state = self.kernel(cut(self.x, 0, tokens))
            row = {"kind": "probe", "tokens": tokens, **compared(output, self.parts.output[:tokens])}
            row["state"] = relative(state, self.parts.state_at(tokens).double())
            row["wrote_elsewhere"] = self.digest() != self.intact
            row["wrong"] = row["wrong"] or row["wrote_elsewhere"] or not row["state"] <= CLOSE
            write(self.file, row)
            if row["wrote_elsewhere"]:
                sys.exit(OVERWROTE)
            self.known[tokens] = row
        return bool(self.known[tokens]["wrong"])

    def first_failing(self, suspects: dict[str, int], longest: int) -> int | None:
        """The least number of tokens that fails, or None where all up to the longest pass.

        Each suspected limit is tried on both sides first; between a passing and a failing length the
        search halves, in chunks, and then says how many tokens of the last chunk are enough.
        """
        lengths = sorted({longest, *(n + d for n in suspects.values() for d in (0, 1) if n + d <= longest)})
        low = 0
        for length in lengths:
            if not self.wrong(length):
                low = length
                continue
            high = length
            while high - low > 1:
                # Whole chunks first, then tokens.
                far = high - low > CHUNK
                middle = (
                    (low // CHUNK + (high // CHUNK - low // CHUNK) // 2) * CHUNK if far else (low + high) // 2
                )
                middle = middle if low < middle < high else (low + high) // 2
                low, high = (low, middle) if self.wrong(middle) else (middle, high)
            return high
        return None


def packed(kernel: Kernel, sizes: Sizes, part_file: Path) -> None:
    """Many sequences whose tokens together pass 2^31 elements: packed, and as a batch where fla takes one."""
    n, tokens, heads = sizes.packed
    x = drawn(n * tokens, heads, sizes.dim, "cuda" if torch.cuda.is_available() else "cpu")
    wanted = torch.cat([kernel(cut(x, i * tokens, (i + 1) * tokens))[0] for i in range(n)])
    offsets = torch.arange(n + 1, device=wanted.device) * tokens
    ways = {"packed": lambda: kernel({**x, "cu_seqlens": offsets})[0]}
    if hasattr(kernel.adapter, "package_module"):
        ways["batch"] = lambda: kernel.batch(x, n)
    for way, run in ways.items():
        if any(row["kind"] == way or row.get("way") == way for row in rows_of(part_file)):
            continue
        write(part_file, {"kind": "started", "way": way})
        row = compared(run(), wanted)
        if row["first"] is not None:
            row["first"]["sequence"] = row["first"]["token"] // tokens
        write(part_file, {"kind": way, "sequences": n, "tokens": tokens, "heads": heads, **row})


def child(options: argparse.Namespace) -> None:
    """One target, as far as it comes before the deadline or its own death."""
    device = "cpu" if options.cpu else "cuda"
    sizes, part_file = Sizes(options.cpu), Path(options.part)
    deadline = time.monotonic() + options.seconds
    kernel = Kernel(TARGETS[options.child], device)
    if options.compile:
        for heads in (sizes.heads, sizes.packed[2]):
            # Each way in which it is called below is a kernel of its own: with a state, and as a batch.
            x = drawn(4 * CHUNK, heads, sizes.dim, device)
            _, state = kernel(cut(x, 0, 2 * CHUNK))
            kernel(cut(x, 2 * CHUNK, 4 * CHUNK), state)
            if heads == sizes.packed[2] and hasattr(kernel.adapter, "package_module"):
                kernel.batch(x, 2)
        return
    finished = {row["kind"] for row in rows_of(part_file)}
    longest = 2 * sizes.suspects["stored states"] + CHUNK if options.longest is None else options.longest
    try:
        if "search" not in finished:
            search = Search(kernel, sizes, longest, part_file, deadline)
            if "float64" not in finished:
                write(part_file, {"kind": "float64", **search.parts.against_float64()})
            first = search.first_failing(sizes.suspects, longest)
            write(part_file, {"kind": "search", "first_failing": first, "longest": longest,
                              "suspects": sizes.suspects})  # fmt: skip
            del search
        packed(kernel, sizes, part_file)
        memory = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        launched = {name: autotune.describe(t.best_config) for name, (t, _) in autotune.seen.items()}
        write(part_file, {"kind": "done", "peak_bytes": memory, "launched": launched,
                          "environment": kernel.info.environment})  # fmt: skip
    except TimeoutError:
        print(f"{options.child}: out of time", flush=True)


def rows_of(part_file: Path) -> list[dict[str, Any]]:
    """Finished lines; a probe that was started and never ended becomes one that failed."""
    if not part_file.exists():
        return []
    lines = [json.loads(line) for line in part_file.read_text().rpartition("\n")[0].splitlines()]
    ended = [row.get("tokens") for row in lines if row["kind"] == "probe"]
    rows = [row for row in lines if row["kind"] != "started"]
    for row in lines:
        if row["kind"] == "started" and "way" not in row and row["tokens"] not in ended:
            rows.append({"kind": "probe", "tokens": row["tokens"], "wrong": True, "died": True})
        if row["kind"] == "started" and "way" in row and all(r["kind"] != row["way"] for r in rows):
            rows.append({"kind": "died", "way": row["way"], "wrong": True})
    return rows


def write(part_file: Path, row: dict[str, Any]) -> None:
    with part_file.open("a") as file:
        file.write(json.dumps(row) + "\n")
    if row["kind"] != "started":
        print(part_file.stem, row, flush=True)


def command(name: str, options: argparse.Namespace, seconds: float) -> list[str]:
    """A child's command line."""
    words = [sys.executable, __file__, "--child", name, "--seconds", str(seconds)]
    words += ["--part", str(Path(options.work) / f"{name}.jsonl")] + ["--cpu"] * options.cpu
    return words + (["--longest", str(options.longest)] if options.longest else [])


def compile_all(targets: list[str], options: argparse.Namespace, deadline: float) -> None:
    """Fill Triton's cache for all targets side by side."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    running = [
        subprocess.Popen([*command(name, options, 0), "--compile"], env=environment) for name in targets
    ]
    for process in running:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def children(name: str, options: argparse.Namespace, deadline: float) -> Iterator[int | None]:
    """Run children of one target until one comes to the end by itself or time is up; exit statuses."""
    while (left := deadline - time.monotonic()) > 2:
        process = subprocess.Popen(
            command(name, options, left - 2), env={**os.environ, "PYTHONSAFEPATH": "1"}
        )
        try:
            status: int | None = process.wait(left)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = None
        yield status
        if status in (0, None):
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120, help="for everything")
    parser.add_argument("--work", default=".gpu/long-sequences", help="folder of the part files")
    parser.add_argument("--only", action="append", choices=list(TARGETS))
    parser.add_argument(
        "--longest", type=int, help="tokens of the longest probe; default: twice the suspected"
    )
    parser.add_argument("--cpu", action="store_true", help="try the script on Triton's interpreter")
    parser.add_argument("--child", choices=list(TARGETS), help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="h200-long-sequences", help="of the result file")
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    Path(options.work).mkdir(parents=True, exist_ok=True)
    started, targets = time.monotonic(), options.only or list(TARGETS)
    if not options.cpu:
        compile_all(targets, options, started + options.seconds / 2)
    found = {}
    for number, name in enumerate(targets):
        share = (started + options.seconds - time.monotonic()) / (len(targets) - number)
        statuses = list(children(name, options, time.monotonic() + share))
        found[name] = {"exit_statuses": statuses, "rows": rows_of(Path(options.work) / f"{name}.jsonl")}
    save(
        options.name, __file__,
        plain_numbers({"targets": found, "seconds": time.monotonic() - started}),
    )  # fmt: skip


if __name__ == "__main__":
    main()

"""The user's own path at the real model's size: make a checkpoint, capture layer 17, diff, sweep, repeat.

usage: python bench/h200/real_size.py [--seconds 500] [--work DIR] [--experts N] [--kernel NAME]... [--tiny]

The checkpoint is transformers' Qwen3.5-MoE at the 35B-A3B shape (hidden 2048, 16 / 32 heads, 128 x 128,
conv 4, 256 experts), layers 0 to 17, random weights made on the GPU; it lies in DIR (best in memory: 29 GB).
Then `gdncheck capture` of layer 17 on 11,686 tokens, uncut and cut every 2,048, `diff`, `diff --op core`,
`repeat -n 30` and `sweep --depth 1`, each a command of its own, with its time and exit status. Steps that are
recorded are not done again. Results: bench/results/h200-real-size.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import save

TOKENS = 11_686
LAYER = 17
KERNELS = ("fla.chunk@0.4.0", "fla.chunk@0.6.0", "vllm.chunk@0.19.1", "vllm.chunk@0.33.0")


def make_checkpoint(folder: Path, tiny: bool, experts: int | None = None) -> dict[str, Any]:
    """Random weights at the real shape, scaled so that activations stay near 1 in size."""
    import torch
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    started = time.perf_counter()
    shape = (
        {
            "hidden_size": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "vocab_size": 1000,
        }
        if tiny
        else {}
    )
    if tiny:
        shape |= {
            "shared_expert_intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        }  # fmt: skip
    if experts is not None:
        shape["num_experts"] = experts
    config = Qwen3_5MoeTextConfig(num_hidden_layers=LAYER + 1, dtype="bfloat16", **shape)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = Qwen3_5MoeForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 and "embed" not in name and "conv1d" not in name:
                # Variance kept from input to output, halved in what is added to the residual stream.
                weight.normal_(0.0, 0.5 * weight.shape[-1] ** -0.5)
    made = time.perf_counter() - started
    model.save_pretrained(folder, max_shard_size="4GB")
    n_parameters = sum(weight.numel() for weight in model.parameters())
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return {
        "parameters": n_parameters, "seconds_made": made,
        "seconds_saved": time.perf_counter() - started - made,
        "gpu_peak_bytes": peak, "config": config.to_dict(),
    }  # fmt: skip


def token_file(folder: Path, n_tokens: int, vocabulary: int) -> Path:
    """Frozen ids: a linear congruence, the same everywhere."""
    ids, x = [], 12345
    for _ in range(n_tokens):
        x = (1103515245 * x + 12345) % 2**31
        ids.append((x >> 8) % vocabulary)
    path = folder / "tokens.json"
    path.write_text(json.dumps(ids))
    return path


def command_of(words: list[str], limit: float) -> dict[str, Any]:
    """Run one gdncheck command: status, time, memory of the largest child so far, its JSON or last lines."""
    started = time.perf_counter()
    line = " ".join(["gdncheck", *words])
    beside = Path(sys.executable).with_name("gdncheck")
    program = str(beside) if beside.exists() else "gdncheck"
    try:
        done = subprocess.run(
            [program, *words],
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        status: int | str = done.returncode
        out, err = done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        status = f"ended after {limit:.0f} s"
        out, err = (
            str(x or b"", "utf-8") if isinstance(x, bytes) else (x or "") for x in (late.stdout, late.stderr)
        )
    try:
        answer: Any = json.loads(out)
    except json.JSONDecodeError:
        answer = out[-3000:]
    return {
        "command": line, "exit_status": status, "seconds": time.perf_counter() - started, "answer": answer,
        "largest_child_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "stderr": err[-1500:],
    }  # fmt: skip


def steps(work: Path, tiny: bool, names: tuple[str, ...]) -> dict[str, list[str]]:
    """Name -> the words of the command, in the order in which they are run."""
    device = "cpu" if tiny else "cuda"
    kernels = [word for name in (names[:1] if tiny else names) for word in ("--kernel", name)]
    fla = ["--kernel", KERNELS[0]]
    model, tokens = str(work / "model"), str(work / "tokens.json")
    uncut, cut = str(work / "uncut"), str(work / "cut")
    take = ["capture", model, "--tokens", tokens, "--layer", str(LAYER), "--device", device, "--json"]
    layer = ["--layer", str(LAYER), "--device", device, "--json"]
    every = "16" if tiny else "2048"
    return {
        "capture": [*take, "--out", uncut, "--backend", "torch"],
        "capture split": [*take, "--out", cut, "--split", every, "--backend", "torch"],
        "diff": ["diff", *layer, "--captures", uncut, *kernels, "--relations", "quick"],
        "diff split": ["diff", *layer, "--captures", cut, *kernels, "--relations", "quick"],
        "repeat": ["repeat", str(work / "uncut" / f"layer{LAYER:03d}.call0000.safetensors"), "-n", "30", *fla,
                   "--device", device, "--json"],
        "diff core": ["diff", *layer, "--captures", uncut, "--op", "core", "--kernel",
                      "transformers.core" if tiny else "fla.core@0.4.0"],
        "sweep": ["sweep", *layer, "--captures", uncut, *fla, "--depth", "1", "--budget", "2m"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/gdncheck-real"))
    parser.add_argument("--tiny", action="store_true", help="a few tokens and small layers, on a CPU")
    parser.add_argument("--experts", type=int, help="fewer experts: the GDN layers stay as they are")
    parser.add_argument("--kernel", action="append", help="of the diffs (repeatable)")
    parser.add_argument("--name", default="h200-real-size")
    parser.add_argument("--only", action="append", help="only this step (repeatable)")
    options = parser.parse_args()
    ends = time.monotonic() + options.seconds
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    record = work / "steps.json"
    found: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}

    def keep(name: str, value: dict[str, Any]) -> None:
        found[name] = value
        record.write_text(json.dumps(found))
        save(options.name, __file__, {"tokens": 40 if options.tiny else TOKENS, "steps": found})
        print(name, {k: value.get(k) for k in ("exit_status", "seconds", "seconds_made")}, flush=True)

    if "checkpoint" not in found or not (work / "model").exists():
        keep("checkpoint", make_checkpoint(work / "model", options.tiny, options.experts))
    vocabulary = int(found["checkpoint"]["config"]["vocab_size"])
    token_file(work, 40 if options.tiny else TOKENS, vocabulary)
    for name, words in steps(work, options.tiny, tuple(options.kernel or KERNELS)).items():
        left = ends - time.monotonic()
        if name in found or left < 20 or (options.only and name not in options.only):
            continue
        keep(name, command_of(words, left))


if __name__ == "__main__":
    main()

"""Train the small Qwen3.5-MoE model that the demo and the tests capture from.

The idea: a verdict about a kernel means little on random weights, whose gates and keys are unlike a
trained model's. So this trains transformers' own class, byte by byte, on text that ships with Python
until it has clearly learned, and writes down how gate, beta and key angles moved. It uses nothing of
gdncheck, so that the checkpoint owes nothing to the tool that is tested on it.

    .venv/bin/python examples/train_tiny.py --out models/tiny-qwen35moe

Same seed, same Python release, same torch build and one thread count: same checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

# transformers 5.24 calls fla's Triton kernels wherever fla can be imported, even where no GPU is: hide
# it, so that the model trains on the torch code of transformers.
sys.modules["fla"] = None  # type: ignore[assignment]
sys.modules["causal_conv1d"] = None  # type: ignore[assignment]

import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig  # noqa: E402
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling  # noqa: E402

# Files of the standard library; the held-out ones are never trained on.
TRAIN_FILES = (
    "LICENSE.txt", "pydoc_data/topics.py", "argparse.py", "ast.py", "bdb.py", "cmd.py", "codecs.py",
    "configparser.py", "contextlib.py", "copy.py", "csv.py", "dataclasses.py", "datetime.py", "dis.py",
    "doctest.py", "enum.py", "fractions.py", "ftplib.py", "functools.py", "gettext.py", "heapq.py",
    "inspect.py", "ipaddress.py", "json/decoder.py", "json/encoder.py", "logging/__init__.py",
    "mailbox.py", "optparse.py", "os.py", "pathlib.py", "pdb.py", "pickle.py", "platform.py",
    "pprint.py", "queue.py", "random.py", "shutil.py", "socket.py", "ssl.py", "string.py",
    "subprocess.py", "tarfile.py", "tempfile.py", "threading.py", "traceback.py", "turtle.py",
    "typing.py", "unittest/case.py", "unittest/mock.py", "uuid.py", "warnings.py", "weakref.py",
    "zipfile.py",
)  # fmt: skip
HELD_OUT_FILES = ("difflib.py", "statistics.py", "textwrap.py", "calendar.py")

QUANTILES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


def tiny_config() -> Qwen3_5MoeTextConfig:
    """20 layers, full attention at 3, 7, ..., 19; 2 key and 4 value heads of 64 x 64; conv width 4."""
    return Qwen3_5MoeTextConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=20, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=32768,
        linear_conv_kernel_dim=4, linear_key_head_dim=64, linear_value_head_dim=64,
        linear_num_key_heads=2, linear_num_value_heads=4,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        shared_expert_intermediate_size=24, router_aux_loss_coef=0.01, tie_word_embeddings=False,
        architectures=["Qwen3_5MoeForCausalLM"],
    )  # fmt: skip


def read_text(names: tuple[str, ...]) -> Tensor:
    """Bytes of the named standard library files, [bytes] int64, in the listed order."""
    root = Path(sysconfig.get_path("stdlib"))
    data = b"\n".join((root / name).read_bytes() for name in names)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def batches(text: Tensor, length: int, size: int, generator: torch.Generator) -> Tensor:
    """`size` random windows of `length` + 1 bytes, [size, length + 1]."""
    starts = torch.randint(0, len(text) - length - 1, (size,), generator=generator)
    return torch.stack([text[s : s + length + 1] for s in starts.tolist()])


@torch.no_grad()
def mean_loss(model: Qwen3_5MoeForCausalLM, text: Tensor, length: int = 512, windows: int = 8) -> float:
    """Cross entropy in nats per byte over `windows` evenly spaced windows of `text`."""
    model.eval()
    step = (len(text) - length - 1) // windows
    losses = []
    for index in range(windows):
        window = text[index * step : index * step + length + 1].unsqueeze(0)
        logits = model(input_ids=window[:, :-1], use_cache=False).logits.float()
        losses.append(torch.nn.functional.cross_entropy(logits[0], window[0, 1:]).item())
    model.train()
    return sum(losses) / len(losses)


@torch.no_grad()
def rule_inputs(model: Qwen3_5MoeForCausalLM, tokens: Tensor) -> list[dict[str, Tensor]]:
    """g, beta [T, HV] and l2-normalised k [T, HK, K] of every GDN layer, read by wrapping the rule."""
    seen: list[dict[str, Tensor]] = []
    original = modeling.torch_chunk_gated_delta_rule

    def spy(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        unit_key = torch.nn.functional.normalize(key[0].float(), dim=-1)
        seen.append({"g": options["g"][0].float(), "beta": options["beta"][0].float(), "k": unit_key})
        return original(query, key, value, **options)

    modeling.torch_chunk_gated_delta_rule = spy
    try:
        model.eval()
        model(input_ids=tokens.unsqueeze(0), use_cache=False)
    finally:
        modeling.torch_chunk_gated_delta_rule = original
        model.train()
    return seen


def quantiles(values: Tensor) -> dict[str, float]:
    values = values.flatten().double()
    return {f"{q:g}": round(torch.quantile(values, q).item(), 6) for q in QUANTILES}


def describe(model: Qwen3_5MoeForCausalLM, tokens: Tensor) -> dict[str, Any]:
    """Quantiles of g (natural log), beta and the cosine between keys 1 and 8 tokens apart."""
    layers = rule_inputs(model, tokens)
    gdn = [i for i, kind in enumerate(model.config.layer_types) if kind == "linear_attention"]
    chosen = {"all GDN layers": layers, "layer 17": [layers[gdn.index(17)]]}
    report: dict[str, Any] = {}
    for name, group in chosen.items():
        cosines = {
            gap: torch.cat([(x["k"][gap:] * x["k"][:-gap]).sum(-1).flatten() for x in group])
            for gap in (1, 8)
        }
        report[name] = {
            "g": quantiles(torch.cat([x["g"].flatten() for x in group])),
            "beta": quantiles(torch.cat([x["beta"].flatten() for x in group])),
            "cosine of keys 1 token apart": quantiles(cosines[1]),
            "cosine of keys 8 tokens apart": quantiles(cosines[8]),
        }
    return report


@torch.no_grad()
def start_gates(model: Qwen3_5MoeForCausalLM) -> None:
    """Start each head's time step softplus(dt_bias) log-uniform in [0.001, 0.1], the recipe of Mamba2.

    transformers' own start (dt_bias = 1) forgets within a token or two: fine for loading a checkpoint
    over it, but a short training never leads it to heads that remember.
    """
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            bias = layer.linear_attn.dt_bias
            step = torch.exp(torch.empty_like(bias).uniform_(math.log(0.001), math.log(0.1)))
            bias.copy_(torch.log(torch.expm1(step)))


def optimiser(model: Qwen3_5MoeForCausalLM, rate: float) -> torch.optim.AdamW:
    """AdamW; the gate's A_log and dt_bias learn ten times as fast, and vectors are not decayed."""
    gate, matrices, vectors = [], [], []
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            gate.append(parameter)
        else:
            (matrices if parameter.ndim >= 2 else vectors).append(parameter)
    groups = [
        {"params": matrices, "lr": rate, "weight_decay": 0.05},
        {"params": vectors, "lr": rate, "weight_decay": 0.0},
        {"params": gate, "lr": 10 * rate, "weight_decay": 0.0},
    ]
    for group in groups:
        group["peak"] = group["lr"]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def rate_factor(step: int, steps: int, warm_up: int = 20) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def train(model: Qwen3_5MoeForCausalLM, text: Tensor, arguments: argparse.Namespace) -> list[float]:
    """Train in place; returns the mean training loss of every 10 steps, nats per byte."""
    generator = torch.Generator().manual_seed(arguments.seed)
    optimizer = optimiser(model, arguments.rate)
    curve: list[float] = []
    recent: list[float] = []
    started = time.monotonic()
    for step in range(arguments.steps):
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * rate_factor(step, arguments.steps)
        window = batches(text, arguments.length, arguments.batch, generator)
        result = model(input_ids=window[:, :-1], use_cache=False, output_router_logits=True)
        loss = torch.nn.functional.cross_entropy(result.logits.flatten(0, 1), window[:, 1:].flatten())
        (loss + model.router_aux_loss_coef * result.aux_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append(loss.item())
        if len(recent) == 10:
            curve.append(round(sum(recent) / 10, 4))
            recent.clear()
            print(f"step {step + 1}/{arguments.steps}: loss {curve[-1]:.3f}, "
                  f"{time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)  # fmt: skip
    return curve


def byte_tokenizer() -> dict[str, Any]:
    """A `tokenizer.json` whose token id is the byte's value: byte-level BPE without one merge.

    Byte-level BPE writes a byte as a printable character: itself where it is printable Latin-1, else
    the next free character from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    character = {**{b: chr(b) for b in printable}, **{b: chr(0x100 + i) for i, b in enumerate(others)}}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "vocab": {character[b]: b for b in range(256)}, "merges": [],
        },
    }  # fmt: skip


PAGE = """\
# tiny-qwen35moe

A toy: transformers' own `Qwen3_5MoeForCausalLM`, small enough to keep in a repository and trained just
long enough that its gates, betas and keys are those of a model that has learned something. It writes no
useful text. gdncheck's demo and tests capture Gated DeltaNet inputs from it, because random weights give
kernels inputs that no real model gives. `examples/train_tiny.py` wrote this page and `training.json`,
where every number on it comes from.

- {parameters:,} parameters in bfloat16; 20 layers, full attention at 3, 7, 11, 15 and 19, so layer 17 is
  Gated DeltaNet: 2 key heads and 4 value heads of 64 x 64, conv width 4, hidden size 64, 4 experts (2 used).
- Tokens are bytes (vocabulary 256); `tokenizer.json` says so to any tokenizer library.
- Trained {steps} steps of {batch} x {length} bytes, seed {seed}, on {training_bytes:,} bytes of the standard
  library of Python {python} (PSF licence; the files are listed in `training.json`).
- Each head's time step starts log-uniform in [0.001, 0.1], the recipe of Mamba2; so does the untrained
  model's below.

## Loss

Cross entropy in nats per byte. Held out, never trained on: {held_out}.
After: of the bfloat16 weights.

{losses}

## Gate, beta and key angles

Quantiles over all heads and the first 2,048 held-out bytes; g is the natural log of the decay per token.

{quantiles}
"""


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def page(report: dict[str, Any]) -> str:
    """The README of the checkpoint, every number taken from the report."""
    before, after = report["loss_nats_per_byte"]["before"], report["loss_nats_per_byte"]["after"]
    losses = [
        [name, f"{before[name]:.3f}", f"{after[name]:.3f}", f"{after[name] / before[name]:.0%}"]
        for name in before
    ]
    seen = report["quantiles on the first 2048 held-out bytes"]
    parts = []
    for group, measures in seen["trained"].items():
        rows = [
            [f"{what}, {state}", *(f"{value:.3g}" for value in seen[state][group][what].values())]
            for what in measures
            for state in ("untrained", "trained")
        ]
        parts.append(f"### {group}\n\n{table(['', *(f'{q:.0%}' for q in QUANTILES)], rows)}")
    return PAGE.format(
        parameters=report["parameters"], training_bytes=report["text"]["training bytes"],
        python=report["software"]["python"], held_out=", ".join(report["text"]["held-out files"]),
        losses=table(["", "before", "after", "after / before"], losses), quantiles="\n\n".join(parts),
        **{name: report["settings"][name] for name in ("steps", "batch", "length", "seed")},
    )  # fmt: skip


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def save(model: Qwen3_5MoeForCausalLM, out: Path, report: dict[str, Any]) -> None:
    """Write weights (bfloat16; A_log and the gated norm too), config, tokenizer and `training.json`."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        model.save_pretrained(scratch)
        for name in ("config.json", "model.safetensors"):
            (Path(scratch) / name).chmod(0o644)
            os.replace(Path(scratch) / name, out / name)
    write_json(out / "tokenizer.json", byte_tokenizer())
    write_json(out / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        "model_max_length": model.config.max_position_embeddings,
    })  # fmt: skip
    write_json(out / "training.json", report)
    write_text(out / "README.md", page(report))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("models/tiny-qwen35moe"))
    parser.add_argument("--steps", type=int, default=180)
    parser.add_argument("--batch", type=int, default=4, help="sequences per step")
    parser.add_argument("--length", type=int, default=192, help="bytes per sequence")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    text, held_out = read_text(TRAIN_FILES), read_text(HELD_OUT_FILES)
    model = Qwen3_5MoeForCausalLM(tiny_config())
    start_gates(model)
    probe = held_out[:2048]
    before = {"held out": mean_loss(model, held_out), "training text": mean_loss(model, text)}
    untrained = describe(model, probe)
    started = time.monotonic()
    curve = train(model, text, arguments)
    seconds = time.monotonic() - started
    # What is measured is what is shipped: the bfloat16 weights.
    model = model.to(torch.bfloat16)
    after = {"held out": mean_loss(model, held_out), "training text": mean_loss(model, text)}
    ratio = {name: after[name] / before[name] for name in before}
    report = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "loss_nats_per_byte": {"before": before, "after": after, "after / before": ratio},
        "training_curve_every_10_steps": curve,
        "settings": {k: v for k, v in vars(arguments).items() if k != "out"} | {"seconds": round(seconds)},
        "text": {
            "training files": TRAIN_FILES, "training bytes": len(text),
            "training sha256": hashlib.sha256(bytes(text.to(torch.uint8).numpy())).hexdigest(),
            "held-out files": HELD_OUT_FILES, "held-out bytes": len(held_out),
            "held-out sha256": hashlib.sha256(bytes(held_out.to(torch.uint8).numpy())).hexdigest(),
        },
        "software": {"python": platform.python_version(), "torch": torch.__version__,
                     "transformers": transformers.__version__},
        "quantiles on the first 2048 held-out bytes": {
            "untrained": untrained, "trained": describe(model, probe),
        },
    }  # fmt: skip
    if max(ratio.values()) > 0.6:
        print(f"train_tiny: loss fell only to {max(ratio.values()):.0%} of the untrained model's, not to "
              f"60 %; nothing written. Raise --steps.", file=sys.stderr)  # fmt: skip
        return 1
    save(model, arguments.out, report)
    print(f"train_tiny: {arguments.out}: {report['parameters']} parameters, held-out loss "
          f"{before['held out']:.3f} -> {after['held out']:.3f} nats per byte ({ratio['held out']:.0%}), "
          f"{seconds:.0f} s")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())

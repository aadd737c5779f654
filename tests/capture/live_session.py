"""Run by test_huggingface_live.py in a process of its own: `live_session.py OUT TOKENIZER_DIRECTORY`.

Everything that needs transformers in memory happens here, once, because importing it costs seconds: small
random models of the three GatedDeltaNet classes are captured with hooks while an independent spy keeps
what the rule was really handed, and one of them, saved as a checkpoint, is captured in the ways that only
a loaded model can show (offload, early stop, a bad weight). What was seen goes into OUT as case files,
safetensors and `facts.json`; the tests judge it.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from gdncheck.capture import hooks
from gdncheck.capture.errors import GdncheckError
from gdncheck.capture.huggingface import Source, case_from_huggingface
from gdncheck.capture.live import capture_live, run_calls
from gdncheck.capture.loading import choose_backend
from gdncheck.capture.records import CaptureRequest, Message
from gdncheck.capture.weights import block_of, check_layer_weights
from safetensors.torch import load_file, save_file

torch.set_num_threads(1)
choose_backend("torch", torch.device("cpu"))
import transformers  # noqa: E402

# K != V, so that a state held the wrong way round cannot pass.
SHAPE = {
    "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "head_dim": 16,
    "num_key_value_heads": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 8, "linear_value_head_dim": 16, "intermediate_size": 32,
}  # fmt: skip
EXPERTS = {
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}  # fmt: skip
CLASSES: dict[str, Callable[[], torch.nn.Module]] = {
    "Qwen3_5MoeGatedDeltaNet": lambda: transformers.Qwen3_5MoeForCausalLM(
        transformers.Qwen3_5MoeTextConfig(**SHAPE, **EXPERTS)
    ),
    "Qwen3_5GatedDeltaNet": lambda: transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SHAPE)),
    "Qwen3NextGatedDeltaNet": lambda: transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(**SHAPE, **EXPERTS)
    ),
}
LENGTHS = [64, 1, 2, 4]
SOURCE = Source(model="random", token_hash="0" * 64, engine="transformers")


class Spy:
    """Keeps the rule's arguments and results by itself, under the hooks, in order of running."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []
        owners = list(hooks.gdn_layers(model).values())
        self.places = hooks._seams(owners)
        self.originals = [getattr(owner, name) for owner, name in self.places]
        self.wrappers = [self._around(original) for original in self.originals]
        for (owner, name), wrapper in zip(self.places, self.wrappers, strict=True):
            setattr(owner, name, wrapper)

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def rule(query: Any, key: Any, value: Any, **options: Any) -> Any:
            kept = {"q": query, "k": key, "v": value, "g": options["g"], "beta": options["beta"]}
            if options["initial_state"] is not None:
                kept["initial_state"] = options["initial_state"]
            kept = {name: tensor.clone() for name, tensor in kept.items()}
            kept["output"], kept["final_state"] = original(query, key, value, **options)
            self.seen.append({name: tensor.clone().contiguous() for name, tensor in kept.items()})
            return kept["output"], kept["final_state"]

        return rule

    def in_place(self) -> bool:
        """Did whoever wrapped the spy take the wrapping off again?"""
        now = [getattr(owner, name) for owner, name in self.places]
        return all(a is b for a, b in zip(now, self.wrappers, strict=True))

    def leave(self) -> None:
        for (owner, name), original in zip(self.places, self.originals, strict=True):
            setattr(owner, name, original)


def random_model(name: str, out: Path) -> dict[str, Any]:
    """Capture layers 0 and 2 of one small model in several calls and keep what the spy saw."""
    torch.manual_seed(3)
    model = CLASSES[name]().to(torch.bfloat16).eval()
    ids = torch.randint(0, SHAPE["vocab_size"], (sum(LENGTHS),)).tolist()
    with torch.no_grad():
        plain = model(input_ids=torch.tensor([ids])).logits
    seams = hooks._seams([hooks.gdn_layers(model)[0]])
    backends = {hooks.implementation_name(getattr(owner, name)) for owner, name in seams}
    spy = Spy(model)
    calls: list[hooks.LayerCall] = []
    with hooks.recording(model, [0, 2], calls.append):
        logits, generated = run_calls(model, ids, LENGTHS, decode=1)
    restored = spy.in_place()
    spy.leave()
    with hooks.recording(model, [0, 2], lambda call: None), torch.no_grad():
        hooked = model(input_ids=torch.tensor([ids])).logits
    for call in calls:
        write(case_from_huggingface(call, SOURCE, "core").tensors, out / f"{name}.{call.layer}.{call.call}")
    # The spy saw layers 0, 1, 2 of each call in turn.
    for number, seen in enumerate(spy.seen):
        write(seen, out / f"{name}.spy.{number % 3}.{number // 3}")
    return {
        "calls": [[call.layer, call.call] for call in calls],
        "phases": [case_from_huggingface(call, SOURCE, "core").origin.phase for call in calls],
        "backends": sorted(backends),
        "positions": logits.n_positions,
        "generated": generated,
        "hooks change nothing": torch.equal(plain, hooked),
        "hooks left": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
        "seams restored": restored,
        "batch": batch_of_two(model, out / f"{name}.batch"),
        "padded": error_of(lambda: padded(model)),
    }


def batch_of_two(model: torch.nn.Module, path: Path) -> list[int]:
    """One call with two rows; returns cu_seqlens of the case."""
    calls: list[hooks.LayerCall] = []
    with hooks.recording(model, [2], calls.append), torch.no_grad():
        model(input_ids=torch.arange(20).view(2, 10))
    case = case_from_huggingface(calls[0], SOURCE, "core")
    write(case.tensors, path)
    with hooks.recording(model, [2], calls.append), torch.no_grad():
        model(input_ids=torch.arange(10, 20).view(1, 10))
    write(case_from_huggingface(calls[1], SOURCE, "core").tensors, path.with_name(f"{path.name}.second"))
    return case["cu_seqlens"].tolist()


def padded(model: torch.nn.Module) -> None:
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, :3] = 0
    with hooks.recording(model, [2], lambda call: None), torch.no_grad():
        model(input_ids=torch.arange(20).view(2, 10), attention_mask=mask)


def checkpoints(tokenizer: Path, out: Path) -> dict[str, Any]:
    """Captures of a saved model of 6 layers (full attention at 3) and of damaged copies of it."""
    good = out / "checkpoint"
    torch.manual_seed(4)
    config = transformers.Qwen3_5MoeTextConfig(**SHAPE | {"num_hidden_layers": 6}, **EXPERTS)
    transformers.Qwen3_5MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(good)
    for file in tokenizer.glob("tokenizer*.json"):
        shutil.copy(file, good)
    ids = list(b"def answer():\n    return 42\n" * 3)
    text = {"ids": None, "text": bytes(ids).decode(), "tokens_path": "text.txt"}
    bad = damaged(good, out / "nan-checkpoint", "model.layers.2.linear_attn.in_proj_b.weight", float("nan"))
    whole = CaptureRequest(directory=str(good), out="", layers=[1, 2], ids=ids, what="core")
    wanted: dict[str, dict[str, Any]] = {
        "whole": {},
        "rule": {"what": "rule", "layers": [2]},
        "split": {"split": [2, 40, 1]},
        "stopped": {"early_stop": True},
        "offloaded": {"device_map": "disk", "split": [2, 40, 1]},
        "offloaded and stopped": {"device_map": "disk", "early_stop": True, "split": [2, 40, 1]},
        "text": {"early_stop": True, "layers": [0], **text},
        "float32": {"dtype": "float32", "early_stop": True},
        "nan weight": {"directory": str(bad)},
        "nan weight in a later layer": {"directory": str(bad), "layers": [1]},
        "nan weight in an earlier layer": {"directory": str(bad), "layers": [4], "early_stop": True},
        "multimodal": {"directory": str(multimodal(good, out / "multimodal-checkpoint"))},
        "multimodal and stopped": {
            "directory": str(out / "multimodal-checkpoint"),
            "early_stop": True,
            "device_map": "disk",
        },
        "missing weight": {"directory": str(without(good, out, "model.layers.2.linear_attn.dt_bias"))},
    }
    facts = {
        name: live(msgspec.structs.replace(whole, out=str(out / name), **values))
        for name, values in wanted.items()
    }
    return facts | {"tampered": tampered(good, out / "tampered-checkpoint")}


def tampered(good: Path, directory: Path) -> dict[str, Any]:
    """Load a checkpoint, then change one bit of one weight in its file, then compare."""
    shutil.copytree(good, directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    before = check_layer_weights(block_of(model, 4), 4, directory)
    others = {}
    for name in ("linear_attn.A_log", "mlp.experts.1.up_proj.weight"):
        damaged(good, directory, f"model.layers.4.{name}", None)
        others[name] = check_layer_weights(block_of(model, 4), 4, directory).different
    return {"before": before.sound, "different": others}


def damaged(good: Path, directory: Path, name: str, value: float | None) -> Path:
    """A copy of the checkpoint with one element of one weight replaced, or its lowest bit flipped."""
    if not directory.exists():
        shutil.copytree(good, directory)
    tensors = load_file(good / "model.safetensors")
    flat = tensors[name].view(-1)
    if value is None:
        flat.view(torch.int16)[-1] ^= 1
    else:
        flat[-1] = value
    write(tensors, directory / "model", {"format": "pt"})
    return directory


def multimodal(good: Path, directory: Path) -> Path:
    """The same text model inside an image-and-text checkpoint, as the large ones are published.

    Its names have another prefix, and parts that are no language model have layers of the same numbers.
    """
    directory.mkdir()
    text = json.loads((good / "config.json").read_text())
    config = {
        "model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": text, "vision_config": {"model_type": "qwen3_5_moe_vision", "depth": 1},
        "dtype": "bfloat16",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(good / "model.safetensors").items()
    }
    other = torch.full_like(tensors["model.language_model.layers.1.linear_attn.A_log"], 7.0)
    tensors["mtp.layers.1.linear_attn.A_log"] = other
    tensors["model.visual.layers.2.linear_attn.A_log"] = other.clone()
    write(tensors, directory / "model", {"format": "pt"})
    return directory


def without(good: Path, out: Path, name: str) -> Path:
    """A copy of the checkpoint that lacks one weight, which transformers then makes up."""
    directory = out / "missing-checkpoint"
    shutil.copytree(good, directory)
    tensors = load_file(good / "model.safetensors")
    del tensors[name]
    write(tensors, directory / "model", {"format": "pt"})
    return directory


def live(request: CaptureRequest) -> dict[str, Any]:
    """Capture in this process; the result's document and how often a plan was told."""
    Path(request.out).mkdir(parents=True, exist_ok=True)
    told: list[Message] = []
    return capture_live(request, "tiny", told.append).document() | {
        "plans": sum(m.kind == "plan" for m in told)
    }


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except GdncheckError as error:
        return str(error)
    return ""


def write(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    part = path.with_name(f"{path.name}.part")
    save_file(tensors, part, metadata=metadata)
    part.replace(path.with_name(f"{path.name}.safetensors"))


def main() -> None:
    out, tokenizer = Path(sys.argv[1]), Path(sys.argv[2])
    facts = {
        "transformers": transformers.__version__,
        "classes": {name: random_model(name, out) for name in CLASSES},
        "checkpoints": checkpoints(tokenizer, out),
    }
    (out / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()

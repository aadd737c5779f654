"""What a Hugging Face checkpoint directory says about its GDN layers, read without transformers.

The idea: everything that can be refused (a missing directory, a full-attention layer, a token beyond
the vocabulary, a full disk) is refused from `config.json` in milliseconds, before any model is loaded.
Sizes on disk follow from the same numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from .errors import BadInput, CannotRun

What = Literal["rule", "core"]

# Defaults of transformers' configuration classes, for a config.json that leaves a key out.
HYBRID_DEFAULTS = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "full_attention_interval": 4,
}  # fmt: skip
FAMILY_DEFAULTS = {
    "qwen3_next": {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48},
    "qwen3_5": {"vocab_size": 248320, "hidden_size": 4096, "num_hidden_layers": 32},
    "qwen3_5_moe": {"vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40},
}
BYTES_OF = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a hybrid model that a capture needs."""

    model_type: str
    n_layers: int
    gdn_layers: tuple[int, ...]
    """Indices of the Gated DeltaNet layers, 0-based."""
    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    hidden_size: int
    vocab_size: int
    dtype: str
    """Data type of the checkpoint as its config states it."""

    @property
    def conv_channels(self) -> int:
        return 2 * self.n_key_heads * self.key_dim + self.n_value_heads * self.value_dim


def find_checkpoint(model: Path | str) -> Path:
    """The directory of `model`: itself, or the snapshot of `owner/name` in the local Hugging Face cache.

    Nothing is ever downloaded. Raises BadInput where there is neither, or no config.json in it.
    """
    path = Path(model)
    if not path.exists():
        path = _cached_snapshot(str(model)) or path
    if not path.exists():
        raise BadInput(
            f"{model}: no such directory, and no model of that name in the Hugging Face cache; "
            "give the directory of a checkpoint, or download it first (hf download OWNER/NAME)"
        )
    if not (path / "config.json").is_file():
        raise BadInput(f"{model}: has no config.json; give the directory of a Hugging Face checkpoint")
    return path


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` as a dictionary. Raises BadInput where it is no JSON object."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadInput(
            f"{path}: cannot be read as JSON ({error}); restore the checkpoint's own file"
        ) from None
    if not isinstance(config, dict):
        raise BadInput(
            f"{path}: holds a {type(config).__name__}, not an object; restore the checkpoint's own file"
        )
    return config


def model_shape(directory: Path) -> ModelShape:
    """The hybrid model's numbers. Raises BadInput where the model has no Gated DeltaNet layer."""
    config = read_config(directory)
    text = config.get("text_config") or config
    model_type = str(text.get("model_type") or config.get("model_type") or "unknown")
    family = model_type.removesuffix("_text")
    if family not in FAMILY_DEFAULTS:
        known = ", ".join(FAMILY_DEFAULTS)
        raise BadInput(
            f"{directory}: model type {model_type} has no Gated DeltaNet layers; models that do: {known}"
        )
    values = {
        **HYBRID_DEFAULTS,
        **FAMILY_DEFAULTS[family],
        **{k: v for k, v in text.items() if v is not None},
    }
    types = values.get("layer_types") or [
        "linear_attention" if (layer + 1) % values["full_attention_interval"] else "full_attention"
        for layer in range(values["num_hidden_layers"])
    ]
    gdn = tuple(layer for layer, kind in enumerate(types) if kind == "linear_attention")
    if not gdn:
        raise BadInput(
            f"{directory}: all {len(types)} layers are full attention; there is no GDN layer to capture"
        )
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    return ModelShape(
        model_type=model_type,
        n_layers=len(types),
        gdn_layers=gdn,
        n_key_heads=values["linear_num_key_heads"],
        n_value_heads=values["linear_num_value_heads"],
        key_dim=values["linear_key_head_dim"],
        value_dim=values["linear_value_head_dim"],
        conv_width=values["linear_conv_kernel_dim"],
        hidden_size=values["hidden_size"],
        vocab_size=values["vocab_size"],
        dtype=str(dtype or "bfloat16"),
    )


def select_layers(shape: ModelShape, wanted: list[str | int] | str | int) -> list[int]:
    """Layer indices asked for, sorted: `17`, `0-2`, `0,1,17`, `all`, or a list of those.

    A range takes the GDN layers inside it; a layer named by itself must be one.
    Raises BadInput for anything else, naming the GDN layers there are.
    """
    items = wanted if isinstance(wanted, list) else [wanted]
    chosen: set[int] = set()
    for item in [part.strip() for entry in items for part in str(entry).split(",")]:
        chosen.update(shape.gdn_layers if item == "all" else _layers_of(shape, item))
    if not chosen:
        raise BadInput(f"no layer asked for; GDN layers here are {ranges(shape.gdn_layers)}")
    return sorted(chosen)


def expected_bytes(shape: ModelShape, lengths: list[int], what: What, dtype: str | None = None) -> int:
    """Bytes that one captured layer takes on disk for calls of these lengths, headers left out."""
    element = BYTES_OF.get(dtype or shape.dtype, 2)
    key, value = shape.n_key_heads * shape.key_dim, shape.n_value_heads * shape.value_dim
    # q, k, v, beta and the rule's own output; g is float32.
    per_token = element * (2 * key + 2 * value + shape.n_value_heads) + 4 * shape.n_value_heads
    per_call = 2 * 4 * shape.n_value_heads * shape.key_dim * shape.value_dim
    if what == "core":
        channels = shape.conv_channels
        # conv_input, z, the gated norm's output, a, b and the layer's output; weights and conv states.
        per_token += element * (channels + 2 * value + 2 * shape.n_value_heads + shape.hidden_size)
        per_call += element * channels * (shape.conv_width + 2 * (shape.conv_width - 1))
    return sum(lengths) * per_token + len(lengths) * per_call


def ranges(layers: tuple[int, ...]) -> str:
    """`0-2, 4-6, 8` for (0, 1, 2, 4, 5, 6, 8)."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _layers_of(shape: ModelShape, item: str) -> list[int]:
    first, dash, last = item.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise BadInput(f"--layer {item!r} is no layer; give an index, a range such as 0-2, or all")
    low, high = int(first), int(last or first)
    if high < low:
        raise BadInput(f"--layer {item} is empty; write the smaller index first")
    if high >= shape.n_layers:
        raise BadInput(
            f"layer {high} is out of range: the model has {shape.n_layers} layers (0..{shape.n_layers - 1}); "
            f"GDN layers here are {ranges(shape.gdn_layers)} (try --layer {shape.gdn_layers[-1]})"
        )
    inside = [layer for layer in shape.gdn_layers if low <= layer <= high]
    if not inside:
        near = min(shape.gdn_layers, key=lambda layer: (abs(layer - low), layer))
        which = f"layer {low} is" if low == high else f"layers {low}-{high} are"
        raise BadInput(
            f"{which} full attention; GDN layers here are {ranges(shape.gdn_layers)} (try --layer {near})"
        )
    return inside


def _cached_snapshot(name: str) -> Path | None:
    """Snapshot directory of `owner/name` in the local cache, or None; asks no network."""
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        raise CannotRun(
            f"{name}: huggingface_hub is not installed; give the directory of a checkpoint"
        ) from None
    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # not a name that the hub allows
        return None
    return Path(found).parent if isinstance(found, str) else None

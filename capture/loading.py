"""Load a checkpoint and its tokenizer with transformers: device, kernels, device map, early stop.

The idea: everything that may go wrong on the way to a model in memory is one line here, and whatever
transformers would pick up by itself (fla, a GPU, the network) is decided before it is imported.
`live` runs the model.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from .errors import BadInput, CannotRun
from .fingerprint import package_version
from .records import CaptureRequest

# Words that accelerate understands as a device map.
MAP_WORDS = ("auto", "balanced", "balanced_low_0", "sequential")


def choose_device(wanted: str) -> torch.device:
    """`auto` is the GPU where there is one. Raises CannotRun for a GPU that is absent."""
    if wanted != "cpu" and torch.cuda.is_available():
        return torch.device("cuda")
    if wanted == "cuda":
        raise CannotRun("no CUDA device here; run with --device cpu")
    return torch.device("cpu")


def choose_backend(backend: str, device: torch.device) -> None:
    """Hide fla and causal-conv1d from transformers unless their kernels are wanted and can run.

    Without this, transformers 5.24 calls fla's Triton kernels on a CPU wherever fla can be imported.
    Must run before transformers is imported.
    """
    if backend == "torch" or (backend == "auto" and device.type == "cpu"):
        for name in ("fla", "causal_conv1d"):
            sys.modules[name] = None  # type: ignore[assignment]


def tokenize(directory: Path, request: CaptureRequest) -> list[int]:
    """Ids of the request's text by the checkpoint's own tokenizer, no special token added."""
    transformers = import_transformers()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
        ids = tokenizer(request.text, add_special_tokens=False)["input_ids"]
    except Exception as error:  # whatever a tokenizer's own code may raise
        raise BadInput(
            f"{directory}: its tokenizer cannot be used ({first_line(error)}); give a JSON token array"
        ) from None
    if not ids:
        raise BadInput(f"{request.tokens_path}: becomes no token; put more text in it")
    return [int(token) for token in ids]


def load_model(request: CaptureRequest, device: torch.device) -> Any:
    """The checkpoint as its causal language model, in eval mode.

    With early_stop the layers after the last one asked for are not even loaded. Raises BadInput where
    transformers cannot load it, CannotRun where a package for the device map is missing.
    """
    transformers = import_transformers()
    config = transformers.AutoConfig.from_pretrained(request.directory, local_files_only=True)
    if request.early_stop:
        shorten(config.get_text_config(), max(request.layers) + 1)
    options: dict[str, Any] = {"dtype": "auto" if request.dtype == "auto" else getattr(torch, request.dtype)}
    if request.device_map:
        if package_version("accelerate") is None:
            raise CannotRun("--device-map needs accelerate; install gdncheck[capture]")
        n_layers = config.get_text_config().num_hidden_layers
        options["device_map"] = device_map(request.device_map, n_layers, device)
        options["offload_folder"] = request.offload_folder or str(Path(request.out) / "offload")
        if request.max_memory:
            options["max_memory"] = {int(k) if k.isdecimal() else k: v for k, v in request.max_memory.items()}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            request.directory, config=config, local_files_only=True, **options
        )
        if not request.device_map:
            model = model.to(device)
    except torch.OutOfMemoryError:
        raise CannotRun(
            f"the model does not fit on {device}; add --early-stop, or --device-map disk"
        ) from None
    except Exception as error:  # transformers raises OSError, ValueError, RuntimeError, KeyError, ...
        raise BadInput(f"{request.directory}: transformers cannot load it ({first_line(error)})") from None
    return model.eval()


def shorten(text_config: Any, n_layers: int) -> None:
    """Make the configuration one of the first n_layers, and of the first full-attention layer in any case.

    transformers asks that layer's cache how many tokens came before.
    """
    types = list(text_config.layer_types)
    first_full = types.index("full_attention") if "full_attention" in types else 0
    text_config.layer_types = types[: max(n_layers, first_full + 1)]
    text_config.num_hidden_layers = len(text_config.layer_types)


def device_map(wanted: str, n_layers: int, device: torch.device) -> Any:
    """What `device_map` of from_pretrained takes: a word of accelerate, one device, a JSON file, or `disk`.

    `disk` keeps every decoder block on disk and loads it while it runs; the rest stays on the device.
    """
    if wanted in MAP_WORDS:
        return wanted
    if wanted == "disk":
        near = {
            name: str(device) for name in ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
        }
        return near | {f"model.layers.{layer}": "disk" for layer in range(n_layers)}
    if wanted.endswith(".json"):
        try:
            return dict(json.loads(Path(wanted).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise BadInput(
                f"{wanted}: no device map ({first_line(error)}); give a JSON object module -> device"
            ) from None
    try:
        return {"": torch.device(wanted)}
    except RuntimeError:
        words = ", ".join((*MAP_WORDS, "disk", "cpu", "cuda:0"))
        raise BadInput(
            f"--device-map {wanted} is no device map; give one of {words}, or a JSON file"
        ) from None


def import_transformers() -> Any:
    """The package. Raises CannotRun where it is missing or broken."""
    try:
        import transformers
    except ImportError as error:
        raise CannotRun(
            f"transformers cannot be imported ({first_line(error)}); pip install 'transformers>=5.7'"
        ) from None
    with contextlib.suppress(AttributeError):
        transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    return transformers


def first_line(error: BaseException) -> str:
    """`KeyError: 'x'` in one line of at most 200 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:200]

"""Are a captured layer's weights finite, and the ones in the checkpoint's files, bit for bit?

The idea: before a kernel is blamed, the model itself is cleared: a weight that went bad on its way from
disk (a broken download, a flipped bit, a wrong conversion) explains a NaN just as well. Every parameter
of the layer's block is compared, one at a time, so memory stays small; where the model was loaded in
another dtype, the file's value is rounded to it first and the report says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from .errors import BadInput, CannotRun
from .hooks import loaded
from .huggingface import SAME_SIZE_INTEGER

# Parts of a checkpoint that have layers of the same number but are not the language model.
OTHER_PARTS = re.compile(r"(^|\.)(mtp|visual|vision_tower|vision_model)\.")


class LayerWeights(msgspec.Struct, frozen=True, kw_only=True):
    """What was found about one layer's weights; empty lists mean sound."""

    layer: int
    n_weights: int
    n_compared: int
    """Weights that were found in the files and compared; the others are only known to be finite or not."""
    nonfinite: list[str]
    """`name: value at index [...]`"""
    different: list[str]
    """`name: 3 of 4096 values differ, first at [...]`"""
    not_on_disk: list[str]
    rounded: list[str]
    """Weights that the model holds in another dtype than the file."""

    @property
    def sound(self) -> bool:
        return not self.nonfinite and not self.different and self.n_compared == self.n_weights


def check_layer_weights(block: nn.Module, layer: int, directory: Path) -> LayerWeights:
    """Compare every parameter of the decoder block `block` with the checkpoint's safetensors files.

    Raises BadInput where a file of the checkpoint is missing or no safetensors file.
    """
    files = CheckpointFiles(directory)
    nonfinite, different, missing, rounded = [], [], [], []
    total = 0
    for name, weight in _parameters(block):
        total += 1
        # torch tells a non-finite float8 only after a cast.
        bad = ~torch.isfinite(weight.float() if weight.element_size() == 1 else weight)
        if bad.any():
            index = bad.nonzero()[0].tolist()
            nonfinite.append(f"{name}: {float(weight[tuple(index)])} at {index}, {int(bad.sum())} in all")
        stored = files.find(layer, name)
        if stored is None:
            missing.append(name)
            continue
        if stored.dtype != weight.dtype:
            rounded.append(name)
            stored = stored.to(weight.dtype)
        difference = _difference(weight, stored)
        if difference:
            different.append(f"{name}: {difference}")
    return LayerWeights(
        layer=layer, n_weights=total, n_compared=total - len(missing), nonfinite=nonfinite,
        different=different, not_on_disk=missing, rounded=rounded,
    )  # fmt: skip


class CheckpointFiles:
    """Tensors of a checkpoint directory by layer and name, read one at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.file_of = _weight_map(directory)
        self.by_layer: dict[tuple[int, str], str] = {}
        for name in self.file_of:
            match = re.search(r"(?:^|\.)layers\.(\d+)\.(.+)$", name)
            if match and not OTHER_PARTS.search(name):
                self.by_layer[int(match[1]), match[2]] = name

    def find(self, layer: int, name: str) -> Tensor | None:
        """The stored tensor of a parameter of block `layer`, or None; experts stored singly are stacked."""
        if (layer, name) in self.by_layer:
            return self._read(self.by_layer[layer, name])
        for fused, parts in (
            ("experts.gate_up_proj", ("gate_proj", "up_proj")),
            ("experts.down_proj", ("down_proj",)),
        ):
            if name.endswith(fused):
                prefix = name.removesuffix(fused) + "experts"
                return self._stacked(layer, prefix, parts)
        return None

    def _stacked(self, layer: int, prefix: str, parts: tuple[str, ...]) -> Tensor | None:
        rows: list[Tensor] = []
        while (layer, f"{prefix}.{len(rows)}.{parts[0]}.weight") in self.by_layer:
            names = [(layer, f"{prefix}.{len(rows)}.{part}.weight") for part in parts]
            if any(name not in self.by_layer for name in names):
                return None
            rows.append(torch.cat([self._read(self.by_layer[name]) for name in names]))
        return torch.stack(rows) if rows else None

    def _read(self, name: str) -> Tensor:
        with _opened(self.directory / self.file_of[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def _parameters(block: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name inside the block, CPU tensor) of every parameter, loaded where accelerate keeps it elsewhere."""
    for prefix, module in block.named_modules():
        with loaded(module):
            for name, parameter in module.named_parameters(recurse=False):
                yield f"{prefix}.{name}".removeprefix("."), parameter.detach().to("cpu")


def _difference(weight: Tensor, stored: Tensor) -> str | None:
    if weight.shape != stored.shape:
        return f"has shape {list(weight.shape)} but the file has {list(stored.shape)}"
    integer = SAME_SIZE_INTEGER[weight.element_size()]
    unequal = weight.contiguous().view(integer) != stored.contiguous().view(integer)
    if not unequal.any():
        return None
    first = unequal.nonzero()[0].tolist()
    return f"{int(unequal.sum())} of {unequal.numel()} values differ from the file, first at {first}"


def _weight_map(directory: Path) -> dict[str, Path]:
    """Tensor name -> file name, from the index where there is one, else from the files' own headers."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            return {name: Path(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError, UnicodeDecodeError):
            raise BadInput(
                f"{index}: has no readable weight_map; restore the checkpoint's own file"
            ) from None
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise BadInput(
            f"{directory}: has no *.safetensors file; give a checkpoint that is stored as safetensors"
        )
    names: dict[str, Path] = {}
    for path in files:
        with _opened(path) as file:
            names |= dict.fromkeys(file.keys(), Path(path.name))
    return names


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise BadInput(
            f"{path}: is missing or no safetensors file ({error}); download the checkpoint again"
        ) from None


def block_of(model: nn.Module, layer: int) -> nn.Module:
    """The decoder block whose GDN layer has index `layer`."""
    for module in model.modules():
        if getattr(getattr(module, "linear_attn", None), "layer_idx", None) == layer:
            return module
    raise CannotRun(f"{type(model).__name__} has no block with a GDN layer {layer}")

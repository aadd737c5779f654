"""A directory of captures: `layer017.call0000.safetensors`, one file per layer and call.

The idea: the file name alone gives layer and call, so listing opens nothing; a header is read only to say
why a layer is not there (the model's `layer_types` tell which layers are GDN).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from .casefile import read_header
from .errors import BadInput, CannotRun, GdncheckError

FILE_NAME = re.compile(r"layer(\d+)\.call(\d+)\.safetensors")
GDN = "linear_attention"  # transformers' word for a GDN layer in `layer_types`


def file_name(layer: int, call: int) -> str:
    """Name of a capture: layer and call, 0-based."""
    return f"layer{layer:03d}.call{call:04d}.safetensors"


def cases_of_layer(captures: Path | str, layer: int) -> list[Path]:
    """Files of one layer in call order.

    Raises BadInput where the layer is no GDN layer of the model, CannotRun where it was not captured.
    """
    files = _files(captures)
    found = sorted((call, path) for (number, call), path in files.items() if number == layer)
    if found:
        return [path for _, path in found]
    captured = sorted({number for number, _ in files})
    types = _layer_types(list(files.values()))
    if types is None or (0 <= layer < len(types) and types[layer] == GDN):
        raise CannotRun(
            f"layer {layer} is not in {captures}; captured are {ranges(captured)} "
            f"(try --layer {_nearest(captured, layer)}, or capture it)"
        )
    gdn = [number for number, kind in enumerate(types) if kind == GDN]
    what = "is full attention" if 0 <= layer < len(types) else f"does not exist, the model has {len(types)}"
    near = _nearest([number for number in captured if number in gdn] or gdn, layer)
    raise BadInput(f"layer {layer} {what}; GDN layers here are {ranges(gdn)} (try --layer {near})")


def layers_in(captures: Path | str) -> list[int]:
    """Layers of which the directory has at least one call, ascending. Raises CannotRun where it has none."""
    return sorted({number for number, _ in _files(captures)})


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: 0-2, 4-6, 8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _files(captures: Path | str) -> dict[tuple[int, int], Path]:
    directory = Path(captures)
    remedy = "run gdncheck capture, or name the directory with --captures or GDNCHECK_CAPTURES"
    if directory.is_file():
        raise BadInput(f"{captures}: is a file, not a directory of captures; pass it as CASE")
    if not directory.is_dir():
        raise CannotRun(f"{captures}: no such directory of captures; {remedy}")
    files: dict[tuple[int, int], Path] = {}
    for path in sorted(directory.iterdir()):
        match = FILE_NAME.fullmatch(path.name)
        if match and path.is_file():
            key = int(match[1]), int(match[2])
            if key in files:
                raise BadInput(
                    f"{path}: is layer {key[0]} call {key[1]}, and so is {files[key].name}; keep one"
                )
            files[key] = path
    if not files:
        raise CannotRun(f"{captures}: holds no captures (layerNNN.callNNNN.safetensors); {remedy}")
    return files


def _layer_types(paths: list[Path]) -> list[str] | None:
    """`layer_types` of the captured model, from the first header that has it."""
    for path in paths:
        try:
            config = read_header(path).model_config
        except GdncheckError:
            continue  # a damaged neighbour is reported when it is judged, not when another layer is sought
        for place in (config, config.get("text_config")):
            types = place.get("layer_types") if isinstance(place, dict) else None
            if isinstance(types, list) and types:
                return [str(kind) for kind in types]
    return None


def _nearest(layers: Sequence[int], wanted: int) -> int:
    return min(layers, key=lambda number: (abs(number - wanted), number))

"""Baselines: what production runs, as TOML with one key per axis; shipped by engine, or a user's file.

The idea: a baseline says only what it knows; every axis it leaves out keeps the table's own. A value that
this kernel or case cannot take gives way to the kernel's own, and the report says so.
"""

from __future__ import annotations

import difflib
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...capture.errors import BadInput
from ..axes.axis import Situation
from ..axes.table import AXES, value_of
from .configuration import Configuration

FOLDER = "baselines"


def shipped() -> list[str]:
    """Names of the baselines that come with gdncheck."""
    folder = files("gdncheck.compare").joinpath(FOLDER)
    return sorted(
        entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")
    )


def read_baseline(name: str) -> dict[str, str]:
    """{axis: value} of a shipped baseline's name or of a file.

    Raises BadInput for a name or file that is not there, text that is no TOML, a key that is no axis, a value
    that is none of its axis.
    """
    text, where = _text(name)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{where}: is no TOML ({error}); write one `axis = value` per line") from None
    found = {}
    for key, value in table.items():
        if key not in AXES:
            near = difflib.get_close_matches(key, AXES, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise BadInput(f"{where}: {key!r} is no axis; {hint}axes are {', '.join(AXES)}")
        found[key] = value_of(key, _word(value, key, where), where)
    return found


def _text(name: str) -> tuple[str, str]:
    if name in shipped():
        resource = files("gdncheck.compare").joinpath(FOLDER, f"{name}.toml")
        return resource.read_text(encoding="utf-8"), f"baseline {name}"
    path = Path(name)
    if not path.is_file():
        known = ", ".join(shipped())
        raise BadInput(f"--baseline {name}: no such file, and no baseline of that name; shipped are {known}")
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise BadInput(f"{path}: cannot be read ({reason}); give a TOML file") from None


def _word(value: Any, key: str, where: str) -> str:
    """A TOML value as the command line would write it."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        kind = type(value).__name__
        raise BadInput(f"{where}: {key} is {kind} {value!r}; give a word or a number: {AXES[key].grammar}")
    return str(value)


def baseline_for(given: dict[str, str], situation: Situation) -> tuple[Configuration, list[dict[str, str]]]:
    """A full configuration for this kernel and case; and what of the given one it cannot take."""
    baseline, left = {}, []
    for name, axis in AXES.items():
        own = axis.baseline(situation)
        value = given.get(name, own)
        reason = "" if value == own else axis.refuses(situation, value)
        if reason:
            left.append({"axis": name, "value": value, "reason": f"of the baseline; {own} instead: {reason}"})
        baseline[name] = own if reason else value
    return baseline, left

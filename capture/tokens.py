"""Frozen token arrays: what a model is fed, read from a file, checked, hashed and cut into calls.

The idea: a capture is comparable with another one (another engine, another day) only if both were fed
the same ids in the same calls. So ids come from a file, never from a prompt template, and their sha256
goes into every case. A text file is turned into ids by the checkpoint's own tokenizer, in the process
that runs the model (`live`); this module knows no tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import torch

from .errors import BadInput

FORM = 'give a list of ids, {"tokens": [...]}, or a list of lists (one per prefill call)'
INT64_MAX = 2**63 - 1


class TokenFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a token file holds: ids, or text that still needs the tokenizer."""

    path: Path
    ids: list[int] | None = None
    lengths: list[int] | None = None
    """Lengths of the prefill calls where the file says them (a list of lists)."""
    text: str | None = None


def read_tokens(path: Path | str) -> TokenFile:
    """Read a token file: JSON, or text for the model's tokenizer (any name that ends in .txt).

    Raises BadInput: the file is missing, empty, no JSON, or holds something that is no token id.
    """
    path = Path(path)
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file; give a JSON token array or a .txt file") from None
    except IsADirectoryError:
        raise BadInput(f"{path}: is a directory; give a JSON token array or a .txt file") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: is not UTF-8 text (byte {error.start}); write the file again") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}); mend its permissions") from None
    if path.suffix == ".txt":
        if not content:
            raise BadInput(f"{path}: is empty; put the text to be tokenized in it")
        return TokenFile(path=path, text=content)
    try:
        document = json.loads(content)
    except (json.JSONDecodeError, RecursionError) as error:
        where = f"line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else "too deep"
        raise BadInput(f"{path}: is no JSON ({where}); {FORM}, or name a text file *.txt") from None
    return _from_document(path, document)


def check_ids(ids: list[int], vocab_size: int, where: Path | str) -> None:
    """Raise BadInput for the first id outside [0, vocab_size)."""
    for index, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise BadInput(
                f"{where}: token {index} is {token} but the model's vocabulary has {vocab_size} ids "
                f"(0..{vocab_size - 1}); tokenize with this model's tokenizer"
            )


def token_hash(ids: list[int]) -> str:
    """sha256, hex, over the ids as little-endian int64."""
    array = torch.tensor(ids, dtype=torch.int64).numpy().astype("<i8")
    return hashlib.sha256(array.tobytes()).hexdigest()


def call_lengths(n_tokens: int, split: int | list[int] | None) -> list[int]:
    """Lengths of the prefill calls, in order; they sum to n_tokens.

    split: None is one call; an int cuts every that many tokens (as an engine's token budget does); a
    list gives the lengths one by one, and what it leaves over becomes the last call.
    Raises BadInput for a length below 1 or lengths beyond the tokens.
    """
    if split is None:
        return [n_tokens]
    if isinstance(split, int):
        if split < 1:
            raise BadInput(f"--split {split}: a call needs at least one token; give a length of 1 or more")
        full, rest = divmod(n_tokens, split)
        return [split] * full + ([rest] if rest else [])
    for length in split:
        if length < 1:
            raise BadInput(f"--split {_join(split)}: a call of {length} tokens; give lengths of 1 or more")
    rest = n_tokens - sum(split)
    if rest < 0:
        raise BadInput(
            f"--split {_join(split)}: sums to {sum(split)} but there are {n_tokens} tokens; cut less"
        )
    return [*split, rest] if rest else list(split)


def _from_document(path: Path, document: Any) -> TokenFile:
    if isinstance(document, dict):
        if "tokens" not in document:
            keys = ", ".join(sorted(map(str, document))[:5]) or "none"
            raise BadInput(f"{path}: has no key tokens (keys: {keys}); {FORM}")
        document = document["tokens"]
    if not isinstance(document, list):
        raise BadInput(f"{path}: holds a {type(document).__name__}, not a list; {FORM}")
    if not document:
        raise BadInput(f"{path}: holds no token; {FORM}")
    if not isinstance(document[0], list):
        return TokenFile(path=path, ids=_checked(path, document, ""))
    ids: list[int] = []
    lengths: list[int] = []
    for number, part in enumerate(document):
        if not isinstance(part, list) or not part:
            what = "an empty call" if part == [] else f"a {type(part).__name__}, not a list"
            raise BadInput(f"{path}: call {number} is {what}; {FORM}")
        ids += _checked(path, part, f"call {number}, ")
        lengths.append(len(part))
    return TokenFile(path=path, ids=ids, lengths=lengths)


def _checked(path: Path, values: list[Any], place: str) -> list[int]:
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int):
            shown = json.dumps(value)
            shown = shown if len(shown) < 40 else f"{shown[:36]} ..."
            raise BadInput(f"{path}: {place}token {index} is {shown}, not an integer; {FORM}")
        if not 0 <= value <= INT64_MAX:
            raise BadInput(f"{path}: {place}token {index} is {value}; ids lie between 0 and 2^63 - 1")
    return values


def _join(lengths: list[int]) -> str:
    return ",".join(map(str, lengths))

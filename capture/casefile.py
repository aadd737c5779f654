"""The case file: one safetensors file with the tensors and one JSON document, written and read here only.

The idea: a file is trusted only as far as it was checked. Reading checks the container, the header, the
layout (`validate`), the claim of finiteness and the content hash, and each failure is one line that says
what, where and what to do. Tensors are mapped from disk, so a big case costs no memory until it is used.
Only `safetensors` reads the file; there is no pickle anywhere.

The header lies under the metadata key `gdncheck`. Keys: format_version, op, options, origin,
model_config, fingerprint, finite, content_hash; all but the document itself may be left out by a file
that was written by hand (then: version 1, op `rule`, default options, finiteness measured, no hash to
check), and `cu_seqlens` may be missing (then: one sequence).
"""

from __future__ import annotations

import difflib
import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .atomic import atomic_path
from .case import CallOptions, Case, Op, Origin
from .errors import BadInput
from .validate import OBSERVED, REQUIRED, check_tensors, first_nonfinite

FORMAT_VERSION = 1
METADATA_KEY = "gdncheck"
LARGEST_HEADER = 100_000_000  # bytes; safetensors takes no longer one
HASH_BLOCK = 1 << 26  # bytes handed to sha256 at a time


class Header(msgspec.Struct, kw_only=True):
    """The JSON document of a case file."""

    format_version: int = FORMAT_VERSION
    op: Op = "rule"
    options: CallOptions = CallOptions()
    origin: Origin = Origin(kind="import")
    model_config: dict[str, Any] = {}
    fingerprint: dict[str, Any] = {}
    finite: bool | None = None
    """The maker's claim that every input tensor is finite; None makes no claim."""
    content_hash: str | None = None


def write_case(case: Case, path: Path | str) -> Path:
    """Write a case and return its path; the file appears whole or not at all.

    The header's `finite` records what the input tensors are, whatever `case.finite` said.
    Raises BadInput where the tensors are not canonical (the reason says which) or the place is not writable.
    """
    path = Path(path)
    tensors = _storable(case.tensors)
    check_tensors(tensors, case.op, finite=False, where=f"{path}: not written: {case.label}")
    document = _document(case, _is_finite(tensors))
    document["content_hash"] = content_hash(tensors, document)
    with atomic_path(path) as temporary:
        try:
            save_file(tensors, temporary, metadata={METADATA_KEY: _canonical_json(document)})
        except SafetensorError as error:
            raise BadInput(f"{path}: not written ({_one_line(error)}); choose another place") from None
    return path


def read_case(path: Path | str, *, check_hash: bool = True) -> Case:
    """Read and check a case file; tensors are memory-mapped.

    check_hash: also compare the content hash (reads the whole file); the claim of finiteness is always
    checked. Raises BadInput for anything that is not a sound case file.
    """
    path = Path(path)
    document, tensors = _load(path)
    header = _header(document, path)
    handmade = header.content_hash is None
    if handmade and "cu_seqlens" not in tensors and "v" in tensors and tensors["v"].dim() == 3:
        tensors["cu_seqlens"] = torch.tensor([0, tensors["v"].shape[0]])
    check_tensors(tensors, header.op, finite=header.finite is True, where=str(path))
    if check_hash:
        found = content_hash(tensors, document)
        if not handmade and found != header.content_hash:
            raise BadInput(
                f"{path}: content hash is {found[:12]} but its header says {str(header.content_hash)[:12]}; "
                "the file was changed after it was written: capture or make it again"
            )
        header.content_hash = found
    return Case(
        op=header.op,
        tensors=tensors,
        options=header.options,
        origin=header.origin,
        model_config=header.model_config,
        fingerprint=header.fingerprint,
        finite=_is_finite(tensors) if header.finite is None else header.finite,
        content_hash=header.content_hash,
        path=path,
    )


def read_header(path: Path | str) -> Header:
    """Only the header of a case file: cheap, for listing directories. Raises BadInput as read_case does."""
    path = Path(path)
    _check_container(path)
    with safe_open(path, framework="pt") as file:
        return _header(_decode(file.metadata(), path), path)


def content_hash(tensors: dict[str, Tensor], document: dict[str, Any]) -> str:
    """sha256, hex: per tensor, sorted by name, the line `[name,dtype,shape]` and its bytes; then the header.

    The header enters as JSON with sorted keys, without spaces and without `content_hash`.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous().cpu()
        line = [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        digest.update(_canonical_json(line).encode() + b"\n")
        flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
        for start in range(0, flat.numel(), HASH_BLOCK):
            digest.update(flat[start : start + HASH_BLOCK].numpy().data)
    rest = {key: value for key, value in document.items() if key != "content_hash"}
    digest.update(_canonical_json(rest).encode())
    return digest.hexdigest()


def hash_of(case: Case) -> str:
    """The content hash that `case` would have as a file."""
    tensors = _storable(case.tensors)
    return content_hash(tensors, _document(case, _is_finite(tensors)))


def bytes_on_disk(case: Case) -> int:
    """Size of the case's tensors in bytes, which is the file's size but for a header of some kB."""
    return sum(t.numel() * t.element_size() for t in case.tensors.values())


def _document(case: Case, finite: bool) -> dict[str, Any]:
    scale = case.options.scale
    if scale is not None and not abs(scale) < float("inf"):
        raise BadInput(f"{case.label}: scale is {scale}; give a finite number")
    header = Header(
        op=case.op,
        options=case.options,
        origin=case.origin,
        model_config=case.model_config,
        fingerprint=case.fingerprint,
        finite=finite,
    )
    try:
        document: dict[str, Any] = json.loads(msgspec.json.encode(header))
    except TypeError as error:
        raise BadInput(
            f"{case.label}: its header is no JSON ({error}); keep plain values in model_config"
        ) from None
    del document["content_hash"]
    return document


def _canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _storable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors of their own, as safetensors wants them (it refuses shared storage)."""
    seen: set[int] = set()
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        kept = tensor.detach().cpu().contiguous()
        address = kept.untyped_storage().data_ptr()
        whole = kept.untyped_storage().nbytes() == kept.numel() * kept.element_size()
        stored[name] = kept if whole and address not in seen else kept.clone()
        seen.add(address)
    return stored


def _is_finite(tensors: dict[str, Tensor]) -> bool:
    return all(first_nonfinite(n, t, None) is None for n, t in tensors.items() if not n.startswith(OBSERVED))


def _load(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    _check_container(path)
    try:
        with safe_open(path, framework="pt") as file:
            document = _decode(file.metadata(), path)
            return document, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError) as error:
        raise BadInput(
            f"{path}: safetensors cannot read it ({_one_line(error)}); copy or capture it again"
        ) from None


def _decode(metadata: dict[str, str] | None, path: Path) -> dict[str, Any]:
    if not metadata or METADATA_KEY not in metadata:
        raise BadInput(
            f"{path}: has no metadata under the key {METADATA_KEY!r}, so how the rule was called is unknown; "
            'write it with metadata={"gdncheck": \'{"format_version": 1, "op": "rule"}\'}'
        )
    try:
        document = json.loads(metadata[METADATA_KEY])
    except ValueError as error:
        raise BadInput(
            f"{path}: metadata {METADATA_KEY!r} is no JSON ({_one_line(error)}); write it again"
        ) from None
    if not isinstance(document, dict):
        raise BadInput(f"{path}: metadata {METADATA_KEY!r} is no JSON object; write it again")
    return document


def _header(document: dict[str, Any], path: Path) -> Header:
    version = document.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION or isinstance(version, bool):
        newer = isinstance(version, int) and version > FORMAT_VERSION
        remedy = "update gdncheck" if newer else "capture or make it again"
        raise BadInput(
            f"{path}: format version is {version!r}, this gdncheck reads {FORMAT_VERSION}; {remedy}"
        )
    if document.get("op", "rule") not in REQUIRED:
        raise BadInput(f"{path}: op is {document['op']!r}; this gdncheck knows {', '.join(REQUIRED)}")
    _no_misspelt(document, Header, "header", path)
    if isinstance(document.get("options"), dict):
        _no_misspelt(document["options"], CallOptions, "options", path)
    try:
        return msgspec.convert(document, Header)
    except msgspec.ValidationError as error:
        raise BadInput(f"{path}: header: {_one_line(error)}; write the case again") from None


def _no_misspelt(document: dict[str, Any], kind: type[msgspec.Struct], what: str, path: Path) -> None:
    """Further keys are carried along, but a misspelt one would silently become a default."""
    for key in document.keys() - set(kind.__struct_fields__):
        near = difflib.get_close_matches(key, kind.__struct_fields__, n=1, cutoff=0.75)
        if near:
            raise BadInput(f"{path}: {what} key {key!r} is unknown; did you mean {near[0]!r}?")


def _check_container(path: Path) -> None:
    """Say plainly what is wrong with the bytes before safetensors says it in its own words."""
    if path.is_dir():
        raise BadInput(f"{path}: is a directory; name one .safetensors file, or use --layer with --captures")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            raw = file.read(length) if len(prefix) == 8 and length <= min(size - 8, LARGEST_HEADER) else None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise BadInput(f"{path}: cannot be read ({reason}); check the name") from None
    if size == 0:
        raise BadInput(f"{path}: is empty (0 bytes); copy or capture it again")
    table = _table(raw)
    if table is None:
        cut = len(prefix) == 8 and size - 8 < length <= LARGEST_HEADER and _starts_like_json(path)
        what = "is cut short inside its header" if cut else "is not a safetensors file"
        raise BadInput(f"{path}: {what} ({size} bytes); copy or capture it again")
    end = 8 + length + max((t["data_offsets"][1] for t in table.values()), default=0)
    if size < end:
        raise BadInput(f"{path}: is cut short: {size} of {end} bytes; copy or capture it again")


def _table(raw: bytes | None) -> dict[str, dict[str, Any]] | None:
    """The container's tensor table, or None where the bytes are no safetensors header."""
    if not raw:
        return None
    try:
        table = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(table, dict):
        return None
    table.pop("__metadata__", None)
    for entry in table.values():
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(isinstance(o, int) for o in offsets):
            return None
    return table


def _starts_like_json(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]

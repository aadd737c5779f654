"""The findings of a run: one row per signature, however often it was seen.

The idea: a finding is a failing (case, kernel, configuration) under the signature that makes two failures the
same one. Whoever works on it (fuzz finds and confirms, shrink reduces, replay and export read) changes
single columns of its row, each in one transaction.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import msgspec

from ..capture.errors import BadInput
from .jsonout import plain_numbers

FindingStatus = Literal["found", "not-reproduced", "confirmed", "to-shrink", "shrunk"]
# Columns of the table that are JSON, and those that a writer may change later.
JSON_COLUMNS = ("deviations", "config", "options", "document")
CHANGEABLE = ("status", "case_file", "failures", "runs", "shrunk_file", "neighbour_file", "document", "times")


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """What makes two failures the same one."""

    kernel: str
    """Name with version."""
    version: str | None
    tier: int | None
    class_: str
    """Class of the place, or `error`."""
    stage: str | None
    """Tensor or stage of the place."""
    deviations: dict[str, str]
    place_pattern: str
    """Where, without numbers that depend on the case: `first token of a chunk`, say."""

    @property
    def digest(self) -> str:
        """16 hex digits that name the finding."""
        text = json.dumps(msgspec.to_builtins(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class FindingRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `findings`."""

    signature: str
    """16 hex digits."""
    kernel: str
    version: str | None
    tier: int | None
    class_: str = msgspec.field(name="class")
    stage: str | None
    deviations: dict[str, str]
    place_pattern: str
    times: int
    """How often it was seen."""
    status: FindingStatus
    """`found`: not confirmed yet; `to-shrink`: confirmed; `not-reproduced`: no fresh process shows it."""
    case_file: str | None = None
    """Below the run's directory."""
    number: int | None = None
    config: dict[str, str] = {}
    """Every axis; empty: the baseline with `deviations`."""
    options: dict[str, Any] = {}
    """seed, device, time_limit."""
    failures: int | None = None
    runs: int | None = None
    """`failures` of so many runs in fresh processes."""
    shrunk_file: str | None = None
    neighbour_file: str | None = None
    at: str | None = None
    document: dict[str, Any] = {}

    @property
    def identity(self) -> Signature:
        """The signature as data."""
        return Signature(
            kernel=self.kernel, version=self.version, tier=self.tier, class_=self.class_, stage=self.stage,
            deviations=self.deviations, place_pattern=self.place_pattern,
        )  # fmt: skip


COLUMNS = tuple("class" if n == "class_" else n for n in FindingRow.__struct_fields__)


class FindingsTable:
    """Reads and writes `findings` and `aliases` through the store's own way of executing."""

    def __init__(self, execute: Callable[..., Any]) -> None:
        self._execute = execute

    def add(self, signature: Signature, document: Mapping[str, Any], **columns: Any) -> str:
        """Keep a finding; seeing it again counts it and changes nothing else. Returns its digest."""
        s = signature
        row = {
            "signature": s.digest, "kernel": s.kernel, "version": s.version, "tier": s.tier,
            "class": s.class_, "stage": s.stage, "deviations": s.deviations,
            "place_pattern": s.place_pattern, "document": dict(document), **columns,
        }  # fmt: skip
        names = ", ".join(row)
        marks = ", ".join("?" for _ in row)
        again = columns.get("times", 1)
        self._execute(
            f"INSERT INTO findings ({names}, at) VALUES ({marks}, strftime('%Y-%m-%dT%H:%M:%SZ', 'now')) "
            "ON CONFLICT (signature) DO UPDATE SET times = times + ?",
            (*(_stored(n, v) for n, v in row.items()), again),
        )
        return s.digest

    def change(self, digest: str, **columns: Any) -> None:
        """Change columns of a finding that is there."""
        wrong = sorted(set(columns) - set(CHANGEABLE))
        if wrong:
            raise ValueError(f"{wrong[0]} is part of what a finding is, or no column at all")
        sets = ", ".join(f"{name} = ?" for name in columns)
        values = (_stored(n, v) for n, v in columns.items())
        self._execute(f"UPDATE findings SET {sets} WHERE signature = ?", (*values, digest))

    def seen_again(self, digest: str, times: int = 1) -> None:
        self._execute("UPDATE findings SET times = times + ? WHERE signature = ?", (times, digest))

    def all(self) -> Iterator[FindingRow]:
        """In the order in which they came."""
        rows = self._execute(f"SELECT {', '.join(COLUMNS)} FROM findings ORDER BY rowid").fetchall()
        yield from map(_read, rows)

    def find(self, prefix: str, where: str) -> FindingRow:
        """The finding whose signature starts with `prefix`. Raises BadInput where none or several do."""
        rows = [row for row in self.all() if row.signature.startswith(prefix)]
        if len(rows) == 1:
            return rows[0]
        known = ", ".join(row.signature for row in self.all()) or "none"
        what = "no finding starts so" if not rows else f"{len(rows)} findings start so"
        raise BadInput(f"{where}: signature {prefix!r}: {what}; findings are {known}")

    def alias(self, raw: str) -> str | None:
        """The finding that a raw signature turned out to be; None for a new one."""
        row = self._execute("SELECT signature FROM aliases WHERE raw = ?", (raw,)).fetchone()
        return None if row is None else str(row[0])

    def add_alias(self, raw: str, digest: str) -> None:
        self._execute("INSERT OR REPLACE INTO aliases VALUES (?, ?)", (raw, digest))


def _stored(name: str, value: Any) -> Any:
    return json.dumps(plain_numbers(value)) if name in JSON_COLUMNS and value is not None else value


def _read(row: tuple[Any, ...]) -> FindingRow:
    fields = {
        name: json.loads(value) if name in JSON_COLUMNS and value is not None else value
        for name, value in zip(COLUMNS, row, strict=True)
        if value is not None or name in ("version", "tier", "stage")
    }
    return msgspec.convert(fields, FindingRow)

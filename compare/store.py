"""The run store: one SQLite file per run, that sweep and fuzz write their results into as they come.

The idea: a result is one row under a key that says exactly what was run, committed before the next one
starts. So a run that was killed loses nothing but the call in flight, and a resumed run asks the store first
and runs only what is not there. What a result looks like is the writer's business: the store keeps its JSON,
and the columns that people query by. The schema is explained in docs/run-store.md.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from ..capture.errors import BadInput
from .jsonout import plain_numbers

FILE_NAME = "run.sqlite"
SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE run (
    name TEXT PRIMARY KEY,      -- schema_version, command, parameters, ...
    value TEXT NOT NULL         -- JSON
);
CREATE TABLE results (
    key TEXT PRIMARY KEY,       -- what was run: kernel, case, configuration, how
    kernel TEXT NOT NULL,
    case_name TEXT NOT NULL,
    verdict TEXT NOT NULL,
    seconds REAL NOT NULL,      -- of the kernel
    at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%SZ', 'now')),
    document TEXT NOT NULL      -- the whole result, JSON
);
CREATE TABLE findings (
    signature TEXT PRIMARY KEY, -- 16 hex digits, see Signature
    kernel TEXT NOT NULL,
    version TEXT,
    tier INTEGER,
    class TEXT,                 -- nan, +inf, -inf, wrong, moves, error
    stage TEXT,                 -- tensor or stage of the place
    deviations TEXT NOT NULL,   -- JSON {axis: value}, the minimal set
    place_pattern TEXT NOT NULL,
    times INTEGER NOT NULL DEFAULT 1,
    document TEXT NOT NULL      -- the finding, JSON
);
"""


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


class RunStore:
    """An open run. Use as a context manager."""

    def __init__(self, directory: Path, connection: sqlite3.Connection) -> None:
        self.directory, self._connection = directory, connection

    @classmethod
    def open(cls, directory: Path | str, *, parameters: Mapping[str, Any], resume: bool) -> RunStore:
        """Start a run in a directory, or go on with the one in it.

        parameters: what the answers depend on; a run is resumed only with the same.
        Raises BadInput where the directory holds a run and resume is not asked for, holds none and it is,
        cannot be written, or holds a run of something else.
        """
        directory = Path(directory)
        path = directory / FILE_NAME
        if resume and not path.exists():
            raise BadInput(f"{directory}: holds no {FILE_NAME} to resume; leave --resume out to start one")
        if path.exists() and not resume:
            raise BadInput(f"{directory}: holds a run already; add --resume, or choose another --out")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(path, isolation_level=None)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise BadInput(f"{path}: cannot be opened ({reason}); choose another --out") from None
        store = cls(directory, connection)
        try:
            store._begin(path, json.loads(json.dumps(plain_numbers(dict(parameters)))))
        except BaseException:
            connection.close()
            raise
        return store

    def _begin(self, path: Path, parameters: dict[str, Any]) -> None:
        """Write a new run's parameters, or compare those of the run that is there."""
        try:
            tables = {row[0] for row in self._connection.execute("SELECT name FROM sqlite_master")}
            if not tables:
                # One transaction: a run killed here has no tables, and starts again.
                self._connection.executescript(f"BEGIN; {SCHEMA} COMMIT;")
                self.remember("schema_version", SCHEMA_VERSION)
                self.remember("parameters", parameters)
                return
            version, before = self.recall("schema_version"), self.recall("parameters")
        except sqlite3.Error as error:
            raise BadInput(f"{path}: is no run store ({error}); choose another --out") from None
        if version is None or before is None:
            self.remember("schema_version", SCHEMA_VERSION)
            self.remember("parameters", parameters)
            return
        if version != SCHEMA_VERSION:
            raise BadInput(
                f"{path}: has schema {version}, this gdncheck reads {SCHEMA_VERSION}; use another --out"
            )
        changed = sorted(n for n in {*before, *parameters} if before.get(n) != parameters.get(n))
        if changed:
            raise BadInput(
                f"{path}: is a run of something else: {', '.join(changed)} differ "
                f"(was {before.get(changed[0])!r}, is {parameters.get(changed[0])!r}); choose another --out"
            )

    def remember(self, name: str, value: Any) -> None:
        """Keep a fact about the run."""
        row = (name, json.dumps(plain_numbers(value)))
        self._connection.execute("INSERT OR REPLACE INTO run VALUES (?, ?)", row)

    def recall(self, name: str) -> Any:
        """A fact about the run; None where there is none."""
        row = self._connection.execute("SELECT value FROM run WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def put(self, key: str, *, kernel: str, case: str, verdict: str, seconds: float, document: str) -> None:
        """Keep a result; one of the same key is replaced."""
        self._connection.execute(
            "INSERT OR REPLACE INTO results (key, kernel, case_name, verdict, seconds, document) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (key, kernel, case, verdict, seconds, document),
        )

    def get(self, key: str) -> str | None:
        """The document of a result that was kept."""
        row = self._connection.execute("SELECT document FROM results WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def results(self) -> Iterator[tuple[str, str]]:
        """(key, document) of all results, in the order in which they came."""
        yield from self._connection.execute("SELECT key, document FROM results ORDER BY rowid")

    def add_finding(self, signature: Signature, document: Mapping[str, Any]) -> str:
        """Keep a finding under its signature; seeing it again counts it. Returns the signature's digest."""
        s, text = signature, json.dumps(plain_numbers(dict(document)))
        self._connection.execute(
            "INSERT INTO findings (signature, kernel, version, tier, class, stage, deviations, "
            "place_pattern, document) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (signature) DO UPDATE SET times = times + 1",
            (
                s.digest, s.kernel, s.version, s.tier, s.class_, s.stage,
                json.dumps(s.deviations), s.place_pattern, text,
            ),
        )  # fmt: skip
        return s.digest

    def findings(self) -> Iterator[dict[str, Any]]:
        """All findings: signature, times, and the document."""
        rows = self._connection.execute("SELECT signature, times, document FROM findings ORDER BY rowid")
        for signature, times, document in rows:
            yield {"signature": signature, "times": times, **json.loads(document)}

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

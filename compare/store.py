"""The run store: one SQLite file per run, that sweep and fuzz write their results into as they come.

The idea: a result is one row under a key that says exactly what was run, committed before the next one
starts, and a case's file is on the disk before a row names it. So a run that was killed loses nothing but
what was in flight, and a resumed run asks the store first and runs only what is not there. One process
writes: it holds a lock that dies with it. What a result looks like is the writer's business: the store keeps
its JSON, and the columns that people query by.

The tables are `store_schema`'s, findings `store_findings`'; docs/run-store.md explains both.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ..capture.case import Case
from ..capture.casefile import hash_of, write_case
from ..capture.errors import BadInput, CannotRun
from .jsonout import plain_numbers
from .store_findings import FindingRow, FindingsTable, Signature
from .store_lock import RunLock
from .store_schema import SCHEMA_VERSION, create, migrate

__all__ = ["CASES", "FILE_NAME", "SCHEMA_VERSION", "FindingRow", "RunStore", "Signature"]

FILE_NAME = "run.sqlite"
CASES = "cases"
HASH_DIGITS = 24
# Seconds to wait for another connection's transaction (runners of one run share the file).
BUSY_SECONDS = 60.0
# What SQLite says where a file cannot grow: no room, a quota or a limit on the size of files.
FULL = ("disk is full", "disk i/o error", "disk full")


class RunStore:
    """An open run. Use as a context manager."""

    def __init__(self, directory: Path, connection: sqlite3.Connection, lock: RunLock | None = None) -> None:
        self.directory, self._connection, self._lock = directory, connection, lock
        self.findings_table = FindingsTable(self.execute)

    @classmethod
    def open(cls, directory: Path | str, *, parameters: Mapping[str, Any], resume: bool) -> RunStore:
        """Start a run in a directory, or go on with the one in it.

        parameters: what the answers depend on; a run is resumed only with the same.
        Raises BadInput where the directory holds a run and resume is not asked for, holds none and it is,
        cannot be written, is written by another process, or holds a run of something else.
        """
        directory = Path(directory)
        path = directory / FILE_NAME
        if resume and not path.exists():
            raise BadInput(f"{directory}: holds no {FILE_NAME} to resume; leave --resume out to start one")
        if path.exists() and not resume:
            raise BadInput(f"{directory}: holds a run already; add --resume, or choose another --out")
        return cls._writing(directory, parameters)

    @classmethod
    def change(cls, directory: Path | str) -> RunStore:
        """Open the run of a directory to write to it, whatever it is a run of. Raises BadInput."""
        return cls._writing(_existing(directory), None)

    @classmethod
    def read(cls, directory: Path | str) -> RunStore:
        """Open the run of a directory to read it, also while another process writes. Raises BadInput."""
        directory = _existing(directory)
        path = directory / FILE_NAME
        connection: sqlite3.Connection | None = None
        try:
            connection = _connect(path)
            version = _version_of(connection)
            if version == SCHEMA_VERSION:
                connection.execute("PRAGMA query_only = ON")
                return cls(directory, connection)
            connection.close()
        except sqlite3.Error as error:
            if connection is not None:
                connection.close()
            raise BadInput(f"{path}: is no run store ({error}); name a run's directory") from None
        # An older store must be brought up to date first, which takes the lock.
        cls.change(directory).close()
        return cls.read(directory)

    @classmethod
    def join(cls, directory: Path | str) -> RunStore:
        """Open a run for a runner that its owner started: the owner holds the lock."""
        return cls(_existing(directory), _connect(Path(directory) / FILE_NAME))

    @classmethod
    def _writing(cls, directory: Path, parameters: Mapping[str, Any] | None) -> RunStore:
        path = directory / FILE_NAME
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = RunLock(directory)
        except OSError as error:
            raise BadInput(
                f"{directory}: cannot be written ({error.strerror}); choose another --out"
            ) from None
        try:
            connection = _connect(path)
        except sqlite3.Error as error:
            lock.release()
            raise BadInput(f"{path}: cannot be opened ({error}); choose another --out") from None
        store = cls(directory, connection, lock)
        try:
            given = None if parameters is None else json.loads(json.dumps(plain_numbers(dict(parameters))))
            store._begin(path, given)
        except BaseException:
            store.close()
            raise
        return store

    def _begin(self, path: Path, parameters: dict[str, Any] | None) -> None:
        """Write a new run's parameters, or compare those of the run that is there."""
        try:
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            version = _version_of(self._connection)
            if version is None:
                create(self._connection)
            else:
                migrate(self._connection, version, path)
            before = self.recall("parameters")
        except sqlite3.Error as error:
            if _is_full(error):
                raise self._full(error) from None
            raise BadInput(f"{path}: is no run store ({error}); choose another --out") from None
        if parameters is None:
            return
        if before is None:
            self.remember("parameters", parameters)
            return
        changed = sorted(n for n in {*before, *parameters} if before.get(n) != parameters.get(n))
        if changed:
            raise BadInput(
                f"{path}: is a run of something else: {', '.join(changed)} differ "
                f"(was {before.get(changed[0])!r}, is {parameters.get(changed[0])!r}); choose another --out"
            )

    def execute(self, sql: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        """Run one statement. Raises CannotRun where the disk is full; the store is as it was before."""
        try:
            return self._connection.execute(sql, values)
        except sqlite3.OperationalError as error:
            if not _is_full(error):
                raise
            raise self._full(error) from None

    def _full(self, error: Exception) -> CannotRun:
        return CannotRun(
            f"{self.directory / FILE_NAME}: cannot grow ({error}); nothing that it holds is lost: "
            "make room and go on with --resume"
        )

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is written inside is there, or none of it. Nests: the outermost one counts."""
        if self._connection.in_transaction:
            yield
            return
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.execute("COMMIT")
        except BaseException:
            # A full disk may have ended the transaction by itself.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def remember(self, name: str, value: Any) -> None:
        """Keep a fact about the run."""
        row = (name, json.dumps(plain_numbers(value)))
        self.execute("INSERT OR REPLACE INTO run VALUES (?, ?)", row)

    def recall(self, name: str) -> Any:
        """A fact about the run; None where there is none."""
        row = self.execute("SELECT value FROM run WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def put(self, key: str, *, kernel: str, case: str, verdict: str, seconds: float, document: str) -> None:
        """Keep a result; one of the same key is replaced."""
        self.execute(
            "INSERT OR REPLACE INTO results (key, kernel, case_name, verdict, seconds, document) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (key, kernel, case, verdict, seconds, document),
        )

    def get(self, key: str) -> str | None:
        """The document of a result that was kept."""
        row = self.execute("SELECT document FROM results WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def results(self) -> Iterator[tuple[str, str]]:
        """(key, document) of all results, in the order in which they came."""
        yield from self.execute("SELECT key, document FROM results ORDER BY rowid")

    def put_case(self, case: Case) -> str:
        """Write a case below the run, on the disk before this returns; its path, relative to the run.

        Raises CannotRun where there is no room.
        """
        name = f"{CASES}/{(case.content_hash or hash_of(case))[:HASH_DIGITS]}.safetensors"
        path = self.directory / name
        if path.exists():
            return name
        try:
            write_case(case, path)
            for place in (path, path.parent):
                descriptor = os.open(place, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        except (BadInput, OSError) as error:
            raise CannotRun(f"{path}: {error}; make room and go on with --resume") from None
        return name

    def case_path(self, name: str) -> Path:
        """Where a case file that a row names lies."""
        return self.directory / name

    def add_finding(self, signature: Signature, document: Mapping[str, Any], **columns: Any) -> str:
        """Keep a finding under its signature; seeing it again counts it. Returns the signature's digest.

        columns: further ones of `FindingRow`.
        """
        return self.findings_table.add(signature, document, **columns)

    def change_finding(self, digest: str, **columns: Any) -> None:
        """Change columns of a finding: status, failures, runs, shrunk_file, neighbour_file, document, ..."""
        self.findings_table.change(digest, **columns)

    def finding(self, prefix: str) -> FindingRow:
        """The finding whose signature starts so. Raises BadInput where none or several do."""
        return self.findings_table.find(prefix, str(self.directory))

    def finding_rows(self) -> list[FindingRow]:
        """All findings, in the order in which they came."""
        return list(self.findings_table.all())

    def findings(self) -> Iterator[dict[str, Any]]:
        """All findings: signature, times, and the document."""
        for row in self.finding_rows():
            yield {"signature": row.signature, "times": row.times, **row.document}

    @property
    def lock_descriptor(self) -> int | None:
        """The run's lock, for a child that shares it; None where this process does not hold it."""
        return None if self._lock is None else self._lock.descriptor

    def close(self) -> None:
        self._connection.close()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _existing(directory: Path | str) -> Path:
    directory = Path(directory)
    if not (directory / FILE_NAME).is_file():
        raise BadInput(f"{directory}: holds no {FILE_NAME}; name a run's directory")
    return directory


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None, timeout=BUSY_SECONDS)


def _version_of(connection: sqlite3.Connection) -> int | None:
    """Schema version of a store; None where it has no table yet. Raises sqlite3.Error for another file."""
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    if not tables:
        return None
    row = connection.execute("SELECT value FROM run WHERE name = 'schema_version'").fetchone()
    # Version 1 wrote its tables first and this row next: a run killed in between has no other row.
    return 1 if row is None else int(row[0])


def _is_full(error: Exception) -> bool:
    return any(words in str(error).lower() for words in FULL)

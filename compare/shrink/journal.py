"""The journal of a shrink: enough on disk that a killed one goes on where it was.

The idea: the best case is a file of its own, written whole or not at all; every candidate that was put to the
kernel is one line appended to the journal, an accepted one with its content hash before its file. So after a
kill at any moment the file is one that the journal names, and only the candidate in flight is lost. Passes
are deterministic, so a resumed shrink skips what the journal has and goes on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...capture.casefile import hash_of, read_case, write_case
from ...capture.errors import BadInput, GdncheckError
from .asking import Rate
from .candidate import Candidate

SUFFIX = ".shrink.jsonl"


class Journal:
    """The journal beside an output file; without one it remembers in memory only."""

    def __init__(self, out: Path | None, start: dict[str, Any]) -> None:
        self.out, self.start = out, start
        self.path = None if out is None else out.with_name(out.name + SUFFIX)
        self.tried: set[str] = set()
        self.accepted: list[str] = []
        self._named: dict[str, dict[str, Any]] = {}
        """Content hash -> the accepted line that names it."""
        self.rate: Rate | None = None
        self._file: Any = None

    def open(self) -> None:
        """Read what a killed shrink of the same start left, and write on."""
        if self.path is None:
            return
        lines = self._lines()
        if lines and lines[0] == {"start": self.start}:
            for line in lines[1:]:
                self._take(line)
        else:
            self.path.unlink(missing_ok=True)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new = not self.path.exists()
            self._file = self.path.open("a", encoding="utf-8")
            if self.path.stat().st_size and not self.path.read_text(encoding="utf-8").endswith("\n"):
                self._file.write("\n")  # a line that was cut short stays a line of its own
        except OSError as error:
            raise BadInput(f"{self.path}: cannot be written ({error.strerror}); choose another -o") from None
        if new:
            self._write({"start": self.start})

    def _lines(self) -> list[dict[str, Any]]:
        assert self.path is not None
        if not self.path.exists():
            return []
        found = []
        for text in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                found.append(json.loads(text))
            except ValueError:
                continue  # cut short by a kill
        return found

    def _take(self, line: dict[str, Any]) -> None:
        if "rate" in line:
            self.rate = Rate(failures=line["rate"][0], runs=line["rate"][1])
        if "tried" in line:
            self.tried.add(line["tried"])
        if "settled" in line:
            self._named[line["settled"]["hash"]] = line["settled"]
        if "change" in line:
            self.accepted.append(line["change"])
            self._named[line["hash"]] = line

    def best(self) -> Candidate | None:
        """What a killed shrink had reached; None where its file is not the one that its journal names."""
        if not self._named or self.out is None or not self.out.exists():
            return None
        try:
            case = read_case(self.out)
        except GdncheckError:
            return None
        line = self._named.get(str(case.content_hash))
        if line is None:
            return None
        return Candidate(case=case, deviations=line["deviations"], change=line["change"])

    def note_rate(self, rate: Rate) -> None:
        self._write({"rate": [rate.failures, rate.runs]})

    def reject(self, key: str) -> None:
        """A candidate that does not show the failure."""
        self.tried.add(key)
        self._write({"tried": key})

    def accept(self, candidate: Candidate) -> None:
        """A new best: its line, then its file."""
        self.accepted.append(candidate.change)
        if self.out is None:
            return
        found = hash_of(candidate.case)
        self._write({"hash": found, "deviations": candidate.deviations, "change": candidate.change})
        write_case(candidate.case, self.out)

    def settle(self, candidate: Candidate) -> None:
        """The end's file, with what is known of it in its header."""
        if self.out is None:
            return
        line = {
            "hash": hash_of(candidate.case),
            "deviations": candidate.deviations,
            "change": candidate.change,
        }
        self._write({"settled": line})
        write_case(candidate.case, self.out)

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise BadInput(f"{self.path}: cannot be written ({error.strerror}); make room") from None

    def close(self, *, done: bool) -> None:
        """done: nothing is left to resume, so the journal goes."""
        if self._file is not None:
            self._file.close()
            self._file = None
            if done and self.path is not None:
                self.path.unlink(missing_ok=True)

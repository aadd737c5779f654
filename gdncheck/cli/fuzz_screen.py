"""What a fuzz run shows while it runs: a live table on a terminal, else a line now and then; and a log of
events.

The idea: one object is told everything that happens. stdout is the result's alone, so all of this is on
stderr.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from types import TracebackType
from typing import IO, Any

import click

REFRESH, QUIET = 0.5, 30.0  # seconds between two pictures, and between two plain lines
LOGGED = ("ready", "new", "confirming", "confirmed", "shrinking", "shrunk", "lost", "interrupted", "progress")


class Screen:
    """`with Screen(...) as tell: fuzz(progress=tell)`."""

    def __init__(self, seconds: float | None, cases: int | None, json_lines: str | None) -> None:
        """json_lines: a file that every event but single cases is appended to, one JSON object a line."""
        self.started, self.seconds, self.limit = time.monotonic(), seconds, cases
        self.counts: dict[str, Counter[str]] = {n: Counter() for n in ("kernels", "axes", "verdicts")}
        self.corpus = self.cases = self.survived = self.findings = 0
        self.last_new, self.doing = "none so far", "loading kernels"
        self._log: IO[str] | None = None
        self._path, self._shown, self._recent = json_lines, 0.0, [(self.started, 0)]
        self._live: Any = None

    def __enter__(self) -> Screen:
        if self._path is not None:
            try:
                self._log = open(self._path, "a", encoding="utf-8", buffering=1)
            except OSError as error:
                raise click.UsageError(
                    f"--json-lines {self._path}: cannot be written ({error.strerror})"
                ) from None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), transient=True, auto_refresh=False)
            self._live.start()
        return self

    def __call__(self, event: str, data: dict[str, Any]) -> None:
        if event == "progress":
            self._take(data)
        elif event == "new":
            self.findings += 1
            at = time.monotonic() - self.started
            self.last_new = (
                f"{data['signature']} {data['kernel']} after {duration(at)}: {data['reason'][:80]}"
            )
        words = self._words(event, data)
        if words:
            self.doing = words
            if self._live is None:
                click.echo(words, err=True)
        if self._log is not None and event in LOGGED:
            line = {"at": round(time.time(), 3), "event": event, **data}
            self._log.write(json.dumps(line, default=str) + "\n")
        self._show()

    def _take(self, data: dict[str, Any]) -> None:
        for name, table in self.counts.items():
            table.clear()
            table.update(data[name])
        self.cases, self.corpus, self.survived = data["cases"], data["corpus"], data["survived"]
        self.findings = data["findings"]
        self._recent = [*self._recent[-20:], (time.monotonic(), self.cases)]

    def _words(self, event: str, data: dict[str, Any]) -> str:
        if event == "ready":
            return f"fuzzing {', '.join(data['kernels'])}"
        if event == "new":
            return f"new: {self.last_new}"
        if event == "confirming":
            return f"confirming {data['signature']} ({data['kernel']}) in a fresh process"
        if event == "confirmed":
            return f"{data['signature']}: {data['failures']} of {data['runs']} runs, {data['status']}"
        if event == "shrinking":
            return f"shrinking {data['signature']}: {data['words']}"
        if event == "shrunk":
            return f"{data['signature']}: shrunk to {data['words']}"
        if event == "lost":
            return f"{data['kernel']} is lost: {data['reason']}"
        if event == "interrupted":
            return (
                f"{data['kernel']}: case {data['number']} was in flight when the last run died; not run again"
            )
        return ""

    @property
    def rate(self) -> float:
        """Cases a second lately."""
        (t0, n0), (t1, n1) = self._recent[0], self._recent[-1]
        return (n1 - n0) / (t1 - t0) if t1 > t0 else 0.0

    @property
    def left(self) -> str:
        if self.seconds is not None:
            return duration(max(0.0, self.started + self.seconds - time.monotonic()))
        if self.limit is not None and self.rate:
            return duration(max(0, self.limit - self.cases) / self.rate)
        return "unknown"

    def line(self) -> str:
        """One plain line."""
        return (
            f"{self.cases:,} cases, {self.rate:.1f}/s, corpus {self.corpus:,}, {self.findings} findings, "
            f"{self.survived} errors survived, {self.left} left"
        )

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._shown < (REFRESH if self._live is not None else QUIET):
            return
        first, self._shown = self._shown == 0.0, now
        if self._live is not None:
            self._live.update(self._picture(), refresh=True)
        elif not first:
            click.echo(self.line(), err=True)

    def _picture(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for name, value in (
            ("", self.line()),
            ("last new finding", self.last_new),
            ("kernels", _counted(self.counts["kernels"])),
            ("axes", _counted(self.counts["axes"])),
            ("verdicts", _counted(self.counts["verdicts"])),
            ("now", self.doing),
        ):
            table.add_row(Text(name, style="dim"), Text(value, overflow="ellipsis", no_wrap=True))
        return table

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        if self._log is not None:
            self._log.close()


def _counted(table: Counter[str]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in table.items()) or "-"


def duration(seconds: float) -> str:
    """`42 s`, `12 min`, `7 h 40 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"

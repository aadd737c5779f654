"""Progress on stderr: a bar that appears after two seconds, and only on a terminal.

The idea: short commands print nothing but their result, and stdout never carries progress.
"""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Any

DELAY = 2.0  # seconds


class Progress:
    """`with Progress() as say: say("what is being done")`; `say(text, done, total)` moves the bar."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state: tuple[str, int, int | None] = ("", 0, None)
        self._bar: Any = None
        self._task: Any = None
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            self._timer = threading.Timer(DELAY, self._show)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __call__(self, text: str, done: int = 0, total: int | None = None) -> None:
        with self._lock:
            self._state = (text, done, total)
            if self._bar is not None:
                self._bar.update(self._task, description=text, completed=done, total=total)

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        with self._lock:
            if self._timer is None:
                return
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            text, done, total = self._state
            self._task = self._bar.add_task(text, completed=done, total=total)
            self._bar.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            timer, self._timer = self._timer, None
            bar, self._bar = self._bar, None
        if timer is not None:
            timer.cancel()
        if bar is not None:
            bar.stop()

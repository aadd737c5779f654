"""A runner in a process of its own: `python -m gdncheck.compare.fuzz.runner_process`, orders on stdin.

What it tells goes to stdout, a JSON object a line. It ends when its standard input does: its parent is gone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

import msgspec

from ...capture.errors import GdncheckError
from ..store import RunStore
from .fleet import Orders
from .sitting import sit

# Told for every case: the parent reads those from the store.
QUIET = ("case", "tick")


def _tell(event: str, data: dict[str, Any]) -> None:
    if event not in QUIET:
        sys.stdout.write(json.dumps({"event": event, "data": data}, default=str) + "\n")
        sys.stdout.flush()


def _end_with_parent() -> None:
    """Interrupt this process when its standard input ends; end it where that does not help."""
    # Not through sys.stdin: a thread that holds its lock would spoil the interpreter's end.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10.0)
    os._exit(1)


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(sys.stdin.fileno(), 1 << 16)
        if not data:
            break
        line += data
    return line


def main() -> int:
    """Run as ordered. Exit status 0, 1 after an error that was told, 130 interrupted."""
    orders = msgspec.json.decode(_first_line(), type=Orders)
    sys.path += [entry for entry in orders.search_path if entry not in sys.path]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    deadline = float("inf") if orders.seconds is None else time.monotonic() + orders.seconds
    try:
        with RunStore.join(orders.directory) as store:
            left = sit(
                orders.plan, store, orders.lanes, deadline, _tell, asked=orders.asked, first=orders.first
            )
    except GdncheckError as error:
        _tell("error", {"kind": type(error).__name__, "message": str(error)})
        return 1
    except KeyboardInterrupt:
        return 130
    _tell("end", {"not_covered": left})
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Who may write to a run: a lock on a file in its directory, which the system frees when its holder dies.

The idea: no lock file that a killed run leaves behind, and no process id to be guessed about: `flock` belongs
to the open file, and goes with it. What the file says of its holder is for the message only.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from ..capture.errors import BadInput

LOCK_NAME = "run.lock"


class RunLock:
    """The lock of one run directory, held from here on."""

    def __init__(self, directory: Path) -> None:
        """Take it. Raises BadInput where another process has it, OSError where the file cannot be made."""
        path = directory / LOCK_NAME
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise BadInput(
                f"{directory}: another process writes to this run ({holder or 'unknown'}); "
                "wait for it, or choose another --out"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    @property
    def descriptor(self) -> int:
        return self._descriptor

    def release(self) -> None:
        """Give it back; a second time does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

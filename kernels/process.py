"""One worker process as its parent sees it: started, spoken to, timed, and ended for certain.

The idea: a child may die, hang, be killed for memory or print for ever, at any moment. Every wait here
watches its answers, its output and its life at once and has a deadline; whatever goes wrong ends in one
`WorkerLost` that says what happened in one line, and the whole process group is gone.

Leaves to others: which calls to send and what to do next (`pool`).
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from .protocol import Channel, Close, ConnectionLost, Message

PRINTED_TAIL = 64 * 1024  # bytes kept of what a child printed
STACK_GRACE = 0.5  # seconds a hanging child gets to say where it hangs
EXIT_GRACE = 10.0  # seconds a child gets to exit by itself once its connection is closed
CALL_BACK_LIMIT = 180.0  # seconds for a worker under another program to import torch and call back

# Run instead of `-m` by an interpreter in which gdncheck is not installed: makes the parent's own copy
# importable there, package by package, without putting the parent's site-packages on its path.
BOOTSTRAP = """
import importlib.util, os, runpy, sys
for name, folder in {packages!r}.items():
    spec = importlib.util.spec_from_file_location(
        name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder])
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    if "." in name:
        setattr(sys.modules["gdncheck"], name.partition(".")[2], module)
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""


class WorkerLost(Exception):
    """The worker is gone; `status` and `message` are a RunResult's."""

    def __init__(self, status: Literal["crash", "timeout"], message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def child_command(module: str, python: str | None = None) -> list[str]:
    """Command that runs a module of gdncheck in a child, under any interpreter."""
    if python is None or python == sys.executable:
        return [sys.executable, "-P", "-m", module]
    layers = Path(__file__).resolve().parent.parent
    packages = {"gdncheck": _folder("gdncheck")}
    packages |= {f"gdncheck.{layer}": str(layers / layer) for layer in ("reference", "capture", "kernels")}
    return [python, "-P", "-c", BOOTSTRAP.format(packages=packages, module=module)]


def _folder(package: str) -> str:
    return os.path.dirname(os.path.realpath(sys.modules[package].__file__ or ""))


def child_environment(extra: Mapping[str, str] | None = None, device: str = "auto") -> dict[str, str]:
    """Environment of a child: the parent's, without its current directory on sys.path."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1", **(extra or {})}
    # The interpreter multiplies small tiles with numpy, whose second thread costs more than it computes.
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    if device == "cpu":
        # What asks torch for a GPU must not find one: Triton's interpreter works on CPU tensors.
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


class WorkerProcess:
    """A running child. Ends with `close`, `kill`, garbage collection or the parent's exit."""

    def __init__(
        self,
        python: str | None = None,
        environment: Mapping[str, str] | None = None,
        device: str = "auto",
        wrapper: Sequence[str] = (),
    ) -> None:
        """Start it. wrapper: words of a program that runs the worker's command (compute-sanitizer).

        Raises OSError where the interpreter cannot be started, WorkerLost where the wrapper starts none.
        """
        self._tail = bytearray()
        command = [*wrapper, *child_command("gdncheck.kernels.worker", python)]
        child_env = child_environment(environment, device)
        ours = self._start_wrapped(command, child_env) if wrapper else self._start(command, child_env)
        self.channel = Channel(ours)
        self._finalizer = weakref.finalize(self, _end, self.process, self.channel)

    def _start(self, command: list[str], environment: dict[str, str]) -> socket.socket:
        """Start the worker on one end of a pair of sockets; the other end."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._spawn([*command, str(theirs.fileno())], environment, [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        return ours

    def _spawn(self, command: list[str], environment: dict[str, str], descriptors: list[int]) -> None:
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # what the kernel prints: answers go over the socket
            stderr=subprocess.STDOUT,
            pass_fds=descriptors,
            env=environment,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)

    def _start_wrapped(self, command: list[str], environment: dict[str, str]) -> socket.socket:
        """Start it under another program, which need not hand descriptors on: the worker calls back."""
        with tempfile.TemporaryDirectory(prefix="gdncheck-") as folder, socket.socket(socket.AF_UNIX) as door:
            path = os.path.join(folder, "worker")
            door.bind(path)
            door.listen(1)
            door.settimeout(0.2)
            self._spawn([*command, path], environment, [])
            try:
                return self._called_back(door, os.path.basename(command[0]))
            except BaseException:
                _kill_group(self.process)
                self.process.wait()
                raise

    def _called_back(self, door: socket.socket, wrapper: str) -> socket.socket:
        """The connection that the worker makes. Raises WorkerLost where it never does."""
        end = time.monotonic() + CALL_BACK_LIMIT
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                connection, _ = door.accept()
                connection.settimeout(None)
                return connection
            self._drain()
            status = self.process.poll()
            if status is not None:
                self._drain()
                raise WorkerLost("crash", f"{wrapper}: {describe_end(status, self.printed())}")
        raise WorkerLost("timeout", f"{wrapper} started no worker within {CALL_BACK_LIMIT:g} s; killed")

    def finish(self, limit: float) -> int | None:
        """Have the child exit in order; its exit status, None where that took too long and it was killed."""
        deadline = time.monotonic() + limit
        with contextlib.suppress(ConnectionLost, OSError):
            self.channel.connection.settimeout(limit)
            self.channel.send(Close(), None)
        while self.process.poll() is None and time.monotonic() < deadline:
            self._drain()
            time.sleep(0.02)
        status = self.process.poll()
        self._drain()
        self.kill()
        return status

    @property
    def alive(self) -> bool:
        return self._finalizer.alive and self.process.poll() is None

    def send(self, message: Message, descriptor: int | None, deadline: float) -> None:
        """Send a message and its memory file. Raises WorkerLost."""
        self.channel.connection.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            self.channel.send(message, descriptor)
        except ConnectionLost:
            raise self._lost() from None
        except TimeoutError:
            self.kill()
            raise WorkerLost("timeout", "the worker takes no calls; killed") from None

    def receive(self, deadline: float, limit: float) -> tuple[Message, int | None]:
        """The next message. limit: the seconds that the deadline stands for. Raises WorkerLost."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.channel, selectors.EVENT_READ, "answer")
            assert self.process.stdout is not None
            selector.register(self.process.stdout, selectors.EVENT_READ, "printed")
            with self._life() as life:
                if life is not None:
                    selector.register(life, selectors.EVENT_READ, "end")
                while True:
                    left = deadline - time.monotonic()
                    events = {key.data for key, _ in selector.select(max(min(left, 1.0), 0.0))}
                    if "printed" in events and not self._drain():
                        selector.unregister(self.process.stdout)
                    if "answer" in events:
                        return self._read(deadline)
                    if "end" in events or self.process.poll() is not None:
                        raise self._lost()
                    if left <= 0:
                        raise self._timed_out(limit)

    def _read(self, deadline: float) -> tuple[Message, int | None]:
        self.channel.connection.settimeout(max(deadline - time.monotonic(), 1.0))
        try:
            return self.channel.receive()
        except ConnectionLost:
            raise self._lost() from None
        except TimeoutError:
            self.kill()
            raise WorkerLost("timeout", "the worker stopped in the middle of an answer; killed") from None

    @contextlib.contextmanager
    def _life(self) -> Any:
        """A descriptor that becomes readable when the child ends, where the system has such."""
        if not hasattr(os, "pidfd_open"):
            yield None
            return
        try:
            descriptor = os.pidfd_open(self.process.pid)
        except OSError:
            yield None
            return
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _drain(self) -> bool:
        """Keep the tail of what the child printed; False once it has closed its output."""
        assert self.process.stdout is not None
        # Bounded, so that a child that prints for ever cannot hold us here past the deadline.
        for _ in range(64):
            try:
                data = os.read(self.process.stdout.fileno(), PRINTED_TAIL)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._tail += data
            del self._tail[:-PRINTED_TAIL]
        return True

    def printed(self) -> str:
        """The tail of what the child wrote to stdout and stderr."""
        return self._tail.decode(errors="replace")

    def _lost(self) -> WorkerLost:
        """The child is ending or dead: say how."""
        try:
            status = self.process.wait(EXIT_GRACE)
        except subprocess.TimeoutExpired:
            self.kill()
            return WorkerLost("crash", "the worker closed its connection but did not exit; killed")
        self._drain()
        tail = self.printed()
        self.kill()
        return WorkerLost("crash", describe_end(status, tail))

    def _timed_out(self, limit: float) -> WorkerLost:
        """Ask the child where it hangs, then kill it."""
        before = len(self._tail)
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
            end = time.monotonic() + STACK_GRACE
            while time.monotonic() < end and not stack_place(self.printed()[-PRINTED_TAIL:]):
                time.sleep(0.02)
                self._drain()
        place = stack_place(self.printed()) if len(self._tail) != before else None
        self.kill()
        where = f" in {place}" if place else ""
        return WorkerLost("timeout", f"no result after {limit:g} s; killed{where}")

    def close(self) -> None:
        """Let the child exit by itself, then make sure."""
        self._finalizer()

    def kill(self) -> None:
        """Kill the child and what it started."""
        _kill_group(self.process)
        self._finalizer()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the child's process group; it leads one of its own."""
    if process.returncode is None or _group_exists(process.pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _end(process: subprocess.Popen[bytes], channel: Channel) -> None:
    """Close the connection, which ends an idle child, and kill what is left after a moment."""
    channel.close()
    if process.stdout is not None:
        process.stdout.close()
    _kill_group(process)
    process.wait()


def describe_end(status: int, printed: str) -> str:
    """How a process ended, in one line: the signal's name and, where it said so, the place."""
    place = stack_place(printed)
    where = f" in {place}" if place else ""
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        if name == "SIGKILL":
            return f"killed by SIGKILL, as the system does when memory runs out{where}"
        return f"killed by {name}{where}"
    lines = [line for line in printed.splitlines() if line.strip()]
    said = f": {' '.join(lines[-1].split())[:300]}" if lines else ""
    return f"the worker exited with status {status}{where or said}"


OWN_LINES = (f"kernels{os.sep}worker.py", f"kernels{os.sep}loading.py", f"kernels{os.sep}callable.py")
LIBRARY_FILE = re.compile(r"^<|/lib/python3\.\d+/(?!site-packages/|dist-packages/)")
STACK_LINE = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)


def stack_place(printed: str) -> str | None:
    """`file.py:12 (function)`, the innermost Python line of faulthandler's last stack that is the kernel's.

    Lines of torch and of Python's own library are passed over; None where the kernel has none.
    """
    _, found, stack = printed.rpartition("(most recent call first):\n")
    if not found:
        return None
    for frame in STACK_LINE.finditer(stack):
        if frame["file"].endswith(OWN_LINES):
            break
        if "/torch/" in frame["file"] or LIBRARY_FILE.search(frame["file"]):
            continue
        return f"{os.sep.join(frame['file'].split(os.sep)[-2:])}:{frame['line']} ({frame['function']})"
    return None

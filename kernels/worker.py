"""The child in which kernels run: `PYTHON -m gdncheck.kernels.worker DESCRIPTOR` (or a socket's path).

The idea: everything that a kernel could spoil (the process, its CUDA context, its stdout, its sys.path)
belongs to this process alone. It loads one kernel, answers each call with one message and holds no
judgement: what it says is either the kernel's result or one line about why there is none.

Leaves to others: time limits, signals and restarts (`process`, `pool`), getting the kernel (`loading`).
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..capture.errors import GdncheckError, Refused
from .allocation import fresh_buffers
from .busy import BusyStream
from .distinct import Distinct
from .guard import Guards
from .interface import Adapter, KernelCall
from .loading import Device, load
from .poison import Poison
from .protocol import (
    Channel,
    Close,
    ConnectionLost,
    Finished,
    Open,
    Opened,
    OpenFailed,
    Run,
    mapped_tensors,
    same_bytes,
    share_tensors,
)
from .shared_memory import DirtySharedMemory
from .stepwise import run_stepwise
from .tuning import tuner_account

MESSAGE_LIMIT = 500  # characters; compilers answer in pages


def one_line(text: str, limit: int = MESSAGE_LIMIT) -> str:
    """Text of any length and shape on one line; the middle is left out where it is too long."""
    line = " ".join(text.split())
    if len(line) <= limit:
        return line
    return f"{line[: limit * 2 // 3]} ... {line[-limit // 3 :]}"


def describe_exception(error: BaseException) -> str:
    """`ValueError: what (package/module.py:12 in function)`, on one line.

    The place is the deepest frame outside torch and this worker: the kernel's own line.
    """
    text = one_line(str(error))
    name = type(error).__name__
    head = f"{name}: {text}" if text else name
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen")
    ]  # fmt: skip
    own = [frame for frame in frames if f"{os.sep}torch{os.sep}" not in frame.filename]
    chosen = own or frames
    if not chosen:
        return head
    frame = chosen[-1]
    return f"{head} ({_short(frame.filename)}:{frame.lineno} in {frame.name})"


def _short(filename: str) -> str:
    """A file's path below the directory of sys.path that it was found in."""
    for directory in sorted(filter(None, sys.path), key=len, reverse=True):
        if filename.startswith(directory + os.sep):
            return filename[len(directory) + 1 :]
    return os.sep.join(filename.split(os.sep)[-2:])


def run_call(adapter: Adapter, call: KernelCall, device: Device) -> tuple[Finished, list[Tensor]]:
    """Run one call on copies of its tensors; never raises what the kernel raises."""
    evidence: dict[str, Any] = {}
    try:
        poison = Poison(call.options.poison) if call.options.poison else None
        guards = Guards() if call.options.guard else None
        own = {name: device.own(tensor) for name, tensor in call.tensors.items()}
        if guards is not None:
            own = {name: guards.guarded(f"input {name}", tensor) for name, tensor in own.items()}
        given = msgspec.structs.replace(call, tensors=dict(own))
        # Guards first: they copy a buffer, and the copy is what is to be poisoned.
        handlers = [h for h in (guards, poison) if h is not None]
        busy = BusyStream(device.name) if call.options.busy else None
        shared = DirtySharedMemory(call.options.shared) if call.options.shared else None
        with (
            torch.no_grad(),
            fresh_buffers(handlers),
            tuner_account(call.options, evidence),
            shared or nullcontext(),
        ):
            device.synchronize()
            started = time.perf_counter()
            with busy or nullcontext():
                outputs = run_stepwise(adapter, given) if call.options.stepwise else adapter.run(given)
            device.synchronize()
            seconds = time.perf_counter() - started
        for handler in (poison, guards, busy, shared):
            evidence |= handler.evidence() if handler is not None else {}
        evidence |= getattr(adapter, "evidence", {})
        written = [name for name, tensor in own.items() if not same_bytes(tensor, call.tensors[name])]
        if written:
            evidence["inputs_written"] = written
        _check_outputs(outputs)
        finished = Finished(status="ok", names=list(outputs), seconds=seconds, evidence=evidence)
        return finished, list(outputs.values())
    except Refused as refusal:
        return Finished(status="refused", message=one_line(str(refusal)), evidence=evidence), []
    except BaseException as error:  # a kernel may also call sys.exit
        message = describe_exception(error)
        lost = device.is_cuda and device.is_lost()
        if lost:
            message += "; the CUDA context is lost"
        return Finished(
            status="crash" if lost else "error", message=message, evidence=evidence, lost=lost
        ), []


def _check_outputs(outputs: Any) -> None:
    if not isinstance(outputs, dict):
        raise TypeError(f"the adapter returned {type(outputs).__name__}, not a dict of tensors")
    for name, value in outputs.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is {type(value).__name__}, not a tensor")
        if value.layout != torch.strided or value.is_meta:
            raise TypeError(f"{name} is no ordinary tensor (layout {value.layout}, device {value.device})")


def _answer(channel: Channel, finished: Finished, outputs: list[Tensor], device: Device) -> None:
    """Send a result; one that cannot be copied out (a late CUDA error, no memory) becomes an error."""
    try:
        table, descriptor = share_tensors(outputs)
        message = msgspec.structs.replace(finished, table=table)
    except Exception as error:
        lost = device.is_cuda and device.is_lost()
        message, descriptor = Finished(status="error", message=describe_exception(error), lost=lost), None
    channel.send(message, descriptor)


def serve(channel: Channel) -> None:
    """Load the kernel, then answer calls until the parent closes its end."""
    request, _ = channel.receive()
    assert isinstance(request, Open)
    try:
        adapter, info, device = load(request)
    except GdncheckError as error:
        channel.send(OpenFailed(error=type(error).__name__, message=one_line(str(error))))
        return
    except BaseException as error:
        kind = "CannotRun" if isinstance(error, ImportError) else "BadInput"
        channel.send(OpenFailed(error=kind, message=describe_exception(error)))
        return
    channel.send(Opened(info=info, device=device.name))
    while True:
        request, descriptor = channel.receive()
        if isinstance(request, Close):
            return
        assert isinstance(request, Run)
        table, distinct = mapped_tensors(request.table, descriptor), Distinct()
        for number, wire in enumerate(request.calls):
            tensors = {name: table[index] for name, index in wire.tensors.items()}
            finished, outputs = run_call(adapter, KernelCall(tensors=tensors, options=wire.options), device)
            if wire.options.distinct and finished.status == "ok":
                finished, outputs = _shortened(distinct, number, finished, outputs)
            _answer(channel, finished, outputs, device)
            del outputs
            if finished.lost:
                return
        del table, tensors, distinct


def _shortened(
    distinct: Distinct, number: int, finished: Finished, outputs: list[Tensor]
) -> tuple[Finished, list[Tensor]]:
    """A result without its tensors where an earlier call of the batch returned the same bits."""
    earlier = distinct.same_as(number, finished.names, outputs)
    if earlier is None:
        return finished, outputs
    return msgspec.structs.replace(finished, same_as=earlier), []


def _guard_streams() -> None:
    """Pass on what a kernel prints at once, and show where a crash or a hang is."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Callable[..., None] | None = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True, errors="backslashreplace")
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1, all_threads=False)


def _die_with_parent(connection: socket.socket) -> None:
    """End this process group when the parent is gone, however it went and whatever runs here."""
    poll = select.poll()
    poll.register(connection, 0)  # hang-up is always reported

    def wait() -> None:
        poll.poll()
        if os.getpid() == os.getpgrp():
            os.killpg(0, signal.SIGKILL)  # with what the kernel started
        os._exit(1)

    threading.Thread(target=wait, name="gdncheck-parent-watch", daemon=True).start()


def _connected(where: str) -> socket.socket:
    """The parent's socket: an inherited descriptor, or the path of one, where a wrapper came in between."""
    if where.isdecimal():
        connection = socket.socket(fileno=int(where))
        os.set_inheritable(connection.fileno(), False)
        return connection
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(where)
    return connection


def main() -> None:
    connection = _connected(sys.argv[1])
    sys.argv = [sys.argv[0]]
    _guard_streams()
    _die_with_parent(connection)
    try:
        serve(Channel(connection))
    except ConnectionLost:
        return


if __name__ == "__main__":
    main()

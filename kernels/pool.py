"""The parent's side: open kernels in workers, run batches of calls, get a result for each, whatever happens.

The idea: a result is never lost to another call's fate. When a worker dies or hangs at one call, that
call gets `crash` or `timeout`, those before it keep their results, and those after it run in a fresh
worker. Every kernel has a process of its own, so two versions of one package never meet.

    with WorkerPool(device="cpu") as pool:
        kernel = pool.open("fla.chunk@0.6.0")
        results = kernel.run([KernelCall(tensors=case.tensors)])

Leaves to others: how a process is watched and ended (`process`), names (`registry`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import msgspec
from torch import Tensor

from ..capture import errors
from . import registry
from .interface import KernelCall, KernelInfo, RunResult
from .process import WorkerLost, WorkerProcess
from .protocol import (
    Finished,
    KernelSpec,
    Open,
    Opened,
    OpenFailed,
    Run,
    WireCall,
    mapped_tensors,
    share_tensors,
)

DEFAULT_TIME_LIMIT = 300.0  # seconds for one call, compile included
WRAPPER_GRACE = 60.0  # seconds for the program round a worker to end its account of a lost one
BATCH_BYTES = 2 << 30  # bytes of input tensors sent to a worker at a time


class KernelHandle:
    """An open kernel. Use `run`; `info` is what its worker found."""

    def __init__(
        self,
        spec: KernelSpec,
        *,
        device: str = "auto",
        time_limit: float = DEFAULT_TIME_LIMIT,
        environment: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
    ) -> None:
        """wrapper: words of a program that every worker is run under."""
        self.wrapper = tuple(wrapper)
        self.spec = spec
        self.device = device
        self.time_limit = time_limit
        self.environment = dict(environment or {})
        self.processes_started = 0
        self._info: KernelInfo | None = None
        self._worker: WorkerProcess | None = None
        self._request: Open | None = None

    @property
    def name(self) -> str:
        """Canonical name, e.g. `fla.chunk@0.4.0`."""
        return self.spec.name if self._info is None else self._info.name

    @property
    def info(self) -> KernelInfo:
        """Who the kernel is. Starts a worker if none has loaded it yet; raises BadInput or CannotRun."""
        if self._info is None:
            self._ready()
        assert self._info is not None
        return self._info

    def start(self) -> None:
        """Start a worker and ask it to load the kernel, without waiting for it. Raises CannotRun."""
        request = Open(self.spec, self.device, self._search_path())
        try:
            worker = WorkerProcess(self.spec.python, {**self.environment}, self.device, self.wrapper)
        except WorkerLost as lost:
            raise errors.CannotRun(f"{self.spec.name} cannot be loaded: {lost.message}") from None
        except OSError as error:
            python = self.spec.python or sys.executable
            raise errors.CannotRun(f"{self.spec.name}: cannot start {python} ({error.strerror})") from error
        self.processes_started += 1
        try:
            worker.send(request, None, time.monotonic() + self.time_limit)
        except WorkerLost as lost:
            raise errors.CannotRun(f"{self.spec.name} cannot be loaded: {lost.message}") from None
        except BaseException:
            worker.kill()
            raise
        self._worker, self._request = worker, request

    def _search_path(self) -> tuple[str, ...]:
        """Where a kernel given by import path may lie: where this process finds modules, and here."""
        if not self.spec.by_import_path:
            return ()
        here = os.getcwd()
        if self.spec.python is not None:
            return (here,)
        return (*(os.path.abspath(entry) for entry in sys.path if os.path.isdir(entry)), here)

    def _await_opened(self, limit: float) -> None:
        """Wait until the worker has loaded the kernel. Raises BadInput, CannotRun."""
        worker = self._worker
        assert worker is not None
        try:
            message, _ = worker.receive(time.monotonic() + limit, limit)
        except WorkerLost as lost:
            self._drop()
            raise errors.CannotRun(f"{self.spec.name} cannot be loaded: {lost.message}") from None
        except BaseException:
            self._drop()
            raise
        if isinstance(message, OpenFailed):
            self._drop()
            kind: type[errors.GdncheckError] = getattr(errors, message.error, errors.CannotRun)
            text = message.message
            raise kind(text if self.spec.name in text else f"{self.spec.name}: {text}")
        assert isinstance(message, Opened)
        self._info, self._request = message.info, None

    def run(
        self, calls: Sequence[KernelCall], *, time_limit: float | None = None, fresh_process: bool = False
    ) -> list[RunResult]:
        """Run calls in order and return as many results, in order.

        time_limit: seconds for each call; None: the one that the kernel was opened with.
        fresh_process: give every call a process of its own.
        Raises nothing for what a kernel does; KeyboardInterrupt ends the worker and passes through.
        """
        limit = self.time_limit if time_limit is None else time_limit
        self.info  # noqa: B018  (a kernel that cannot be loaded raises here, before any call)
        results: list[RunResult] = []
        for batch in _batches(calls, 1 if fresh_process else None):
            if fresh_process:
                self._drop()
            done = 0
            while done < len(batch):
                fresh = self._run_some(batch[done:], limit)
                results += fresh
                done += len(fresh)
        if fresh_process:
            self._drop()
        return results

    def _run_some(self, batch: Sequence[KernelCall], limit: float) -> list[RunResult]:
        """Results of the first calls of a batch: all of it, or up to the one that lost the worker."""
        results: list[RunResult] = []
        try:
            self._ready()
            worker = self._worker
            assert worker is not None
            message, descriptor = _shared(batch)
            worker.send(message, descriptor, time.monotonic() + limit)
            while len(results) < len(batch):
                finished, descriptor = worker.receive(time.monotonic() + limit, limit)
                assert isinstance(finished, Finished)
                tensors = mapped_tensors(finished.table, descriptor)
                result = _result(finished, tensors)
                if finished.same_as is not None:
                    # The same tensors, not copies: who holds them sees at once that they are equal.
                    outputs = results[finished.same_as].outputs
                    result = msgspec.structs.replace(result, outputs=outputs)
                results.append(result)
                if finished.lost:
                    # It exits by itself; the program round it has yet to write down why.
                    self.finish(WRAPPER_GRACE if self.wrapper else 0.0)
                    break
        except WorkerLost as lost:
            self._drop()
            results.append(RunResult(status=lost.status, message=lost.message))
        except (errors.GdncheckError, MemoryError) as error:
            # It was loaded before, so this is the call's result and not the caller's mistake.
            results.append(RunResult(status="error", message=str(error)))
        except BaseException:
            self._drop()
            raise
        return results

    def _ready(self) -> None:
        """Make sure that a live worker has the kernel loaded. Raises BadInput, CannotRun."""
        if self._worker is not None and not self._worker.alive:
            self._drop()
        if self._worker is None:
            self.start()
        if self._request is not None:
            self._await_opened(self.time_limit)

    def _drop(self) -> None:
        if self._worker is not None:
            self._worker.kill()
        self._worker = self._request = None

    def finish(self, limit: float) -> int | None:
        """End the worker in order; its exit status, None where there is none or it had to be killed."""
        worker, self._worker, self._request = self._worker, None, None
        return None if worker is None else worker.finish(limit)

    def close(self) -> None:
        """End the worker; a later call would start another."""
        self._drop()


def _batches(calls: Sequence[KernelCall], size: int | None) -> Iterator[list[KernelCall]]:
    """Calls in order, grouped so that one group's distinct tensors stay within BATCH_BYTES (or one call)."""
    batch: list[KernelCall] = []
    seen: dict[int, int] = {}
    for call in calls:
        new = {id(t): t.numel() * t.element_size() for t in call.tensors.values() if id(t) not in seen}
        full = len(batch) == size or sum(seen.values()) + sum(new.values()) > BATCH_BYTES
        if batch and full:
            yield batch
            batch, seen = [], {}
            new = {id(t): t.numel() * t.element_size() for t in call.tensors.values()}
        batch.append(call)
        seen |= new
    if batch:
        yield batch


def _shared(batch: Sequence[KernelCall]) -> tuple[Run, int | None]:
    """The message for a batch; a tensor that several calls use is copied once."""
    numbers: dict[int, int] = {}
    distinct: list[Tensor] = []
    wires = []
    for call in batch:
        for tensor in call.tensors.values():
            if id(tensor) not in numbers:
                numbers[id(tensor)] = len(distinct)
                distinct.append(tensor)
        wires.append(WireCall({name: numbers[id(t)] for name, t in call.tensors.items()}, call.options))
    table, descriptor = share_tensors(distinct)
    return Run(table, wires), descriptor


def _result(finished: Finished, tensors: list[Tensor]) -> RunResult:
    return RunResult(
        status=cast(Any, finished.status),
        outputs=dict(zip(finished.names, tensors, strict=False)),
        seconds=finished.seconds,
        message=finished.message,
        evidence=finished.evidence,
    )


class WorkerPool:
    """Open kernels, one process each; leaving the `with` block ends them all, however it is left."""

    def __init__(
        self,
        *,
        device: str = "auto",
        time_limit: float = DEFAULT_TIME_LIMIT,
        cache_dir: Path | str | None = None,
        sources: Mapping[str, str] | None = None,
    ) -> None:
        """device: auto, cpu or cuda, where `open` gets none. sources: family -> clone, for `@git:REV`."""
        self.device = device
        self.time_limit = time_limit
        self.cache_dir = cache_dir
        self.sources = sources
        self._handles: list[KernelHandle] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self, kernel: str | KernelSpec, **options: Any) -> KernelHandle:
        """Load a kernel in a worker of its own and wait until it is there.

        options: device, time_limit, environment, wrapper (see KernelHandle), for this kernel only.
        Raises BadInput for a wrong name or a module that cannot be loaded, CannotRun where its package,
        its version or the device is missing.
        """
        return self.open_all([kernel], **options)[0]

    def open_all(self, kernels: Sequence[str | KernelSpec], **options: Any) -> list[KernelHandle]:
        """Load several kernels at once; the first that cannot be loaded raises, as `open` does."""
        opened = [self.begin(kernel, **options) for kernel in kernels]
        for handle in opened:
            handle.info  # noqa: B018  (waits)
        return opened

    def begin(self, kernel: str | KernelSpec, **options: Any) -> KernelHandle:
        """Start loading a kernel without waiting; `handle.info` waits and raises."""
        spec = kernel
        if isinstance(spec, str):
            spec = registry.resolve(spec, cache_dir=self.cache_dir, sources=self.sources)
        handle = KernelHandle(spec, **{"device": self.device, "time_limit": self.time_limit, **options})
        self._handles.append(handle)
        handle.start()
        return handle

    def close(self) -> None:
        """End every worker."""
        for handle in self._handles:
            handle.close()
        self._handles.clear()

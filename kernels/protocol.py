"""What a parent and a worker say to each other: framed msgpack messages, tensors in anonymous shared memory.

The idea: a message's tensors lie in one memory file that has no name. Its descriptor travels with the
message over a Unix socket, so whichever side is killed, and whenever, the kernel frees the memory: there
is no segment to leak and no clean-up that could be missed. Bytes are copied, never converted, so NaN
payloads and signed zeros arrive as they were sent.

Leaves to others: what a worker does with a call (`worker`), when it is given up (`process`).
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from .interface import KernelInfo, RunOptions

ALIGNMENT = 64  # bytes: a cache line, and more than any dtype needs
LARGE = 64 << 20  # bytes: below this it is not worth asking how much memory there is
HEADER = struct.Struct("<QB")  # length of the payload, number of descriptors that come along


class KernelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Where a kernel comes from: all that a worker needs to load it."""

    name: str
    """Canonical name, `fla.chunk@0.4.0` or `package.module:function`."""
    module: str
    """Module to import: one that has KERNELS, or the user's."""
    attribute: str
    """Key of KERNELS, or the (dotted) name of the user's function."""
    by_import_path: bool = False
    op: str = "rule"
    """What a function given by import path computes (`ops.signature`)."""
    version: str | None = None
    python: str | None = None
    """Interpreter that runs the worker; None: the parent's."""
    sys_path: tuple[str, ...] = ()
    """Directories that go first on the worker's sys.path (a version cache, a working tree)."""
    environment: dict[str, str] = {}


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor in a message's memory file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""


class WireCall(msgspec.Struct, frozen=True):
    """A call whose tensors are numbers into the message's table, so that repeats share them."""

    tensors: dict[str, int]
    options: RunOptions


class Open(msgspec.Struct, frozen=True, tag=True):
    """Parent to worker, first: load this kernel."""

    kernel: KernelSpec
    device: str
    search_path: tuple[str, ...] = ()
    """Directories where a kernel given by import path may lie; searched after everything else."""


class Opened(msgspec.Struct, frozen=True, tag=True):
    """Worker to parent: it is loaded."""

    info: KernelInfo
    device: str


class OpenFailed(msgspec.Struct, frozen=True, tag=True):
    """Worker to parent: it cannot be loaded; `error` names the class in capture/errors.py."""

    error: str
    message: str


class Run(msgspec.Struct, frozen=True, tag=True):
    """Parent to worker: run these calls in order, answering each with one Finished."""

    table: list[TensorEntry]
    calls: list[WireCall]


class Finished(msgspec.Struct, frozen=True, tag=True):
    """Worker to parent: one call's result, in the words of `RunResult`."""

    status: str
    table: list[TensorEntry] = []
    names: list[str] = []
    seconds: float | None = None
    message: str | None = None
    evidence: dict[str, Any] = {}
    lost: bool = False
    """The worker must not be used again (a CUDA error that sticks to the context)."""
    same_as: int | None = None
    """Number of an earlier call of the batch whose outputs have the same bits; no tensors come then."""


class Close(msgspec.Struct, frozen=True, tag=True):
    """Parent to worker: exit in order, so that a tool round the worker can finish its account."""


Message = Open | Opened | OpenFailed | Run | Finished | Close


class ConnectionLost(Exception):
    """The other side closed its end, or died."""


def share_tensors(tensors: Sequence[Tensor]) -> tuple[list[TensorEntry], int | None]:
    """Copy tensors, from any device, into one new memory file.

    Returns the table and the file's descriptor, which the caller closes; None where there is no byte
    to share. Raises MemoryError where the machine has no room for it.
    """
    table, size = [], 0
    for tensor in tensors:
        table.append(TensorEntry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), size))
        n_bytes = tensor.numel() * tensor.element_size()
        size += -(-n_bytes // ALIGNMENT) * ALIGNMENT
    if size == 0:
        return table, None
    descriptor = _memory_file(size)
    try:
        with mmap.mmap(descriptor, size) as memory:
            for entry, tensor in zip(table, tensors, strict=True):
                _copy_in(memory, entry, tensor)
    except BaseException:
        os.close(descriptor)
        raise
    return table, descriptor


def mapped_tensors(table: Sequence[TensorEntry], descriptor: int | None) -> list[Tensor]:
    """The tensors of a received memory file, without a copy; closes the descriptor.

    The memory stays as long as one of the tensors does.
    """
    memory = None
    if descriptor is not None:
        try:
            memory = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
    tensors = []
    for entry in table:
        dtype = getattr(torch, entry.dtype)
        count = 1
        for extent in entry.shape:
            count *= extent
        if count == 0:
            tensors.append(torch.empty(entry.shape, dtype=dtype))
        else:
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=entry.offset)
            tensors.append(flat.view(entry.shape))
    return tensors


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, flat uint8, on its device."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def copy_bytes(target: Tensor, source: Tensor) -> None:
    """Copy the bytes of a tensor into a contiguous one on the CPU, of the same size.

    Through numpy, on this thread alone: torch would wake all its threads for every copy of some size,
    which costs more than the copy where the machine is busy (measured: 20 ms against 0.1 ms per call).
    """
    if source.numel():
        as_bytes(target).numpy()[...] = as_bytes(source).cpu().numpy()


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Have two tensors the same shape, dtype and bytes; compared where `a` is."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_cuda:
        return torch.equal(as_bytes(a), as_bytes(b).to(a.device))
    return bool((as_bytes(a).numpy() == as_bytes(b).numpy()).all())


def _copy_in(memory: mmap.mmap, entry: TensorEntry, tensor: Tensor) -> None:
    n_bytes = tensor.numel() * tensor.element_size()
    if n_bytes:
        place = torch.frombuffer(memory, dtype=torch.uint8, count=n_bytes, offset=entry.offset)
        copy_bytes(place, tensor)


def _memory_file(size: int) -> int:
    """A new file of `size` bytes in memory that has no name."""
    if size > LARGE and size > _available_memory():
        # The system would hand out pages until it kills somebody; a file in memory has no limit of its own.
        raise MemoryError(f"no room for {size} bytes of shared memory")
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("gdncheck", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        if hasattr(os, "posix_fallocate"):
            # Allocating now turns "no memory" into an error here instead of a SIGBUS while copying.
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.ftruncate(descriptor, size)
    except OSError as error:
        os.close(descriptor)
        raise MemoryError(f"no room for {size} bytes of shared memory ({error.strerror})") from error
    return descriptor


def _available_memory() -> int:
    """Bytes that can still be used without pushing anything out; a large number where nobody tells."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return sys.maxsize


class Channel:
    """One end of the socket between a parent and a worker."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._encoder = msgspec.msgpack.Encoder(enc_hook=repr)
        self._decoder = msgspec.msgpack.Decoder(Message)

    def fileno(self) -> int:
        return self.connection.fileno()

    def close(self) -> None:
        self.connection.close()

    def send(self, message: Message, descriptor: int | None = None) -> None:
        """Send a message and its memory file, closing the descriptor. Raises ConnectionLost, TimeoutError."""
        try:
            payload = self._encoder.encode(message)
            descriptors = [] if descriptor is None else [descriptor]
            header = HEADER.pack(len(payload), len(descriptors))
            sent = socket.send_fds(self.connection, [header], descriptors)
            self.connection.sendall(header[sent:] + payload)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ConnectionLost from error
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def receive(self) -> tuple[Message, int | None]:
        """The next message and its memory file's descriptor. Raises ConnectionLost, TimeoutError."""
        header, descriptors = b"", []
        try:
            while len(header) < HEADER.size:
                data, received, _, _ = socket.recv_fds(self.connection, HEADER.size - len(header), 1)
                descriptors += received
                if not data:
                    raise ConnectionLost
                header += data
            length, n_descriptors = HEADER.unpack(header)
            message = self._decoder.decode(self._read(length))
        except BaseException as error:
            for descriptor in descriptors:
                os.close(descriptor)
            if isinstance(error, ConnectionResetError):
                raise ConnectionLost from error
            raise
        assert len(descriptors) == n_descriptors
        return message, descriptors[0] if descriptors else None

    def _read(self, length: int) -> bytearray:
        payload = bytearray(length)
        view, done = memoryview(payload), 0
        while done < length:
            n_bytes = self.connection.recv_into(view[done:])
            if n_bytes == 0:
                raise ConnectionLost
            done += n_bytes
        return payload

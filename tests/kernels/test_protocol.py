"""Tensors through shared memory keep their bytes; a torn connection is an error and not a message."""

from __future__ import annotations

import os
import socket

import msgspec
import pytest
import torch
from gdncheck.kernels import protocol
from gdncheck.kernels.interface import RunOptions
from gdncheck.kernels.protocol import (
    Channel,
    ConnectionLost,
    Finished,
    Run,
    WireCall,
    as_bytes,
    mapped_tensors,
    share_tensors,
)
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.bool]


@st.composite
def any_tensor(draw):
    """A tensor of any dtype and shape, zero-size and 0-dimensional ones and strided views among them."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = torch.empty(shape, dtype=dtype).nbytes
    if dtype == torch.bool:
        tensor = torch.randint(0, 2, shape, generator=generator).bool()
    else:
        raw = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
        tensor = raw.view(dtype).reshape(shape)
    if tensor.dim() > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, -1)
    return tensor


@settings(max_examples=60, deadline=None)
@given(st.lists(any_tensor(), max_size=5))
def test_a_tensor_changes_in_shared_memory(tensors):
    table, descriptor = share_tensors(tensors)
    for sent, received in zip(tensors, mapped_tensors(table, descriptor), strict=True):
        assert received.dtype == sent.dtype
        assert received.shape == sent.shape
        assert torch.equal(as_bytes(received), as_bytes(sent))


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
def test_shared_memory_or_descriptors_leak():
    before, segments = open_descriptors(), set(os.listdir("/dev/shm"))
    for _ in range(20):
        table, descriptor = share_tensors([torch.ones(1000)])
        received = mapped_tensors(table, descriptor)
        assert set(os.listdir("/dev/shm")) == segments, "the memory has a name that could be left behind"
        del received
    with pytest.raises(RuntimeError):
        share_tensors([torch.ones(4), torch.ones(3, device="meta")])
    assert open_descriptors() == before


@pytest.mark.parametrize("available", [0, protocol.LARGE])
def test_memory_that_the_machine_does_not_have_is_asked_for(monkeypatch, available):
    """Refused before a byte is allocated; no file can be made here, so a miss cannot fill the memory."""
    asked = []
    monkeypatch.setattr(protocol, "_available_memory", lambda: available)
    monkeypatch.setattr(os, "memfd_create", lambda *_: asked.append("memory") or pytest.fail("asked for it"))
    with pytest.raises(MemoryError, match="shared memory"):
        share_tensors([torch.empty(1).expand(protocol.LARGE)])
    assert asked == []


def test_memory_that_the_machine_has_is_refused(monkeypatch):
    monkeypatch.setattr(protocol, "LARGE", 1000)
    monkeypatch.setattr(protocol, "_available_memory", lambda: 10_000)
    table, descriptor = share_tensors([torch.ones(500)])
    assert torch.equal(mapped_tensors(table, descriptor)[0], torch.ones(500))


def pair():
    ours, theirs = socket.socketpair()
    return Channel(ours), Channel(theirs)


def test_a_message_and_its_memory_do_not_arrive_together():
    ours, theirs = pair()
    for n in (3, 0, 5):
        table, descriptor = share_tensors([torch.full((n,), float(n))])
        calls = [WireCall({"v": 0}, RunOptions(extra={"n": n, "text": "é"}))]
        ours.send(Run(table, calls), descriptor)
    for n in (3, 0, 5):
        message, descriptor = theirs.receive()
        assert message.calls[0].options.extra == {"n": n, "text": "é"}
        assert torch.equal(mapped_tensors(message.table, descriptor)[0], torch.full((n,), float(n)))


def test_evidence_that_msgpack_cannot_hold_stops_a_result():
    ours, theirs = pair()
    ours.send(Finished(status="ok", evidence={"configuration": object, "shape": torch.Size([2])}))
    message, _ = theirs.receive()
    assert message.evidence["shape"] == [2]
    assert "object" in message.evidence["configuration"]


@pytest.mark.parametrize("kept", range(0, 30, 7))
def test_a_message_that_is_cut_short_is_taken_for_one(kept):
    ours, theirs = pair()
    ours.send(Finished(status="ok", message="a message of some length"))
    whole = theirs.connection.recv(4096)
    assert kept < len(whole)
    ours.connection.sendall(whole[:kept])
    ours.close()
    with pytest.raises(ConnectionLost):
        theirs.receive()


def test_garbage_is_taken_for_a_message():
    ours, theirs = pair()
    ours.connection.sendall((8).to_bytes(8, "little") + b"\0" + b"garbage!")
    with pytest.raises(msgspec.DecodeError):
        theirs.receive()

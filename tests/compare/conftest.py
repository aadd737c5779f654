"""Doubles for the verdict's tests: a kernel by function, run in this process instead of a worker."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from gdncheck.capture.make import make
from gdncheck.compare.session import Settings, diff_one
from gdncheck.compare.soundness import soundness_of
from gdncheck.compare.witness import Witness
from gdncheck.kernels.callable import CallableAdapter, read_capabilities
from gdncheck.kernels.interface import RunResult
from gdncheck.reference.emulation import emulate_chunk
from gdncheck.reference.emulation_recurrent import emulate_recurrent


class InProcess:
    """A runner as `session` sees it, without a process; counts its calls."""

    def __init__(self, function, capabilities=None):
        self.adapter = CallableAdapter("kernel", function, read_capabilities(capabilities, "kernel"))
        self.calls = []

    @property
    def info(self):
        return self.adapter.describe()

    def run(self, calls):
        results = []
        for call in calls:
            self.calls.append(call)
            own = {name: tensor.clone() for name, tensor in call.tensors.items()}
            try:
                outputs = self.adapter.run(type(call)(tensors=own, options=call.options))
                results.append(RunResult(status="ok", outputs=outputs, seconds=0.0))
            except Exception as error:
                results.append(RunResult(status="error", message=repr(error)))
        return results


def chunk_bf16(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens, **options):
    """An honest chunk kernel that rounds as flash-linear-attention does."""
    result = emulate_chunk(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, **options
    )
    return result.output.to(v.dtype), result.final_state.float()


def recurrent_fp32(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
    """An honest float32 recurrence that rounds only its output."""
    result = emulate_recurrent(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens
    )
    return result.output.to(v.dtype), result.final_state.float()


@pytest.fixture(scope="session")
def honest():
    """The sound kernels: `chunk` (rounds every operand) and `recurrent` (float32, rounds the output)."""
    return SimpleNamespace(chunk=chunk_bf16, recurrent=recurrent_fp32)


@pytest.fixture(scope="session")
def case_of():
    """make('qwen', ...) with small defaults."""

    def build(family="qwen", **options):
        shape = {"lengths": [70, 1, 130], "k_heads": 1, "v_heads": 2, "dims": (32, 32), "state": "random"}
        return make(family, **{**shape, **options})

    return build


@pytest.fixture(scope="session")
def verdict_on():
    """verdict_on(function, case, ...) -> DiffResult, with the whole of `session` and `judge` in between."""

    def judge(function, case, *, capabilities=None, runner=None, **settings):
        witness = Witness(case)
        chosen = {"relations": "all", **settings}
        return diff_one(
            runner or InProcess(function, capabilities), witness, soundness_of(witness), Settings(**chosen)
        )

    return judge


@pytest.fixture(scope="session")
def in_process():
    return InProcess


@pytest.fixture(scope="session")
def as_rule():
    """Give a function of (q, k, v, g, beta, **options) the signature of a kernel by import path."""

    def wrap(function):
        def rule(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
            options = {"scale": scale, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
            return function(q, k, v, g, beta, output_final_state=output_final_state, **options)

        return rule

    return wrap

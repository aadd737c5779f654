"""Adapters for transformers' own torch code: `transformers.chunk` and `transformers.recurrent`.

The idea: it is the control that people compare engines with, so the very function is run, and only it.
Recent versions (5.24) bind the model's name for it to fla's kernel where fla is installed; the wrapper
is taken off here, or the control would be the suspect. It knows no packed sequences: the adapter calls
it once per sequence, each as a batch of one, and says so in the evidence.

Leaves to others: layouts and refusals in common (`layouts`), its contract (`contracts_fla`).
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import msgspec
import torch
from torch import Tensor

from ..capture.errors import CannotRun, Refused
from . import layouts
from .contract import Capabilities, Contract
from .interface import KernelCall, KernelInfo, RunOptions

# Any of the models has the same functions; the first that the installed version has is taken.
MODELS = ("qwen3_5_moe", "qwen3_next", "qwen3_5")


class TransformersKernel:
    """What both functions share."""

    op: ClassVar[str]
    function_name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    package: ClassVar[str] = "transformers"

    def __init__(self, version: str | None = None) -> None:
        """version: the version of transformers that must be found; None takes the installed one."""
        import transformers

        self.version: str = transformers.__version__
        if version is not None and self.version != version:
            raise CannotRun(f"transformers {version} was asked for but sys.path leads to {self.version}")
        self.function, self.found_in, wrapped = torch_function(self.function_name)
        self.parameters = inspect.signature(self.function).parameters
        # 5.7 leaves the expansion of heads to the layer; later versions do it in the function.
        self.expands_heads = "num_v_heads" in self.function.__code__.co_varnames
        self.evidence: dict[str, Any] = {}
        self._facts = {
            "backend": "torch",
            "function": f"{self.found_in}.{self.function_name}",
            "unwrapped": wrapped,
        }

    @classmethod
    def contract_for(cls, version: str | None, chunk_size: int = 64) -> Contract:
        """The contract of this function at a version (data only)."""
        from .contracts_fla import contract_for

        return contract_for(f"transformers.{cls.op}", version, chunk_size)

    def describe(self) -> KernelInfo:
        """Who this is: version, capabilities of that version, contract."""
        contract = self.contract_for(self.version)
        capabilities = msgspec.structs.replace(
            self.capabilities,
            gva=self.expands_heads,
            profile=contract.value("precision.profile"),
            clauses=contract.clauses,
        )
        return KernelInfo(
            name=f"transformers.{self.op}@{self.version}",
            version=self.version,
            capabilities=capabilities,
            contract=contract,
            environment=dict(self._facts),
        )

    def run(self, call: KernelCall) -> dict[str, Tensor]:
        """One call: `output` [T, HV, V] in q's dtype, `final_state` [N, HV, K, V], float32 unless asked.

        Raises Refused for what the function cannot be given.
        """
        t, options = call.tensors, call.options
        factor = self._check(t, options)
        offsets = t["cu_seqlens"].tolist()
        state = layouts.gathered_state(t)
        if state is not None and options.state_dtype is not None:
            state = state.to(layouts.DTYPES[options.state_dtype])
        self.evidence = {**self._facts, "calls": 0, "packing": "one call per sequence"}
        outputs, states = [], []
        for n, (start, end) in enumerate(itertools.pairwise(offsets)):
            given = None if state is None else state[n : n + 1]
            output, final = self._one(t, options, start, end, given)
            outputs.append(output if factor == 1.0 else output * factor)
            states.append(final)
        result = {"output": torch.cat(outputs) if outputs else torch.empty_like(t["v"])}
        if options.output_final_state and states:
            wanted = options.state_dtype
            final = torch.cat(states)
            result["final_state"] = final if wanted is None else final.to(layouts.DTYPES[wanted])
        return result

    def _one(
        self, t: dict[str, Tensor], options: RunOptions, start: int, end: int, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """One sequence; an empty one is not passed to the function (it divides the length into chunks)."""
        n_heads, value_dim = t["v"].shape[1:]
        if start == end:
            shape = (1, n_heads, t["k"].shape[-1], value_dim)
            kept = torch.zeros(shape, device=t["v"].device) if state is None else state.float()
            return t["v"][start:end], kept
        q, k = t["q"][start:end], t["k"][start:end]
        in_kernel = options.qk == "raw" and options.l2norm != "before"
        if options.qk == "raw" and not in_kernel:
            q, k = layouts.l2norm_rounded(q), layouts.l2norm_rounded(k)
        if not self.expands_heads:
            q, k = layouts.expand_heads(q, n_heads), layouts.expand_heads(k, n_heads)
        keywords: dict[str, Any] = {
            "query": q,
            "key": k,
            "value": t["v"][start:end],
            "g": t["g"][start:end],
            "beta": t["beta"][start:end],
        }
        keywords = {name: layouts.add_batch(value) for name, value in keywords.items()}
        keywords["initial_state"] = state
        keywords["output_final_state"] = True
        keywords["use_qk_l2norm_in_kernel"] = in_kernel
        if options.chunk_size is not None:
            keywords["chunk_size"] = options.chunk_size
        self.evidence["calls"] += 1
        output, final = self.function(**keywords)
        return layouts.drop_batch(output), final.float()

    def _check(self, t: dict[str, Tensor], options: RunOptions) -> float:
        """Refuse what lies outside; returns the factor from the function's own scale to the call's."""
        if t["g"].dim() == 3:
            raise Refused("g is per key channel [T, HV, K]; this function takes one decay per head [T, HV]")
        n_key, n_value = t["q"].shape[1], t["v"].shape[1]
        if n_key == 0 or n_value % n_key:
            raise Refused(f"{n_value} value heads cannot share {n_key} key heads evenly")
        if options.chunk_size is not None and "chunk_size" not in self.parameters:
            raise Refused(f"chunk size {options.chunk_size}: {self.function_name} has no chunks")
        if options.chunk_size is not None and options.chunk_size not in self.capabilities.chunk_sizes:
            raise Refused(f"chunk size {options.chunk_size} is none of {self.capabilities.chunk_sizes}")
        if options.state_dtype not in (None, *self.capabilities.state_dtypes):
            raise Refused(
                f"state dtype {options.state_dtype} is none of {', '.join(self.capabilities.state_dtypes)}"
            )
        own_scale = t["q"].shape[-1] ** -0.5
        wanted = own_scale if options.scale is None else options.scale
        factor = layouts.power_of_two_ratio(wanted, own_scale)
        if factor is None:
            raise Refused(f"scale {wanted:g}: the function always scales by K**-0.5 = {own_scale:g}")
        return factor


class TransformersChunk(TransformersKernel):
    """`torch_chunk_gated_delta_rule`: prefill, in float32 whatever the inputs."""

    op = "chunk"
    function_name = "torch_chunk_gated_delta_rule"
    capabilities = Capabilities(
        chunk_sizes=(16, 32, 64, 128),
        varlen=False,
        l2norm="both",
        state_dtypes=("float32", "bfloat16", "float16"),
    )


class TransformersRecurrent(TransformersKernel):
    """`torch_recurrent_gated_delta_rule`: decode, token by token in float32."""

    op = "recurrent"
    function_name = "torch_recurrent_gated_delta_rule"
    capabilities = Capabilities(
        default_chunk_size=None,
        varlen=False,
        l2norm="both",
        state_dtypes=("float32", "bfloat16", "float16"),
    )


def torch_function(name: str) -> tuple[Any, str, bool]:
    """The torch implementation of that name, the module it is from, and whether a wrapper was taken off.

    Raises CannotRun where the installed transformers has no Gated DeltaNet model.
    """
    for model in MODELS:
        module_name = f"transformers.models.{model}.modeling_{model}"
        try:
            with _without_fla():
                module = importlib.import_module(module_name)
            outer = getattr(module, name)
        except (ImportError, AttributeError):
            continue
        inner = inspect.unwrap(outer)
        if inner.__code__.co_name != name or inner.__module__ != module_name:
            raise CannotRun(
                f"{module_name}.{name} is {inner.__module__}.{inner.__code__.co_name}, not torch's"
            )
        return inner, module_name, inner is not outer
    raise CannotRun(
        f"the installed transformers has no {name} in {', '.join(MODELS)}; pip install 'transformers>=5.7'"
    )


@contextmanager
def _without_fla() -> Iterator[None]:
    """While a model's module is imported, fla counts as not installed: importing it takes seconds."""
    if "fla" in sys.modules:
        yield
        return
    sys.modules["fla"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["fla"]


KERNELS = {"chunk": TransformersChunk, "recurrent": TransformersRecurrent}

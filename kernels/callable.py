"""A kernel under test that is any Python callable, by import path `module:function`.

The idea: the user's function has the signature of the rule in the canonical layout,

    f(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens) -> (o, final_state)

with q, k [T, HK, K] already l2-normalised and rounded to their dtype, v [T, HV, V], g [T, HV] natural
log, beta [T, HV], states [N, HV, K, V]. Other keywords (chunk_size, pool, slot_indices, ...) are passed
only if the function names them; `gdncheck_capabilities`, on the function or its module, tells what
differs, and each difference is one explicit conversion below.

Leaves to others: calling it in a child (`worker`), judging what it returns (compare).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..capture.columns import start_slots
from ..capture.errors import BadInput, Refused
from .contract import Capabilities, Contract
from .interface import Adapter, KernelCall, KernelInfo
from .protocol import KernelSpec

SIGNATURE = "f(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens) -> (o, final_state)"
REQUIRED_KEYWORDS = ("scale", "initial_state", "output_final_state", "cu_seqlens")
L2NORM_EPS = 1e-6  # inside the root, as in design section 3
SLOT_KEYWORDS = ("pool", "slot_indices", "has_initial_state")
# Those that a function may name without a default; a call that lacks one is refused.
KNOWN_KEYWORDS = (*SLOT_KEYWORDS, "chunk_size", "use_qk_l2norm_in_kernel", "draft", "num_accepted")


def load_callable(spec: KernelSpec) -> Adapter:
    """Import the user's function, of the rule or of another operation.

    Raises BadInput that names what is missing; its own errors pass through.
    """
    try:
        module = import_module(spec.module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{spec.module}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise BadInput(
            f"kernel {spec.name}: no module {error.name} is found; run where it lies, or set PYTHONPATH"
        ) from error
    function: Any = module
    for part in spec.attribute.split("."):
        if not hasattr(function, part):
            raise BadInput(f"kernel {spec.name}: {spec.module} ({module.__file__}) has no {spec.attribute}")
        function = getattr(function, part)
    if not callable(function):
        raise BadInput(f"kernel {spec.name} is {type(function).__name__}, not a function {SIGNATURE}")
    declared = getattr(function, "gdncheck_capabilities", None)
    if declared is None:
        declared = getattr(module, "gdncheck_capabilities", None)
    capabilities = read_capabilities(declared, spec.name)
    if spec.op != "rule":
        from .ops.callable import OpCallable

        return OpCallable(spec.name, spec.op, function, capabilities)
    return CallableAdapter(spec.name, function, capabilities)


def read_capabilities(declared: Any, name: str) -> Capabilities:
    """Check a `gdncheck_capabilities`: None, Capabilities, or a dict of its fields.

    Raises BadInput with the unknown keys, or the key whose value has the wrong type.
    """
    if declared is None:
        return Capabilities()
    if isinstance(declared, Capabilities):
        return declared
    if not isinstance(declared, dict):
        raise BadInput(f"{name}: gdncheck_capabilities is {type(declared).__name__}; give a dict")
    fields = Capabilities.__struct_fields__
    unknown = sorted(str(key) for key in declared if key not in fields)
    if unknown:
        keys = ", ".join(unknown)
        raise BadInput(
            f"{name}: gdncheck_capabilities has unknown keys {keys}; known are {', '.join(fields)}"
        )
    try:
        return msgspec.convert(declared, Capabilities)
    except msgspec.ValidationError as error:
        raise BadInput(f"{name}: gdncheck_capabilities: {error}") from error


class CallableAdapter:
    """The user's function as a worker sees it."""

    def __init__(self, name: str, function: Callable[..., Any], capabilities: Capabilities) -> None:
        self.name = name
        self.function = function
        self.named, self.demanded = _named_keywords(name, function)
        if capabilities.l2norm == "both" and "use_qk_l2norm_in_kernel" not in self.named:
            # It cannot be told which of the two is wanted, so it always gets them normalised.
            capabilities = msgspec.structs.replace(capabilities, l2norm="before")
        self.capabilities = capabilities
        self.evidence: dict[str, Any] = {}

    def describe(self) -> KernelInfo:
        contract = Contract(kernel=self.name, clauses=self.capabilities.clauses)
        return KernelInfo(name=self.name, capabilities=self.capabilities, contract=contract)

    def run(self, call: KernelCall) -> dict[str, Tensor]:
        """Convert, call, check, convert back. Raises Refused outside the capabilities."""
        self._refuse(call)
        lengths = call.tensors["cu_seqlens"].diff().tolist()
        if self.capabilities.varlen or len(lengths) == 1:
            return self._run_packed(call)
        return self._run_each(call, len(lengths))

    def _refuse(self, call: KernelCall) -> None:
        """Decline what the function cannot be asked for."""
        options, capabilities = call.options, self.capabilities
        chunk_size = options.chunk_size
        if chunk_size is not None and chunk_size != capabilities.default_chunk_size:
            if "chunk_size" not in self.named:
                raise Refused(f"{self.name} takes no chunk_size")
            if capabilities.chunk_sizes and chunk_size not in capabilities.chunk_sizes:
                raise Refused(f"{self.name} takes chunk_size {capabilities.chunk_sizes}, not {chunk_size}")
        if options.l2norm == "in_kernel" and capabilities.l2norm == "before":
            raise Refused(f"{self.name} has no l2norm of its own")
        if options.state_dtype not in (None, *capabilities.state_dtypes):
            raise Refused(
                f"{self.name} keeps its state in {capabilities.state_dtypes}, not {options.state_dtype}"
            )
        dtype = str(call.tensors["v"].dtype).removeprefix("torch.")
        if dtype not in (*capabilities.input_dtypes, "float64"):
            raise Refused(f"{self.name} takes {capabilities.input_dtypes}, not {dtype}")
        if call.tensors["g"].dim() == 3 and not capabilities.channel_gate:
            raise Refused(f"{self.name} takes no decay per key channel (g [T, HV, K])")
        unknown = sorted(set(options.extra) - self.named)
        if unknown:
            raise Refused(f"{self.name} takes no keyword {', '.join(unknown)}")

    def _run_packed(self, call: KernelCall) -> dict[str, Tensor]:
        tensors, options = call.tensors, call.options
        q, k = self._query_and_key(call)
        keywords: dict[str, Any] = {
            "scale": float(tensors["q"].shape[-1]) ** -0.5 if options.scale is None else options.scale,
            "initial_state": self._initial_state(call),
            "output_final_state": options.output_final_state,
            "cu_seqlens": tensors["cu_seqlens"],
            **options.extra,
        }
        if options.chunk_size is not None and "chunk_size" in self.named:
            keywords["chunk_size"] = options.chunk_size
        self.evidence = {}
        if options.pins and "pins" in self.named:
            # It chooses configurations itself, so the account of Triton's tuners does not see them.
            keywords["pins"] = {name: dict(pin) for name, pin in options.pins.items()}
            self.evidence = {"pinned": dict.fromkeys(options.pins, "passed on"), "pins_unused": []}
        if "use_qk_l2norm_in_kernel" in self.named:
            keywords["use_qk_l2norm_in_kernel"] = self._normalises(call)
        known = {"q", "k", "v", "g", "beta", "initial_state", "cu_seqlens"}
        for name in self.named & (set(tensors) - known):
            keywords[name] = self._layout(tensors[name]) if name == "pool" else tensors[name]
        missing = sorted(self.demanded - set(keywords))
        if missing:
            raise Refused(f"{self.name} needs {', '.join(missing)}, which this call has not")
        g = tensors["g"].exp() if self.capabilities.gate_space == "linear" else tensors["g"]
        returned = self.function(q, k, tensors["v"], g, tensors["beta"], **keywords)
        states = None
        if "checkpoint_every" in options.extra and isinstance(returned, tuple | list) and len(returned) == 3:
            *returned, states = returned
        output, final_state = _unpack(returned)
        outputs = self._checked(output, final_state, pool=keywords.get("pool"))
        if states is not None:
            outputs["checkpoints"] = self._layout(_tensor("checkpoints", states))
        return outputs

    def _run_each(self, call: KernelCall, n_sequences: int) -> dict[str, Tensor]:
        """One call per sequence, for a function that takes a single one."""
        if self.named & set(SLOT_KEYWORDS) & set(call.tensors):
            raise Refused(f"{self.name} takes one sequence at a time, so no pool of slots")
        parts = [self._run_packed(_one_sequence(call, i)) for i in range(n_sequences)]
        names = parts[0] if parts else ()
        return {name: torch.cat([part[name] for part in parts]) for name in names}

    def _normalises(self, call: KernelCall) -> bool:
        """Does the function itself l2-normalise q and k in this call."""
        capability, options = self.capabilities.l2norm, call.options
        if options.qk == "normalised" or options.l2norm == "before":
            return False
        # Without a word it is where production has it, as with the adapters of packages.
        return capability in ("in_kernel", "both")

    def _query_and_key(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        """q, k [T, HK, K], normalised unless the function does it; [T, HV, K] if it wants equal heads."""
        q, k = call.tensors["q"], call.tensors["k"]
        if call.options.qk == "raw" and not self._normalises(call):
            q, k = _l2_normalised(q), _l2_normalised(k)
        repeats = call.tensors["v"].shape[1] // q.shape[1]
        if not self.capabilities.gva and repeats > 1:
            q, k = q.repeat_interleave(repeats, dim=1), k.repeat_interleave(repeats, dim=1)
        return q, k

    def _initial_state(self, call: KernelCall) -> Tensor | None:
        """The state in the function's layout and dtype, gathered from its slots unless it takes the pool."""
        state, fresh = call.tensors.get("initial_state"), call.tensors.get("has_initial_state")
        pool, slots = call.tensors.get("pool"), call.tensors.get("slot_indices")
        if state is None and pool is not None and slots is not None and "pool" not in self.named:
            slots = start_slots(call.tensors)
            # A padding index (negative) owns no slot: it starts from zeros.
            owned = (slots >= 0).view(-1, 1, 1, 1)
            state = torch.where(owned, pool[slots.long().clamp(min=0)], 0)
        if state is None:
            return None
        if fresh is not None and "has_initial_state" not in self.named:
            state = torch.where(fresh.bool().view(-1, 1, 1, 1), state, 0)
        wanted, dtypes = call.options.state_dtype, self.capabilities.state_dtypes
        if wanted is None and dtypes and str(state.dtype).removeprefix("torch.") not in dtypes:
            wanted = dtypes[0]  # e.g. a captured bfloat16 state for a function that keeps float32
        return self._layout(state if wanted is None else state.to(getattr(torch, wanted)))

    def _layout(self, state: Tensor) -> Tensor:
        """[N, HV, K, V] to the function's layout, or back."""
        if self.capabilities.state_layout == "KV" or state.dim() < 2:
            return state
        return state.transpose(-1, -2).contiguous()

    def _checked(self, output: Any, final_state: Any, pool: Tensor | None) -> dict[str, Tensor]:
        """The outputs in the canonical layout, whatever their shape: that is for a verdict to judge.

        Raises TypeError where something is no tensor.
        """
        outputs = {"output": _tensor("o", output)}
        if pool is not None:
            outputs["pool"] = self._layout(pool)
        if final_state is not None:
            outputs["final_state"] = self._layout(_tensor("final_state", final_state))
        return outputs


def _named_keywords(name: str, function: Callable[..., Any]) -> tuple[set[str], set[str]]:
    """Keywords that the function names, and those of them that have no default.

    Raises BadInput where it cannot be called as SIGNATURE says.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return set(), set()  # compiled code that does not tell: it gets the required ones
    parameters = list(signature.parameters.values())
    passed = [*REQUIRED_KEYWORDS, *(p.name for p in parameters if p.name in KNOWN_KEYWORDS)]
    try:
        signature.bind(*"qkvgb", **dict.fromkeys(passed))
    except TypeError as error:
        raise BadInput(f"kernel {name}: {error}; it must take {SIGNATURE}") from error
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p.name for p in parameters if p.kind != inspect.Parameter.KEYWORD_ONLY][:5]
    named = [p for p in parameters if p.kind in kinds and p.name not in positional]
    return {p.name for p in named}, {p.name for p in named if p.default is inspect.Parameter.empty}


def _unpack(returned: Any) -> tuple[Any, Any]:
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        what = f"{len(returned)} values" if isinstance(returned, tuple | list) else type(returned).__name__
        raise TypeError(f"it returned {what}, not (o, final_state)")
    return returned[0], returned[1]


def _tensor(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"it returned {name} as {type(value).__name__}, not a tensor")
    return value


def _l2_normalised(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension, in float32 at least, rounded to x's dtype."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2NORM_EPS)).to(x.dtype)


def _one_sequence(call: KernelCall, i: int) -> KernelCall:
    """The call for sequence i alone."""
    start, end = call.tensors["cu_seqlens"][i : i + 2].tolist()
    tensors = {}
    for name, tensor in call.tensors.items():
        if name == "cu_seqlens":
            tensors[name] = torch.tensor([0, end - start], dtype=tensor.dtype, device=tensor.device)
        elif name in ("initial_state", "has_initial_state", "slot_indices"):
            tensors[name] = tensor[i : i + 1]
        elif name == "pool":
            tensors[name] = tensor
        else:
            tensors[name] = tensor[start:end]
    return msgspec.structs.replace(call, tensors=tensors)

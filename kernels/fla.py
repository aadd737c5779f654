"""Adapters for flash-linear-attention: `fla.chunk` and `fla.recurrent`, fla-core 0.4.0 to 0.6.0.

The idea: call the public function as an engine does, with keywords only, and convert what versions
take differently where it can be seen: heads are expanded where a version wants them equal, an option
is passed only if the version has it, and a chunk size that the public function would swallow goes
through the version's own stage functions (`fla_stages`).

Leaves to others: the conversions (`layouts`), the interpreter (`interpreter`), tuned configurations
(`autotune`), what the kernel promises (`contracts_fla`), importing one version only (`fla_package`).
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from torch import Tensor

from ..capture.errors import Refused
from . import autotune, layouts
from .contract import Capabilities, Contract
from .fla_package import TRITON_ONLY
from .interface import KernelCall, KernelInfo, RunOptions
from .replay import Replay, launched, replay_of

LARGEST_KEY = 256
"""Key dimension that the chunk kernels' state loop holds in registers."""
STAGES = ("cumsum", "kkt", "solve", "wu", "state", "output")


class FlaKernel:
    """What both operations share. One instance per worker; importing the package happens in __init__."""

    op: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    package: ClassVar[str] = "fla-core"
    environment: ClassVar[dict[str, str]] = TRITON_ONLY

    def __init__(self, version: str | None = None) -> None:
        """version: the fla-core version that must be found; None takes what sys.path has.

        Raises CannotRun where fla or triton cannot be imported or another version is found.
        """
        from .fla_package import load

        self.package_module = load(version)
        self.version = self.package_module.version
        self.evidence: dict[str, Any] = {}

    @classmethod
    def contract_for(cls, version: str | None, chunk_size: int = 64) -> Contract:
        """The contract of this operation at a version (data only, imports nothing of fla)."""
        from .contracts_fla import contract_for

        return contract_for(f"fla.{cls.op}", version, chunk_size)

    def describe(self) -> KernelInfo:
        """Who this is: version, capabilities of that version, contract, environment."""
        contract = self.contract_for(self.version)
        capabilities = msgspec.structs.replace(
            self.capabilities,
            gva=self.op == "recurrent" or self.package_module.grouped_heads,
            chunk_sizes=() if self.op == "recurrent" else self.package_module.chunk_sizes,
            profile=contract.value("precision.profile"),
            clauses=contract.clauses,
        )
        return KernelInfo(
            name=f"fla.{self.op}@{self.version}",
            version=self.version,
            capabilities=capabilities,
            contract=contract,
            environment=self.package_module.environment(),
        )

    def run(self, call: KernelCall) -> dict[str, Tensor]:
        """One call: `output` [T, HV, V] in v's dtype, `final_state` [N, HV, K, V], float32 unless asked.

        Raises Refused for what this kernel cannot be given; anything else is the kernel's own error.
        """
        self.check(call)
        self.evidence = {"backend": "triton", "version": self.version, **self.package_module.environment()}
        with autotune.pinned(call.options.pins) as launched:
            try:
                outputs = self.call_kernel(call)
            finally:
                self.evidence["launched"] = dict(launched)
                unused = sorted(set(call.options.pins) - set(launched))
                if unused:
                    self.evidence["pins_unused"] = unused
        return outputs

    def check(self, call: KernelCall) -> None:
        """Refuse what lies outside the capabilities, with the offending value."""
        t, options = call.tensors, call.options
        types = {layouts.dtype_name(t[name].dtype) for name in ("q", "k", "v")}
        if len(types) > 1 or not types <= set(self.capabilities.input_dtypes):
            raise Refused(
                f"q, k, v must share one of {', '.join(self.capabilities.input_dtypes)}, not {sorted(types)}"
            )
        if t["g"].dim() == 3:
            raise Refused("g is per key channel [T, HV, K]; this kernel takes one decay per head [T, HV]")
        n_key, n_value = t["q"].shape[1], t["v"].shape[1]
        if n_key == 0 or n_value % n_key:
            raise Refused(f"{n_value} value heads cannot share {n_key} key heads evenly")
        if len(t["cu_seqlens"]) < 2:
            raise Refused("the call has no sequence: cu_seqlens has one entry")
        if options.state_dtype not in (None, *self.capabilities.state_dtypes):
            raise Refused(
                f"state dtype {options.state_dtype} is none of {', '.join(self.capabilities.state_dtypes)}"
            )

    def keywords(self, call: KernelCall) -> dict[str, Any]:
        """The arguments in fla's layout, [1, T, heads, dim], all contiguous."""
        t, options = call.tensors, call.options
        q, k = t["q"], t["k"]
        in_kernel = options.qk == "raw" and options.l2norm != "before"
        if options.qk == "raw" and options.l2norm == "before":
            q, k = layouts.l2norm_rounded(q), layouts.l2norm_rounded(k)
        if self.op == "chunk" and not self.package_module.grouped_heads:
            q, k = (layouts.expand_heads(x, t["v"].shape[1]) for x in (q, k))
        self.evidence["l2norm"] = "in_kernel" if in_kernel else "before" if options.qk == "raw" else "given"
        self.evidence["heads_expanded"] = q.shape[1] != t["q"].shape[1]
        state = layouts.gathered_state(t)
        if state is not None and options.state_dtype is not None:
            state = state.to(layouts.DTYPES[options.state_dtype])
        return {
            "q": layouts.add_batch(q),
            "k": layouts.add_batch(k),
            "v": layouts.add_batch(t["v"]),
            "g": layouts.add_batch(t["g"]),
            "beta": layouts.add_batch(t["beta"]),
            "scale": t["q"].shape[-1] ** -0.5 if options.scale is None else options.scale,
            "initial_state": state,
            "output_final_state": options.output_final_state,
            "use_qk_l2norm_in_kernel": in_kernel,
            "cu_seqlens": layouts.own_offsets(t["cu_seqlens"]),
        }

    def canonical(self, output: Tensor, state: Tensor | None, options: RunOptions) -> dict[str, Tensor]:
        """The kernel's results in the canonical layout; the state rounded where the hand-over rounds it."""
        result = {"output": layouts.drop_batch(output)}
        if state is not None:
            wanted = options.state_dtype
            result["final_state"] = state if wanted is None else state.to(layouts.DTYPES[wanted])
        return result

    def call_kernel(self, call: KernelCall) -> dict[str, Tensor]:
        raise AssertionError("each operation has its own")


class FlaChunk(FlaKernel):
    """`chunk_gated_delta_rule`: the prefill kernel of a chain of stages."""

    op = "chunk"
    capabilities = Capabilities(
        chunk_sizes=(16, 32, 64),
        gva=True,
        l2norm="both",
        state_dtypes=("float32", "bfloat16", "float16"),
        stages=STAGES,
        checkpoints="chunks",
        max_tokens_cpu=4096,
    )

    def check(self, call: KernelCall) -> None:
        super().check(call)
        t, size = call.tensors, call.options.chunk_size
        if size is not None and size not in self.package_module.chunk_sizes:
            sizes = ", ".join(map(str, self.package_module.chunk_sizes))
            raise Refused(f"chunk size {size}: fla-core {self.version} has {sizes}")
        if t["q"].shape[-1] > LARGEST_KEY:
            raise Refused(
                f"K={t['q'].shape[-1]} is above {LARGEST_KEY}, the largest that the chunk kernel holds"
            )
        if not self.package_module.counts_empty and not call.options.extra.get("allow_empty"):
            lengths = (t["cu_seqlens"][1:] - t["cu_seqlens"][:-1]).tolist()
            last = max((i for i, n in enumerate(lengths) if n), default=-1)
            if 0 in lengths[: last + 1]:
                raise Refused(
                    f"sequence {lengths.index(0)} is empty and not the last: fla-core {self.version} numbers "
                    "sequences without the empty ones and would mix up all that follow"
                )

    def call_kernel(self, call: KernelCall) -> dict[str, Tensor]:
        from . import fla_stages

        extra = call.options.extra
        if "stage" in extra:
            return fla_stages.run_stage(self.package_module, extra["stage"], call, self.keywords(call))
        arguments = self.keywords(call)
        size = call.options.chunk_size or 64
        if extra.get("stages"):
            self.evidence["path"] = "stage functions"
            return fla_stages.stages(self.package_module, arguments, size, call.options)
        if extra.get("checkpoints"):
            self.evidence["path"] = "stage functions"
            everything = fla_stages.stages(self.package_module, arguments, size, call.options)
            return fla_stages.with_checkpoints(everything)
        if size != 64 and not self.package_module.chunk_size_keyword:
            # 0.4's public function swallows unknown keywords: chunk_size=16 would run 64 and say nothing.
            self.evidence["path"] = "stage functions"
            everything = fla_stages.stages(self.package_module, arguments, size, call.options)
            return {name: everything[name] for name in ("output", "final_state") if name in everything}
        self.evidence["path"] = "chunk_gated_delta_rule"
        if self.package_module.chunk_size_keyword:
            arguments["chunk_size"] = size
        output, state = self.package_module.chunk_gated_delta_rule(**arguments)
        return self.canonical(output, state, call.options)


class FlaRecurrent(FlaKernel):
    """`fused_recurrent_gated_delta_rule`: the decode kernel, token by token in float32."""

    op = "recurrent"
    capabilities = Capabilities(
        default_chunk_size=None,
        gva=True,
        l2norm="both",
        state_dtypes=("float32", "bfloat16", "float16"),
        replays=True,
        max_tokens_cpu=512,
    )

    def check(self, call: KernelCall) -> None:
        super().check(call)
        if call.options.chunk_size is not None:
            raise Refused(f"chunk size {call.options.chunk_size}: a recurrent kernel has no chunks")

    def call_kernel(self, call: KernelCall) -> dict[str, Tensor]:
        self.evidence["path"] = "fused_recurrent_gated_delta_rule"
        rows = call.tensors["cu_seqlens"].shape[0] - 1
        replay = replay_of(call.options.extra, rows)
        if replay is not None:
            return self.replayed(call, replay)
        output, state = self.package_module.fused_recurrent_gated_delta_rule(**self.keywords(call))
        return self.canonical(output, state, call.options)

    def replayed(self, call: KernelCall, replay: Replay) -> dict[str, Tensor]:
        """A captured batch replayed with padded rows, on states gathered from a pool and scattered back.

        The kernel knows no slots: the engine around it writes the live rows' states back, and no others.
        """
        if "pool" not in call.tensors or not replay.empty:
            raise Refused("replay: fla.recurrent takes states by row; a padded row is one without a token")
        arguments: dict[str, Any] = self.keywords(call)
        states: list[Tensor] = []

        def launch() -> Tensor:
            output, state = self.package_module.fused_recurrent_gated_delta_rule(**arguments)
            states[:] = [state]
            return layouts.drop_batch(output)

        own = call.tensors["slot_indices"].long()
        output, how = launched(
            launch, replay=replay, indices=own.clone(), offsets=arguments["cu_seqlens"],
            pool=arguments["initial_state"],
        )  # fmt: skip
        self.evidence |= how
        pool, live = call.tensors["pool"].clone(), own[: replay.live]
        pool[live] = states[0][: replay.live].to(pool.dtype)
        return {"output": output, "final_state": states[0], "pool": pool}


KERNELS = {"chunk": FlaChunk, "recurrent": FlaRecurrent}

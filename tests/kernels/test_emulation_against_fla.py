"""The emulation against the kernels that it stands for, run for real: nearly every bit is the same.

A wrong cast point would move most outputs; another order of sums moves one in some hundreds.
"""

import json
import subprocess
import sys

import pytest

pytest.importorskip("fla")

SCRIPT = """
import json, sys, torch
torch.set_num_threads(1)
from gdncheck.kernels.interpreter import install
install()
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from gdncheck.reference.emulation import emulate_chunk
from gdncheck.reference.emulation_recurrent import emulate_recurrent

op, dtype, beta_dtype, tokens = sys.argv[1], *(getattr(torch, n) for n in sys.argv[2:4]), int(sys.argv[4])
draw = torch.Generator().manual_seed(1)
normal = lambda *s: torch.randn(*s, generator=draw)
q, k, v = (normal(tokens, 2, d).to(dtype) for d in (64, 64, 32))
g, beta = -0.2 * torch.rand(tokens, 2, generator=draw), torch.sigmoid(normal(tokens, 2)).to(beta_dtype)
state, cu = normal(2, 2, 64, 32), torch.tensor([0, tokens // 3, tokens])
kernel = chunk_gated_delta_rule if op == "chunk" else fused_recurrent_gated_delta_rule
out, final = kernel(
    q=q[None], k=k[None], v=v[None], g=g[None], beta=beta[None], initial_state=state, output_final_state=True,
    use_qk_l2norm_in_kernel=True, cu_seqlens=cu,
)
emulate, profile = (emulate_chunk, "fla-0.4") if op == "chunk" else (emulate_recurrent, "fla-recurrent")
call = dict(initial_state=state, cu_seqlens=cu, l2norm=True)
mine = emulate(q, k, v, g, beta, precision=profile, **call)
coarse = emulate(q, k, v, g, beta, precision="generic", **call)
same = lambda r: (r.output.to(dtype) == out[0]).float().mean().item()
far = lambda r: ((r.final_state - final).norm() / final.norm()).item()
print(json.dumps({"same": same(mine), "far": far(mine), "coarse": same(coarse)}))
"""


def compare(op, dtype, beta_dtype, tokens):
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, op, dtype, beta_dtype, str(tokens)],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def test_fla_chunk_in_bf16_agrees_in_nearly_every_bit():
    found = compare("chunk", "bfloat16", "float32", 90)
    assert found["same"] > 0.99
    assert found["far"] < 1e-4
    assert found["coarse"] < 0.9, "a table with one cast more is told apart"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "dtype", "beta_dtype"),
    [
        ("chunk", "bfloat16", "bfloat16"),
        ("chunk", "float16", "float32"),
        ("recurrent", "bfloat16", "float32"),
    ],
)
def test_fla_agrees_in_nearly_every_bit(op, dtype, beta_dtype):
    found = compare(op, dtype, beta_dtype, 90 if op == "chunk" else 12)
    # fp16 is eight times finer: as many float32 differences flip eight times as many roundings.
    assert found["same"] > (0.9 if dtype == "float16" else 0.98)
    assert found["far"] < 1e-4

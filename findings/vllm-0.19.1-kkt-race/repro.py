#!/usr/bin/env python3
"""vllm.chunk@0.19.1 returns wrong values: 474 tokens, 32 heads, 128 x 128

vllm.chunk@0.19.1 returns wrong values: other bits from run to run, and wrong by up to 50 times what
rounding explains. It fails in 340 of 640 runs (95 % interval 0.492 to 0.57). Called with
autotune=chunk_scaled_dot_kkt_fwd_kernel:BK=64+num_warps=4+num_stages=2.

Needs torch, safetensors and vllm==0.19.1 and a GPU; nothing else. Exit status: 1 where the fault shows, 0 where it does
not, 2 where the script cannot run here. Options: --runs N, --folder DIR (where the kernel's files lie, if they
are not installed), --device.

g is the natural logarithm of the decay. With S [K, V] the state of one head, a token does

    S <- exp(g) S;   u = beta (v - S^T k);   S <- S + k u^T;   o = scale S^T q
"""

import argparse
import importlib
import os
import subprocess
import sys

import torch
from safetensors.torch import load_file

HERE = os.path.dirname(os.path.abspath(__file__))
KIND = 'moves'  # what shows: nonfinite, wrong, error, crash, timeout or moves
LIMIT = 0.1  # largest relative error of a row that still counts as rounding
RUNS = 7
SECONDS = 300.0  # after which a call counts as hung
NEEDS_GPU = True
RAW = False  # q and k are to be l2-normalised: x / sqrt(sum(x^2) + 1e-6)
IN_KERNEL = True  # the kernel is asked to do that
SCALE = 0.08838834764831845
POISON = None  # what fresh memory is filled with
PINS = {'chunk_scaled_dot_kkt_fwd_kernel': {'BK': 64, 'num_warps': 4, 'num_stages': 2}}  # Triton kernel -> the autotune configuration that it has to run
STATE_DTYPE = torch.float32  # of the state between the calls
# Each case's calls: lists of (sequence, first token, end); None: one call.
CALLS = {'failing': None}

# --- the kernel's own call
def load(folder):
    if folder:
        kernels_alone(folder)
    for package in ("vllm.third_party.flash_linear_attention.ops", "vllm.model_executor.layers.fla.ops"):
        try:
            module = importlib.import_module(package + ".chunk")
        except ModuleNotFoundError:
            continue
        import triton

        # The solve uses TMA descriptors, which Triton puts into memory that it is given.
        if hasattr(triton, "set_allocator"):
            triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
        return getattr(module, "chunk_gated_delta_rule")
    raise ModuleNotFoundError("no Gated DeltaNet kernels in the installed vllm")


def kernels_alone(folder):
    """Import the kernel files of an unpacked wheel without the engine around them."""
    import contextlib
    import logging
    import types

    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    def module(name, **parts):
        made = types.ModuleType(name)
        made.__dict__.update(parts)
        made.__path__ = [os.path.join(folder, *name.split("."))]
        sys.modules[name] = made
        parent, _, last = name.rpartition(".")
        if parent:
            if parent not in sys.modules:
                module(parent)
            setattr(sys.modules[parent], last, made)

    class Platform:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"

        def get_device_name(self, device_id=0):
            return torch.cuda.get_device_name(device_id) if torch.cuda.is_available() else "cpu"

        def has_device_capability(self, wanted, device_id=0):
            major, minor = torch.cuda.get_device_capability(device_id)
            if isinstance(wanted, tuple):
                return (major, minor) >= wanted
            return 10 * major + minor >= wanted

        def is_device_capability(self, wanted, device_id=0):
            major, minor = torch.cuda.get_device_capability(device_id)
            return (major, minor) == wanted if isinstance(wanted, tuple) else 10 * major + minor == wanted

        def is_device_capability_family(self, wanted, device_id=0):
            return torch.cuda.get_device_capability(device_id or 0)[0] == wanted // 10

        def is_arch_support_pdl(self):
            return torch.cuda.get_device_capability()[0] >= 9

        def __getattr__(self, name):
            answers = {"is_cuda": True, "is_cuda_alike": True}
            return lambda *_: answers.get(name, False)

    class JitKernel:
        def __class_getitem__(cls, key):
            return cls

    def not_here(*_, **__):
        raise NotImplementedError

    log2e = 1.4426950216
    for name in ("vllm.third_party.flash_linear_attention.ops", "vllm.model_executor.layers.fla.ops",
                 "vllm.utils", "vllm.model_executor.warmup"):
        module(name)
    module("vllm.triton_utils", triton=triton, tl=tl, tldevice=libdevice, HAS_TRITON=True, LOG2E=log2e)
    module("vllm.platforms", current_platform=Platform())
    module("vllm.logger", init_logger=logging.getLogger, logger=logging.getLogger("vllm"))
    module("vllm.utils.math_utils", cdiv=lambda a, b: -(-a // b), RCP_LN2=log2e,
           next_power_of_2=lambda n: 1 if n < 1 else 1 << (n - 1).bit_length())
    module("vllm.utils.platform_utils",
           num_compute_units=lambda i=0: torch.cuda.get_device_properties(i).multi_processor_count)
    module("vllm.utils.gpu_sync_debug", gpu_sync_allowed=contextlib.nullcontext)
    module("vllm.utils.torch_utils",
           async_tensor_h2d=lambda data, device=None, dtype=None: torch.as_tensor(data).to(device, dtype))
    module("vllm.model_executor.warmup.jit_warmup", VllmJitKernel=JitKernel)
    names = ("TritonPointerInputVariant", "TritonWarmupTensor", "triton_scalar_specialization_rep")
    module("vllm.model_executor.warmup.jit_warmup_triton_helper", **dict.fromkeys(names, not_here))


def call(function, t, in_kernel):
    state = t["initial_state"]
    shape = (len(t["cu_seqlens"]) - 1, t["v"].shape[1], t["k"].shape[-1], t["v"].shape[-1])
    if state is None:
        state = torch.zeros(shape, device=t["v"].device)
    beta = t["beta"].to(torch.bfloat16) if t["q"].dtype == torch.bfloat16 else t["beta"]
    output, state = function(
        q=t["q"][None], k=t["k"][None], v=t["v"][None], g=t["g"][None], beta=beta[None], scale=t["scale"],
        initial_state=state.transpose(-1, -2).contiguous(), output_final_state=True,
        cu_seqlens=t["cu_seqlens"].to(torch.int32), use_qk_l2norm_in_kernel=in_kernel,
    )
    return output[0], state.transpose(-1, -2)

# --- the definition, in float64


def recurrence(t):
    """Token by token. Returns (output [T, HV, V], final state [N, HV, K, V])."""
    q, k, v, g, beta, states = in_float64(t)
    output, final = torch.zeros_like(v), torch.zeros_like(states)
    for n, (first, end) in enumerate(spans(t)):
        state = states[n]
        for i in range(first, end):
            decay = g[i].exp()
            state = state * (decay[:, None, None] if decay.dim() == 1 else decay[:, :, None])
            u = beta[i][:, None] * (v[i] - torch.einsum("hkv,hk->hv", state, k[i]))
            state = state + k[i][:, :, None] * u[:, None, :]
            output[i] = t["scale"] * torch.einsum("hkv,hk->hv", state, q[i])
        final[n] = state
    return output, final


def all_at_once(t):
    """The same by one triangular system for each sequence: a control of the definition itself."""
    q, k, v, g, beta, states = in_float64(t)
    if g.dim() == 3 or not bool(torch.isfinite(g).all()):
        return None
    output, final = torch.zeros_like(v), torch.zeros_like(states)
    for n, (first, end) in enumerate(spans(t)):
        rows = slice(first, end)
        qs, ks, vs, bs = (x[rows].transpose(0, 1) for x in (q, k, v, beta))
        total = g[rows].transpose(0, 1).cumsum(-1)
        decay = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
        grown = total.exp()[..., None]
        system = torch.eye(end - first, dtype=v.dtype) + bs[..., None] * (ks @ ks.mT * decay).tril(-1)
        u = torch.linalg.solve_triangular(system, bs[..., None] * (vs - grown * (ks @ states[n])), upper=False)
        output[rows] = (t["scale"] * (grown * (qs @ states[n]) + (qs @ ks.mT * decay) @ u)).transpose(0, 1)
        last = total[:, -1:, None] if end > first else torch.zeros_like(states[n][:, :1, :1])
        final[n] = last.exp() * states[n] + (ks * (last - total[..., None]).exp()).mT @ u
    return output, final


def in_float64(t):
    heads = t["v"].shape[1]
    q, k, v, g, beta = (t[name].double().cpu() for name in ("q", "k", "v", "g", "beta"))
    if RAW:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k))
    state = t["initial_state"]
    if state is None:
        state = torch.zeros(len(t["cu_seqlens"]) - 1, heads, k.shape[-1], v.shape[-1])
    state = state.double().cpu()
    if t["has_initial_state"] is not None:
        state = torch.where(t["has_initial_state"].bool().cpu().view(-1, 1, 1, 1), state, 0.0)
    return q, k, v, g, beta, state


def spans(t):
    cu = t["cu_seqlens"].tolist()
    return list(zip(cu, cu[1:]))


# --- the inputs
RECIPES = {'q': ('unit', 1.0), 'k': ('unit', 1.0), 'v': ('normal', 0.6), 'g': ('uniform', -10.0), 'beta': ('uniform', 1.0)}  # tensor -> (how it is made, its size), in the order of drawing
SHAPES = {'q': ((474, 16, 128), 'bfloat16'), 'k': ((474, 16, 128), 'bfloat16'), 'v': ((474, 32, 128), 'bfloat16'), 'g': ((474, 32), 'float32'), 'beta': ((474, 32), 'bfloat16')}  # tensor -> (shape, dtype)
CU_SEQLENS = [0, 474]


def inputs(device):
    """{"failing": ...}: seeded tensors, drawn on the CPU."""
    dice, t = torch.Generator().manual_seed(0), {}
    for name, (kind, size) in RECIPES.items():
        shape, dtype = SHAPES[name]
        if kind == "full":
            x = torch.full(shape, size)
        elif kind in ("first", "turn"):
            x, rows = torch.zeros(shape), torch.arange(shape[0])
            x[rows, :, rows % shape[-1] if kind == "turn" else 0] = 1.0
        elif kind == "uniform":
            x = torch.rand(shape, generator=dice) * size
        else:
            x = torch.randn(shape, generator=dice)
            x = x / x.norm(dim=-1, keepdim=True) if kind == "unit" else x * size
        t[name] = x.to(getattr(torch, dtype)).to(device)
    t |= {"cu_seqlens": torch.tensor(CU_SEQLENS, device=device), "scale": SCALE, "has_initial_state": None}
    t.setdefault("initial_state", None)
    return {"failing": t}

# --- running and looking


def run(function, t, calls):
    """The kernel on a case: one call, or several that hand the state on."""
    if calls is None:
        return one_call(function, t)
    edges = [first for first, _ in spans(t)]
    output, states = None, t["initial_state"]
    if states is None:
        shape = (len(edges), t["v"].shape[1], t["k"].shape[-1], t["v"].shape[-1])
        states = torch.zeros(shape, device=t["v"].device)
    states = states.to(STATE_DTYPE)
    flags = t["has_initial_state"]
    if flags is not None:
        states = torch.where(flags.bool().view(-1, 1, 1, 1), states, torch.zeros_like(states))
    for step in calls:
        rows = torch.cat([torch.arange(edges[n] + a, edges[n] + b) for n, a, b in step]).to(t["v"].device)
        own = torch.tensor([n for n, _, _ in step], device=t["v"].device)
        lengths = torch.tensor([0, *(b - a for _, a, b in step)])
        part = {name: t[name][rows] for name in ("q", "k", "v", "g", "beta")}
        part |= {"cu_seqlens": lengths.cumsum(0).to(t["v"].device), "scale": t["scale"],
                 "initial_state": states[own], "has_initial_state": None}
        got, final = one_call(function, part)
        output = torch.zeros(len(t["v"]), *got.shape[1:], dtype=got.dtype, device=got.device) if output is None else output
        output[rows] = got
        states[own] = final.to(states.dtype)
    return output, states


def one_call(function, t):
    t = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in t.items()}
    if RAW and not IN_KERNEL:
        for name in ("q", "k"):
            x = t[name].float()
            t[name] = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(t[name].dtype)
    with torch.no_grad():
        return call(function, t, RAW and IN_KERNEL)


def worst(got, want):
    """(largest RMS error of a row of one head over the RMS of the truth, where, entries that are not finite)."""
    found, bad = (0.0, "nothing differs"), 0
    for name, g, w in zip(("output", "state"), got, want):
        g = g.double().cpu()
        if g.shape != w.shape:
            return float("inf"), f"{name} has shape {list(g.shape)}, not {list(w.shape)}", 0
        usable = torch.isfinite(w)
        bad += int((~torch.isfinite(g) & usable).sum())
        if not w.numel():
            continue
        error = torch.where(usable, torch.nan_to_num(g - w, nan=float("inf")), 0.0).flatten(2)
        size = w[usable].square().mean().sqrt().clamp(min=1e-300)
        rows = error.square().mean(-1).sqrt() / size
        value = float(rows.max())
        if value > found[0]:
            place = [int(i) for i in (rows == rows.max()).nonzero()[0]]
            what = "packed token" if name == "output" else "sequence"
            found = value, f"{name}, {what} {place[0]}, head {place[1]}"
    return *found, bad


def shows(got, want, first):
    """Whether a result shows the fault, and in which words."""
    error, where, bad = worst(got, want)
    words = f"{bad} entries are not finite, largest relative error {error:.3g} ({where})"
    if KIND == "nonfinite":
        return bad > 0, words
    if KIND == "moves" and first is not None:
        same = all(torch.equal(torch.nan_to_num(a, nan=7e9), torch.nan_to_num(b, nan=7e9)) for a, b in zip(got, first))
        return not same or error > LIMIT, words + ("" if same else "; other bits than the first run")
    return error > LIMIT, words


def poisoned():
    """Fill what torch.empty gives, so that memory that nobody wrote is seen to be read."""
    value = float("nan") if POISON == "nan" else 1e30

    def filling(make):
        def made(*args, **keywords):
            x = make(*args, **keywords)
            return x.fill_(value) if x.is_floating_point() else x

        return made

    torch.empty, torch.empty_like = filling(torch.empty), filling(torch.empty_like)
    torch.Tensor.new_empty = filling(torch.Tensor.new_empty)


def pinned():
    """Leave each named Triton kernel the one configuration."""
    import triton

    for module in list(sys.modules.values()):
        for x in list(vars(module).values()) if hasattr(module, "__dict__") else ():
            tuner = x
            while tuner is not None and not isinstance(tuner, triton.runtime.autotuner.Autotuner):
                tuner = getattr(tuner, "fn", None)
            inner = tuner
            while inner is not None and not hasattr(inner, "__name__"):
                inner = getattr(inner, "fn", None)
            wanted = PINS.get(getattr(inner, "__name__", ""))
            if tuner is None or not wanted:
                continue
            kept = [c for c in tuner.configs if all({**c.kwargs, "num_warps": c.num_warps,
                    "num_stages": c.num_stages}.get(name) == value for name, value in wanted.items())]
            if kept:
                tuner.configs = kept[:1]


def compiled():
    """Which Triton kernels ran: name, configuration that the tuner chose, hash of the binary."""
    if "triton" not in sys.modules:
        return
    import hashlib

    import triton

    seen = set()
    for module in list(sys.modules.values()):
        for x in list(vars(module).values()) if hasattr(module, "__dict__") else ():
            chosen = None
            while x is not None and not isinstance(x, triton.runtime.jit.JITFunction):
                chosen = getattr(x, "best_config", chosen)
                x = getattr(x, "fn", None)
            if x is None or id(x) in seen or not hasattr(x, "device_caches"):
                continue
            seen.add(id(x))
            try:
                for cache in x.device_caches.values():
                    for binary in (cache[0] if isinstance(cache, tuple) else cache).values():
                        digest = hashlib.sha256(binary.asm["cubin"]).hexdigest()[:16]
                        print(f"  binary {x.__name__}: sha256 {digest}{f', {chosen}' if chosen else ''}")
            except (AttributeError, KeyError, TypeError) as error:
                print(f"  binary {x.__name__}: not known ({error})")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if NEEDS_GPU and not args.device.startswith("cuda"):
        print("cannot run here: the kernel needs a GPU")
        return 2
    if KIND in ("crash", "timeout") and not args.once:
        return watched(args)
    try:
        function = load(args.folder)
    except ImportError as error:
        print(f"cannot run here: {error}")
        return 2
    if POISON:
        poisoned()
    if PINS and "triton" in sys.modules:
        pinned()
    print(f"torch {torch.__version__}, " + (torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"))
    cases = inputs(args.device)
    if "passing" in cases and report("passing", function, cases["passing"], min(args.runs, 3)) < 0:
        return 2
    failed = report("failing", function, cases["failing"], args.runs)
    if failed < 0 and "passing" not in cases:
        return 2  # it may as well be the call that is wrong here
    control(cases["failing"])
    if args.device.startswith("cuda"):
        compiled()
    print("THE FAULT SHOWS" if failed else "the fault does not show")
    return int(failed != 0)


def report(name, function, t, runs):
    """Run a case and print what came of it; how many runs show the fault, -1 where the call raises."""
    want, failed, first, words = recurrence(t), 0, None, ""
    for _ in range(runs):
        try:
            got = run(function, t, CALLS[name])
            if t["v"].is_cuda:
                torch.cuda.synchronize()
        except Exception as error:
            words = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if KIND == "error":
                failed += 1
                continue
            print(f"{name} input: the call raises {words}")
            return -1
        bad, said = shows(got, want, first)
        first = first or [x.clone() for x in got]
        words = said if bad or not words else words
        failed += bad
    print(f"{name} input: {failed} of {runs} runs show it; {words}")
    return failed


def control(t):
    other = all_at_once(t)
    if other is not None:
        error, where, _ = worst(other, recurrence(t))
        print(f"control: a second formula in float64 agrees with the first to {error:.2g}")


def watched(args):
    """Calls that may take their process along, or never come back, are made in another one."""
    words = [sys.executable, *(["-I"] if sys.flags.isolated else []), os.path.abspath(__file__), "--once",
             "--runs", str(args.runs), "--device", args.device, *(["--folder", args.folder] if args.folder else [])]
    loading = 120 if args.device.startswith("cuda") else 30
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=loading + SECONDS)
    except subprocess.TimeoutExpired:
        print(f"no answer within {SECONDS:g} s and {loading} s for loading")
        failed = KIND == "timeout"
    else:
        said = done.stderr.strip().splitlines()
        print(done.stdout.replace("the fault does not show\n", ""), end="")
        if done.returncode == 2:
            return 2
        lost = done.returncode < 0 or done.returncode > 2 or "failing input: the call raises" in done.stdout
        if lost:
            print(f"the process ended with {done.returncode}: {said[-1] if said else ''}")
        failed = lost and KIND == "crash"
    print("THE FAULT SHOWS" if failed else "the fault does not show")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

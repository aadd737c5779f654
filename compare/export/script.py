"""The text of the stand-alone script: `script.txt` with its words filled in.

The idea: the script is one readable file, so what depends on the finding is a handful of constants, the
kernel's own call and the way the inputs are made; everything else is fixed text that people can trust.
"""

from __future__ import annotations

import re
import textwrap
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ..sweep.configuration import in_words
from . import upstream

if TYPE_CHECKING:
    from .export import _Job

FROM_FILE = '''
def inputs(device):
    """{"failing": ..., "passing": ...}: the tensors of the file beside this one."""
    found = {}
    for key, x in load_file(os.path.join(HERE, "tensors.safetensors")).items():
        case, _, name = key.partition(".")
        if case in CALLS:
            found.setdefault(case, {"initial_state": None, "has_initial_state": None, "scale": SCALE})
            found[case][name] = x.to(device)
    return found
'''

DRAWN = '''
RECIPES = @recipes@  # tensor -> (how it is made, its size), in the order of drawing
SHAPES = @shapes@  # tensor -> (shape, dtype)
CU_SEQLENS = @cu_seqlens@


def inputs(device):
    """{"failing": ...}: seeded tensors, drawn on the CPU."""
    dice, t = torch.Generator().manual_seed(@seed@), {}
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
            x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True) if kind == "unit" else x * size
        t[name] = x.to(getattr(torch, dtype)).to(device)
    t |= {"cu_seqlens": torch.tensor(CU_SEQLENS, device=device), "scale": SCALE, "has_initial_state": None}
    t.setdefault("initial_state", None)
    return {"failing": t}
'''


def script_text(job: _Job) -> str:
    """The script of an export."""
    call, options = job.call, job.call.setup.options
    text = files("gdncheck.compare.export").joinpath("script.txt").read_text(encoding="utf-8")
    calls = {"failing": call.steps}
    if job.passing is not None:
        calls["passing"] = job.passing.steps
    dtype = call.setup.state_dtype or _state_dtype(job)
    words: dict[str, Any] = {
        "title": upstream.title(job),
        "story": textwrap.fill(f"{upstream.story(job)} Called with {in_words(job.deviations)}.", 108),
        "package": job.part.package,
        "where": " and a GPU" if job.part.needs_gpu else "",
        "kind": repr(_kind(job)),
        "limit": repr(job.limit).replace("inf", 'float("inf")'),
        "runs": upstream.runs_to_show(job.facts),
        "seconds": min(job.time_limit, job.facts.time_limit),
        "needs_gpu": job.part.needs_gpu,
        "raw": call.case.options.qk == "raw",
        "in_kernel": (options.get("l2norm") or job.part.by_default) == "in_kernel",
        "scale": repr(call.case.scale),
        "poison": repr(options.get("poison")),
        "pins": repr(options.get("pins") or {}),
        "state_dtype": f"torch.{dtype}",
        "calls": repr(calls),
        "kernel": job.part.text.strip("\n"),
        "inputs": _inputs(job),
    }
    return re.sub(r"@(\w+)@", lambda match: str(words[match[1]]), text)


def _kind(job: _Job) -> str:
    moving = job.facts.class_ == "moves" or job.facts.rule == "run-to-run"
    return "moves" if moving and job.facts.kind == "wrong" else job.facts.kind


def _state_dtype(job: _Job) -> str:
    state = job.call.case.get("initial_state")
    return "float32" if state is None else str(state.dtype).removeprefix("torch.")


def _inputs(job: _Job) -> str:
    if not job.drawn:
        return FROM_FILE.strip("\n")
    case = job.call.case
    words = {
        "recipes": {n: (r.kind, r.size) for n, r in job.recipes.items()},
        "shapes": {n: (tuple(case[n].shape), str(case[n].dtype).removeprefix("torch.")) for n in job.recipes},
        "cu_seqlens": case["cu_seqlens"].tolist(),
        "seed": job.seed_used,
    }
    return re.sub(r"@(\w+)@", lambda match: repr(words[match[1]]), DRAWN).strip("\n")

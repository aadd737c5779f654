"""The words of an upstream report: what fails, on what, how often, the smallest input, and two controls.

The idea: a maintainer reads the first screen and decides; so it holds the versions, the failing line beside
the nearest passing one, the rate with its interval, and why the definition is to be believed. Nothing
private: no paths, no host, no model, no token ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ...reference.recurrence import recurrence
from ...reference.truth import truth
from ..diff import diff
from ..finding import Facts
from ..inputs import inputs_of
from ..report_words import full
from ..shrink.asking import Rate
from ..shrink.result import words_of
from ..statistics import clean_runs_needed, rate_interval
from ..sweep.configuration import in_words

if TYPE_CHECKING:
    from .export import _Job

WHAT = {
    "nonfinite": "returns values that are not finite where the rule is finite",
    "wrong": "returns wrong values",
    "error": "raises an error",
    "crash": "ends its process",
    "timeout": "does not come back",
    "out-of-contract": "spreads the damage of an input outside its domain",
}
PATHS = re.compile(r"(?<![\w.])(?:~|/)[\w.~/-]*/(?=[\w.-])")
MOST_RUNS = 400


def title(job: _Job) -> str:
    """One line."""
    return f"{public_name(job.info.name)} {WHAT[job.facts.kind]}: {words_of(job.call.case)}"


def public_name(kernel: str) -> str:
    """A kernel's name without a directory of this machine."""
    head, marker, _ = kernel.partition("@path:")
    return f"{head} of a working tree" if marker else kernel


def story(job: _Job) -> str:
    """Two or three sentences."""
    facts = job.facts
    parts = [f"{public_name(job.info.name)} {WHAT[facts.kind]}: {public(facts.reason)}."]
    if facts.runs:
        parts.append(rate_words(facts))
    return " ".join(parts)


def public(text: str) -> str:
    """A text without directories."""
    return PATHS.sub("", text)


def rate_words(facts: Facts) -> str:
    """`It fails in 4 of 40 runs (95 % interval 0.03 to 0.24).`"""
    failures, runs = facts.failures or 0, facts.runs or 0
    if not runs:
        return ""
    low, high = rate_interval(failures, runs)
    return f"It fails in {failures} of {runs} runs (95 % interval {low:.3g} to {high:.3g})."


def runs_to_show(facts: Facts) -> int:
    """Runs after which a failure of the known rate has shown with 99 %."""
    rate = Rate(failures=facts.failures or 0, runs=facts.runs or 0)
    if facts.kind == "timeout":
        return 1
    if not rate.failures or rate.steady:
        return 3
    return min(MOST_RUNS, clean_runs_needed(max(rate.interval[0], 0.01), 0.99))


def report_text(job: _Job, status: int | None) -> str:
    """The whole report, Markdown."""
    lines = [f"# {title(job)}", "", story(job), ""]
    lines += ["## Reproduce", "", *_reproduce(job, status), ""]
    lines += ["## Where", "", *_versions(job), ""]
    lines += ["## Failing and passing", "", *_side_by_side(job), ""]
    lines += ["## Input", "", *_input(job), ""]
    lines += ["## Controls", "", *_controls(job), ""]
    return "\n".join(lines)


def _reproduce(job: _Job, status: int | None) -> Iterator[str]:
    yield f"`python repro.py` needs torch, safetensors and `{job.part.package}`; it does not need gdncheck."
    yield "It ends with 1 while the fault shows, 0 when it does not, 2 where it cannot run."
    if status is None:
        yield f"It was not run on this machine ({public('; '.join(job.notes)) or 'no reason known'})."
    else:
        word = {0: "the fault did not show", 1: "the fault shows"}.get(status, "it broke off")
        yield f"Run in a new process on this machine it ended with {status}: {word}."
        printed = public(getattr(job, "printed", "")).strip()
        if printed:
            yield from ("", "```", *printed.splitlines()[-20:], "```")


def _versions(job: _Job) -> Iterator[str]:
    facts, machine = job.facts, job.facts.machine
    environment = facts.environment
    yield "| what | value |"
    yield "|---|---|"
    rows: dict[str, Any] = {"kernel": public_name(job.info.name), "call": in_words(job.deviations)}
    packages = machine.get("packages") or {}
    rows |= {name: packages[name] for name in packages if name != "gdncheck"}
    for name in ("torch", "triton", "backend", "kernels", "device"):
        if environment.get(name):
            rows[name] = environment[name]
    gpu = machine.get("gpu")
    if gpu:
        rows["GPU"] = f"{gpu.get('name')}, sm_{str(gpu.get('capability')).replace('.', '')}"
        rows["driver, CUDA"] = f"{gpu.get('driver')}, {gpu.get('cuda')}"
    else:
        rows["GPU"] = "none"
    if environment.get("interpreted"):
        rows["Triton"] = "interpreted on a CPU: the source without compiler and GPU"
    rows["python"] = machine.get("python", "")
    for kernel, configuration in facts.launched.items():
        rows[f"configuration of {kernel}"] = configuration
    rows["binaries"] = "repro.py prints each Triton kernel's hash and configuration on a GPU"
    for name, value in rows.items():
        yield f"| {name} | {public(str(value))} |"


def _side_by_side(job: _Job) -> Iterator[str]:
    facts, call = job.facts, job.call
    place = "" if job.attempt is None or job.attempt.place is None else full(job.attempt.place)
    yield "| | failing | passing |"
    yield "|---|---|---|"
    near = job.passing
    yield f"| size | {words_of(call.case)} | {'-' if near is None else words_of(near.case)} |"
    yield f"| lengths | {call.case.lengths} | {'-' if near is None else near.case.lengths} |"
    yield f"| calls | {_calls(call.steps)} | {'-' if near is None else _calls(near.steps)} |"
    yield f"| result | {facts.verdict} {place} | {'-' if near is None else 'pass'} |"
    yield ""
    yield f"Rule that decided: tier {facts.tier}, {facts.rule}. {public(facts.reason)}."
    if job.seen.got is not None:
        yield f"Worst row: {job.seen.error:.3g} of the truth's RMS. {_values(job)}"


def _calls(steps: Any) -> str:
    return "one" if steps is None else "; ".join(str(step) for step in steps)


def _values(job: _Job) -> str:
    """Expected and seen numbers at the failing place."""
    place = None if job.attempt is None else job.attempt.place
    if job.seen.got is None or place is None or place.head is None or place.sequence is None:
        return ""
    if place.tensor == "output" and place.token is not None:
        row = int(job.call.case["cu_seqlens"][place.sequence]) + place.token
        want, got = (x[0][row, place.head] for x in (job.seen.expected, job.seen.got))
    elif place.tensor == "state":
        want, got = (x[1][place.sequence, place.head].flatten() for x in (job.seen.expected, job.seen.got))
    else:
        return ""
    at = int((got.double() - want.cpu()).abs().nan_to_num(nan=float("inf")).argmax())
    return f"There entry {at} is {float(got[at]):.6g}, expected {float(want[at]):.6g}."


def _input(job: _Job) -> Iterator[str]:
    case = job.call.case
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        x = case.get(name)
        if x is None:
            continue
        values = torch.unique(x.double())
        dtype = str(x.dtype).removeprefix("torch.")
        if len(values) <= 3:
            what = "values " + ", ".join(f"{float(v):.6g}" for v in values)
        else:
            what = f"{len(values)} distinct values, {float(values.min()):.4g} to {float(values.max()):.4g}"
        yield f"- `{name}` {list(x.shape)} {dtype}: {what}"
    if job.seed_used is not None:
        yield f"- seeded values (seed {job.seed_used}) in place of those that it was found on; same failure."
    elif job.finding.case.origin.kind in ("capture", "import"):
        yield "- the values are of a captured run; `--values seeded` tries to do without them."
    for words in job.facts.history[-6:]:
        yield f"- made smaller: {words}"


def _controls(job: _Job) -> Iterator[str]:
    yield "1. The definition: another formula in float64 (a triangular system for each chunk) gives the same"
    yield f"   result as the recurrence, to {upstream_difference(job)}; repro.py prints its own comparison."
    if job.passing is not None:
        yield "2. The nearest passing input, by the same script, kernel and process: it passes."
    else:
        yield f"2. Another kernel on the same input: {other_kernel(job)}."


def upstream_difference(job: _Job) -> str:
    """How far gdncheck's chunk form is from its recurrence on this input, in words."""

    x = inputs_of(job.call.case)
    a, b = truth(**x.keywords()), recurrence(**x.keywords())
    return f"{max(float((p - q).abs().max()) if p.numel() else 0.0 for p, q in zip(a, b, strict=True)):.2g}"


def other_kernel(job: _Job) -> str:
    """What gdncheck's own emulation of the algorithm, rounded as a kernel rounds, says of the same case."""
    report = diff(job.call.case, kernels=["emulation.recurrent"], device="cpu", relations="none")
    result = report.results[0]
    return f"{result.kernel}: {result.verdict}"

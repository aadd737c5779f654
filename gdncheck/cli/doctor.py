"""`gdncheck doctor`: what can run on this machine and why not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .options import device_option, json_option

if TYPE_CHECKING:
    from gdncheck.kernels.doctor import Report

MARKS = {"stops": "stop", "warns": "warning", "notes": "note", "handled": "handled"}


@click.command()
@device_option
@json_option
def doctor(device: str, as_json: bool) -> int:
    """Say what can run here: GPU, driver, CUDA, ptxas, torch, triton, kernels, known-bad combinations.

    Every installed kernel is loaded once, in a process of its own. Exit status 3 means that none runs.

    Example: gdncheck doctor
    """
    import time

    from gdncheck.kernels.doctor import doctor as examine

    started = time.monotonic()
    report = examine(device=device)
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(report).decode())
        return report.exit_status
    for line in lines(report):
        click.echo(line)
    names = ", ".join(kernel.name for kernel in report.runnable)
    verdict = f"can run {names}" if names else "no kernel can run here"
    click.echo(f"{verdict} | {time.monotonic() - started:.1f} s | gdncheck doctor --device {device}")
    return report.exit_status


def lines(report: Report) -> list[str]:
    """The report for a person."""
    facts = report.facts
    packages = facts["packages"] or {}
    shown = ("torch", "triton", "numpy", "fla-core", "transformers")
    versions = ", ".join(f"{name} {packages.get(name, 'missing')}" for name in shown)
    text = [
        f"python    {facts['python']} on {facts['platform']}",
        f"packages  {versions}",
        *_gpu_lines(facts),
    ]
    text += [f"problem   {what}: {why}" for what, why in facts["errors"].items() if what != "ptxas"]
    width = max((len(kernel.name) for kernel in report.kernels), default=0)
    for kernel in report.kernels:
        state = f"runs on {kernel.runs_on}" if kernel.runs_on else kernel.why_not or kernel.found
        text.append(f"kernel    {kernel.name:<{width}}  {state}")
    for found in report.combinations:
        text.append(f"{MARKS[found.level]:<9} {found.text} [{found.source}]")
    return text


def _gpu_lines(facts: dict[str, Any]) -> list[str]:
    gpus, ptxas = facts["gpus"] or {}, facts["ptxas"]
    if not gpus.get("available"):
        build = f"built for CUDA {gpus['torch_cuda']}" if gpus.get("torch_cuda") else "a CPU build"
        driver = f", driver {facts['driver']}" if facts.get("driver") else ", no driver found"
        return [
            f"gpu       none that torch can use (torch is {build}{driver}); Triton kernels are interpreted"
        ]
    names = "; ".join(f"{gpu['name']} (sm {gpu['capability']})" for gpu in gpus["devices"])
    cuda = (
        f"driver {facts.get('driver')} (CUDA {gpus.get('driver_cuda')}), torch for CUDA {gpus['torch_cuda']}"
    )
    return [f"gpu       {names}", f"cuda      {cuda}, ptxas {ptxas['version'] if ptxas else 'not found'}"]

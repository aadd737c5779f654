"""One sitting of one runner: from opened kernels to the last flight, and what it could not cover."""

from __future__ import annotations

from collections.abc import Sequence

from ...capture.errors import CannotRun
from ...kernels.pool import WorkerPool
from ..store import RunStore
from .findings import Findings
from .journal import Journal
from .plan import Plan
from .runner import Runner, Tell
from .setup import prepare

LOADING = 300.0  # seconds that a kernel may take to load


def sit(
    plan: Plan,
    store: RunStore,
    lanes: Sequence[int],
    deadline: float,
    tell: Tell,
    *,
    asked: bool,
    first: bool,
) -> list[dict[str, str]]:
    """Run lanes of a plan until the deadline (monotonic seconds). Returns what was not covered.

    asked: the user named the kernels, so one that cannot be loaded raises. first: takes up what an earlier
    sitting left undone. Raises BadInput, CannotRun; Ctrl-C passes through.
    """
    with WorkerPool(device=plan.device, time_limit=max(LOADING, plan.time_limit)) as workers:
        ready = prepare(plan, workers, Journal(store), lanes, asked=asked)
        if not ready.kernels:
            reasons = "; ".join(f"{r['kernel']}: {r['reason']}" for r in ready.not_covered)
            raise CannotRun(f"no kernel could be loaded ({reasons}); see gdncheck doctor")
        # Read back where Ctrl-C ends the run.
        store.remember("not_covered", ready.not_covered)
        findings = Findings(store, workers, plan, tell, first=first)
        runner = Runner(store, workers, ready.kernels, plan, findings, tell)
        if first:
            tell("ready", {"kernels": [k.subject.info.name for k in ready.kernels]})
        runner.run(deadline)
        lost = [
            {"kernel": k.subject.info.name, "what": "kernel", "reason": f"lost on the way: {k.lost}"}
            for k in ready.kernels
            if k.lost
        ]
        left = [*ready.not_covered, *lost]
        if findings.waiting:
            left.append({
                "kernel": "*", "what": f"{findings.waiting} findings", "reason": "not confirmed or shrunk "
                "in the time; go on with --resume",
            })  # fmt: skip
        store.remember("not_covered", left)
        return left

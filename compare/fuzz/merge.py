"""merge: several runs (shards of an array job, say) as one; the twin of `gdncheck merge`.

The idea: what a run counted is kept under the run's own id, so that merging twice adds nothing, and merging a
run that has gone on since replaces what it said before. Findings meet by their signatures, cases by their
numbers.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...capture.errors import BadInput, CannotRun
from ..store import FindingRow, RunStore
from .journal import UNFINISHED
from .plan import Plan
from .report import FuzzReport, report_of

ID = "id"
TIMES = "finding."
# The best that is known of a finding wins.
STATUS_ORDER = ("not-reproduced", "found", "confirmed", "to-shrink", "shrunk")
SHARD_FREE = ("shard",)


def merge(runs: Sequence[Path | str], *, out: Path | str, command: str = "") -> FuzzReport:
    """Join runs into the run `out`, which is made or added to. Sources are only read.

    Raises BadInput for a directory that holds no fuzz run, runs of different things, or `out` among them.
    """
    if not runs:
        raise BadInput("merge: name at least one run's directory")
    target = Path(out).resolve()
    if target in [Path(run).resolve() for run in runs]:
        raise BadInput(f"--out {out}: is one of the runs to be merged; name another directory")
    parameters, kernels, first = None, [], ""
    for run in runs:
        with RunStore.read(run) as source:
            own = _parameters(source, run)
            if parameters is None:
                parameters, first = own, str(run)
            elif own != parameters:
                different = sorted(n for n in {*own, *parameters} if own.get(n) != parameters.get(n))
                names = ", ".join(different)
                raise BadInput(f"{run}: is a run of something else than {first}: {names} differ")
            kernels = list(own["kernels"])
    assert parameters is not None
    resume = (target / "run.sqlite").exists()
    with RunStore.open(target, parameters=parameters, resume=resume) as store:
        for run in runs:
            with RunStore.read(run) as source:
                _add(store, source)
        _count_findings(store)
        plan = Plan(kernels=tuple(kernels), seed=parameters["seed"])
        left = store.recall("not_covered") or []
        return report_of(
            store,
            plan,
            seconds=0.0,
            stopped="cases",
            not_covered=left,
            strict=False,
            command=command,
            kept=True,
        )


def _parameters(store: RunStore, run: Path | str) -> dict[str, Any]:
    found = store.recall("parameters") or {}
    if found.get("what") not in ("fuzz", "merged fuzz"):
        raise BadInput(f"{run}: is a run of {found.get('what', 'nothing')}; merge joins runs of fuzz")
    kept = {name: value for name, value in found.items() if name not in SHARD_FREE}
    return {**kept, "what": "merged fuzz"}


def _add(store: RunStore, source: RunStore) -> None:
    """Everything of one run, in one transaction; its files first."""
    for row in source.finding_rows():
        for name in (row.case_file, row.shrunk_file, row.neighbour_file):
            if name is not None:
                _copy(source.case_path(name), store.case_path(name))
    part = source.recall(ID) or str(source.directory.resolve())
    with store.transaction():
        for name in ("cases", "corpus", "maxima", "windows"):
            _copy_rows(store, source, name)
        for own, name, value in source.execute("SELECT part, name, value FROM tallies").fetchall():
            _set(store, own or part, name, value)
        whole = not any(own for (own,) in source.execute("SELECT DISTINCT part FROM tallies").fetchall())
        for row in source.finding_rows():
            if whole:
                _set(store, part, f"{TIMES}{row.signature}", row.times)
            _add_finding(store, row)
        for raw, signature in source.execute("SELECT raw, signature FROM aliases").fetchall():
            store.findings_table.add_alias(raw, signature)
        left = [*(store.recall("not_covered") or []), *(source.recall("not_covered") or [])]
        store.remember("not_covered", [row for i, row in enumerate(left) if row not in left[:i]])


def _set(store: RunStore, part: str, name: str, value: float) -> None:
    store.execute("INSERT OR REPLACE INTO tallies VALUES (?, ?, ?)", (part, name, value))


def _copy(origin: Path, target: Path) -> None:
    if target.exists() or not origin.exists():
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_suffix(".part")
        shutil.copyfile(origin, temporary)
        temporary.replace(target)
    except OSError as error:
        reason = f"cannot be written ({error.strerror}); make room and merge again"
        raise CannotRun(f"{target}: {reason}") from None


def _copy_rows(store: RunStore, source: RunStore, table: str) -> None:
    """Rows of one table; a verdict takes the place of a case that was in flight."""
    cursor = source.execute(f"SELECT * FROM {table}")
    marks = ", ".join("?" for _ in cursor.description)
    verdict = next((i for i, column in enumerate(cursor.description) if column[0] == "verdict"), None)
    for row in cursor:
        unfinished = verdict is not None and row[verdict] in UNFINISHED
        how = "IGNORE" if unfinished else "REPLACE"
        store.execute(f"INSERT OR {how} INTO {table} VALUES ({marks})", row)


def _add_finding(store: RunStore, row: FindingRow) -> None:
    """A finding that is not there yet, or more of what is known of it."""
    known = next((r for r in store.finding_rows() if r.signature == row.signature), None)
    more = {
        "status": row.status, "failures": row.failures, "runs": row.runs,
        "shrunk_file": row.shrunk_file, "neighbour_file": row.neighbour_file,
    }  # fmt: skip
    if known is None:
        store.add_finding(
            row.identity, row.document, times=row.times, case_file=row.case_file, number=row.number,
            config=row.config, options=row.options, **more,
        )  # fmt: skip
    elif STATUS_ORDER.index(row.status) > STATUS_ORDER.index(known.status):
        store.change_finding(row.signature, document=row.document, **more)


def _count_findings(store: RunStore) -> None:
    """How often each was seen: the sum over the runs."""
    with store.transaction():
        for row in store.finding_rows():
            (times,) = store.execute(
                "SELECT sum(value) FROM tallies WHERE name = ?", (f"{TIMES}{row.signature}",)
            ).fetchone()
            if times:
                store.change_finding(row.signature, times=int(times))

"""The sweep on a terminal: a matrix of axes and values, the first failures explained, what was not covered.

The idea: one line per axis that fits 100 columns, read top down in the order of the search; below it the
answer that the tool exists for, in sentences; the last line alone (verdict, time, command) is enough to paste
somewhere.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..axes.table import AXES
from ..report import STYLES
from ..report_files import write_files
from ..report_words import full, number
from ..tunings import in_lines
from .attempt import Attempt
from .configuration import in_words
from .explain import Finding
from .jsonout import dumps
from .sweep import KernelSweep, SweepReport

WIDTH = 100
NAME_WIDTH = 13
MARKS = {
    "pass": "ok", "suspect": "suspect", "fail": "FAIL", "error": "ERROR", "timeout": "TIMEOUT",
    "out-of-contract": "bad input", "skipped": "-",
}  # fmt: skip
KIND_WORDS = {"nonfinite": "first non-finite", "wrong": "first wrong", "error": "first error"}


def print_report(report: SweepReport, console: Console) -> None:
    """Print a sweep. Nothing else is printed on stdout by the command."""
    for sweep in report.sweeps:
        for line in lines_of(sweep):
            for part in folded(line):
                console.print(part, highlight=False, soft_wrap=True)
    console.print(last_line(report), highlight=False, soft_wrap=True)


def folded(line: Text) -> Iterator[Text]:
    """A line in pieces that fit WIDTH, the later ones indented below it."""
    if len(line) <= WIDTH:
        yield line
        return
    indent = " " * (len(line.plain) - len(line.plain.lstrip()) + 4)
    at = 0
    for piece in textwrap.wrap(line.plain, WIDTH, subsequent_indent=indent):
        # Wrapping drops the spaces between pieces; styles follow the text they were given to.
        start = line.plain.index(piece.strip(), at)
        at = start + len(piece.strip())
        yield Text.assemble(piece[: len(piece) - len(piece.lstrip())], line[start:at])


def lines_of(sweep: KernelSweep) -> Iterator[Text]:
    """Everything about one kernel on one case."""
    head = f"{sweep.kernel} on {sweep.case.rsplit('/', 1)[-1]}"
    if sweep.skipped:
        yield Text(f"{head}: skipped: {sweep.skipped}")
        return
    tried = sum(a.verdict != "skipped" for a in sweep.attempts)
    size = f"{sweep.tokens} tokens, {tried} configurations in {sweep.seconds:.0f} s"
    yield Text(f"{head}: {size}", style="bold")
    yield from matrix(sweep)
    yield from _margins(sweep)
    under_contract = dict.fromkeys(d for a in sweep.attempts for d in a.contract_differences)
    if under_contract:
        yield Text(f"under its contract only: {'; '.join(under_contract)}")
    for finding in sweep.findings:
        yield from explained(finding)
    if not sweep.findings:
        yield from _no_finding(sweep)
    yield from _tuning(sweep)
    yield from _not_covered(sweep)


def _tuning(sweep: KernelSweep) -> Iterator[Text]:
    """What the tuners go by and draw; pins that never were a kernel."""
    if sweep.tuning is not None:
        yield Text("tuners:")
        yield from (Text(f"  {line}") for line in in_lines(sweep.tuning))
    for a in sweep.attempts:
        if a.uncompiled:
            yield Text(f"does not compile, so no tuner takes it: {in_words(a.deviations)}: {a.uncompiled}")


def matrix(sweep: KernelSweep) -> Iterator[Text]:
    """One row per axis: the baseline's value, then every value with its verdict."""
    by_change = {next(iter(a.deviations.items())): a for a in sweep.attempts if len(a.deviations) == 1}
    base = next((a for a in sweep.attempts if not a.deviations), None)
    for name in AXES:
        cells = [_cell(f"[{sweep.baseline[name]}]", base)]
        cells += [_cell(v, by_change.get((name, v))) for v in sweep.changes.get(name, [])]
        if len(cells) > 1:
            yield from _wrapped(name, cells)
    several = [a for a in sweep.attempts if len(a.deviations) > 1 and a.verdict != "skipped"]
    if several:
        failed = sum(a.failed for a in several)
        yield Text(f"{'combined':<{NAME_WIDTH}} {len(several)} configurations, {failed} failed")


def _cell(value: str, attempt: Attempt | None) -> Text:
    word = "not run" if attempt is None else attempt.verdict
    style = "dim" if attempt is None else STYLES[attempt.verdict]
    shown = value if len(value) <= WIDTH - NAME_WIDTH - 12 else value[: WIDTH - NAME_WIDTH - 15] + "..."
    return Text.assemble(shown, " ", (MARKS.get(word, word), style))


def _wrapped(name: str, cells: list[Text]) -> Iterator[Text]:
    """Cells in as many lines as they need, none wider than WIDTH."""
    line, start = Text(f"{name:<{NAME_WIDTH}}"), True
    for cell in cells:
        if not start and len(line) + 3 + len(cell) > WIDTH:
            yield line
            line, start = Text(" " * NAME_WIDTH), True
        line = Text.assemble(line, " " if start else "   ", cell)
        start = False
    yield line


def _margins(sweep: KernelSweep) -> Iterator[Text]:
    """How near the passing ones came."""
    passed = [a for a in sweep.attempts if a.verdict == "pass"]
    if not passed:
        return
    parts = []
    for field, words in (
        ("state_share", "largest |state| {} of its dtype's maximum"),
        ("error_over_bound", "error/bound {}"),
        ("ratio", "ratio {} (limit 1.5)"),
    ):
        known = [(getattr(a.margins, field), a) for a in passed if getattr(a.margins, field) is not None]
        if known:
            value, worst = max(known, key=lambda pair: pair[0])
            parts.append(f"{words.format(number(value))} at {in_words(worst.deviations)}")
    yield Text(f"{len(passed)} passed; worst of them: {'; '.join(parts)}")


def explained(finding: Finding) -> Iterator[Text]:
    """The answer, in sentences."""
    attempt = finding.attempt
    what = KIND_WORDS[finding.kind]
    where = "" if attempt.place is None else f": {full(attempt.place)}"
    style = STYLES[attempt.verdict]
    yield Text.assemble((f"{what}: {in_words(attempt.deviations)}", style), where)
    yield Text(f"  {attempt.reason}")
    if len(finding.found_as) > len(attempt.deviations):
        yield Text(f"  found as {in_words(finding.found_as)}, reduced to the changes that matter")
    if finding.not_reproduced:
        others = "; ".join(in_words(d) for d in finding.not_reproduced)
        yield Text(f"  failed once after other calls and not again in a fresh process: {others}")
    if not finding.confirmed:
        yield Text(
            "  NOT confirmed: it did not fail in a fresh process, so it depends on the calls before it, or "
            "comes and goes; next: gdncheck repeat"
        )
        return
    yield Text("  confirmed in a fresh process")
    if finding.neighbour is not None:
        change = ", ".join(f"{n}={v}" for n, v in finding.change.items())
        yield Text(f"  nearest that passes: the same with {change} (confirmed)")
    else:
        yield Text("  no configuration one change away was seen to pass")
    if finding.cast_points:
        yield Text(f"  cast points that matter: {', '.join(finding.cast_points)}")
    if finding.smallest_tokens is not None:
        exact = ", one fewer passes" if finding.smallest_is_exact else ", as far as time allowed"
        tokens = f"the first {finding.smallest_tokens} tokens of every sequence"
        yield Text(f"  still happens with {tokens}{exact}")
    if finding.work_around:
        ways = ["=".join(pair) for way in finding.work_around for pair in way.items()]
        yield Text(f"  work-around: {' / '.join(ways)} passes")


def _no_finding(sweep: KernelSweep) -> Iterator[Text]:
    words = {a.verdict for a in sweep.attempts}
    bad = next((a for a in sweep.attempts if a.verdict == "out-of-contract"), None)
    if bad is not None:
        next_step = "nothing else was tried; next: gdncheck inspect CASE"
        yield Text(f"{bad.reason}; {next_step}", style=STYLES["out-of-contract"])
    elif "suspect" in words:
        for a in (a for a in sweep.attempts if a.verdict == "suspect"):
            yield Text(f"suspect: {in_words(a.deviations)}: {a.reason}", style=STYLES["suspect"])
    else:
        yield Text("no configuration failed; one run each says little of rare failures: gdncheck repeat")


def _not_covered(sweep: KernelSweep) -> Iterator[Text]:
    """What the answer does not speak of, and why."""
    rows = [f"{r['axis']}={r['value']}: {r['reason']}" for r in sweep.not_covered if r["value"] != "*"]
    asked_out = [r["axis"] for r in sweep.not_covered if r["value"] == "*"]
    if asked_out:
        rows.append(f"not asked for: {', '.join(asked_out)}")
    seen: dict[str, list[str]] = {}
    for a in sweep.attempts:
        if a.verdict == "skipped" and len(a.deviations) == 1 and not a.uncompiled:
            seen.setdefault(a.reason, []).append(in_words(a.deviations))
    rows += [f"{', '.join(names)}: {reason}" for reason, names in seen.items()]
    if sweep.untried:
        rows.append(f"{sweep.untried} configurations that the budget did not reach")
    if rows:
        yield Text("not covered:")
    for row in rows:
        yield Text(f"  {row}", style="dim")


def last_line(report: SweepReport) -> Text:
    """Verdict, time, command."""
    again = f"; again: {report.command}" if report.command else ""
    return Text.assemble((report.verdict, STYLES[report.verdict]), f" in {report.seconds:.1f} s{again}")


def write_report(report: SweepReport, directory: Path) -> None:
    """report.json and report.txt in the run's directory, each whole or not at all. Raises BadInput."""
    write_files(directory, dumps(report), lambda console: print_report(report, console), width=WIDTH)

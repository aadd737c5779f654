"""The diff on a terminal: was the input sound, one table, why, what to do next, and the last line.

The idea: a person reads it top down and may stop at any line; the last line alone (verdict, time, the
command that repeats it) is enough to paste somewhere. All words come from the report's own values.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .diff import CaseInput, DiffReport
from .jsonout import dumps
from .report_files import write_files
from .report_ops import table_of_ops
from .report_words import full, number, where
from .verdict import DiffResult, Outcome, Place

STYLES = {
    "pass": "green",
    "suspect": "yellow",
    "fail": "bold red",
    "error": "bold red",
    "timeout": "bold red",
    "out-of-contract": "magenta",
    "skipped": "dim",
}


def print_report(report: DiffReport, console: Console) -> None:
    """Print a diff. Nothing else is printed on stdout by the command."""
    for row in report.inputs:
        console.print(escape(input_line(row)), highlight=False, soft_wrap=True)
    console.print(table_of(report))
    for result in report.results:
        if result.ops:
            console.print(table_of_ops(result, several=len(report.results) > 1))
    for line in reasons(report):
        console.print(line, highlight=False, soft_wrap=True)
    for line in pair_lines(report):
        console.print(escape(line), highlight=False, soft_wrap=True)
    for line in next_steps(report):
        console.print(escape(line), highlight=False, soft_wrap=True)
    console.print(last_line(report), highlight=False, soft_wrap=True)


def input_line(row: CaseInput) -> str:
    """One case: its size and whether its input is sound."""
    sequences = "1 sequence" if row.sequences == 1 else f"{row.sequences} sequences"
    size = f"{row.tokens} tokens, {sequences}, {row.heads} heads, {row.dtype}"
    sound = "input sound" if row.sound else row.reason
    remarks = "".join(f"; {remark}" for remark in row.remarks)
    return f"{row.case}: {size}: {sound}{remarks} (truth in {row.truth_seconds:.2f} s)"


def table_of(report: DiffReport) -> Table:
    """One row per result; a column for the case where there are several."""
    several = len(report.inputs) > 1
    table = Table(box=None, pad_edge=False, header_style="bold")
    if several:
        table.add_column("case", no_wrap=True)
    table.add_column("kernel", no_wrap=True)
    for name in ("verdict", "rule"):
        table.add_column(name, no_wrap=True)
    for name in ("error o", "error S", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("first fault", overflow="fold")
    table.add_column("time", justify="right", no_wrap=True)
    for result in report.results:
        ruling = result.ruling
        cells = [
            escape(result.kernel),
            f"[{STYLES[ruling.verdict]}]{verdict_word(result, report)}[/]",
            rule_of(result),
            number(ruling.error.get("output")),
            number(ruling.error.get("state")),
            number(ruling.ratio),
            escape(fault_of(result)),
            "-" if result.seconds is None else f"{result.seconds:.2f} s",
        ]
        table.add_row(*([escape(result.case.rsplit("/", 1)[-1])] if several else []), *cells)
    return table


def verdict_word(result: DiffResult, report: DiffReport) -> str:
    """A verdict reached by the caller's tolerance is marked."""
    strict = report.strict and result.verdict == "pass" and result.ruling.contract_differences
    marks = " (by tolerance)" if result.ruling.by_tolerance else ""
    return result.verdict + marks + (" (strict: counts as 1)" if strict else "")


def rule_of(result: DiffResult) -> str:
    ruling = result.ruling
    if ruling.rule is None:
        return "-"
    return f"tier {ruling.tier}: {ruling.rule}" if ruling.tier is not None else ruling.rule


def fault_of(result: DiffResult) -> str:
    """The first non-finite place, else the worst tile."""
    place: Place | None = result.ruling.first_nonfinite or result.ruling.worst_tile
    return "-" if place is None else full(place)


def reasons(report: DiffReport) -> Iterator[str]:
    """One sentence per result, and the suspects and the relations that were not run below it."""
    for result in report.results:
        style = STYLES[result.verdict]
        case = f"{result.case.rsplit('/', 1)[-1]} " if len(report.inputs) > 1 else ""
        yield f"[{style}]{escape(case + result.kernel)}[/]: {escape(result.ruling.reason)}"
        for outcome in notes(result):
            yield f"  {escape(outcome.check)}: {escape(outcome.reason)}"
        for line in (not_judged(result), *stage_lines(result), would_pass(result)):
            if line:
                yield f"  {escape(line)}"


def notes(result: DiffResult) -> list[Outcome]:
    """Outcomes worth a line although they did not decide."""
    ruling = result.ruling
    return [
        o
        for o in ruling.outcomes
        if o.reason and o.reason not in ruling.reason and (o.status in ("fires", "suspect") or _is_news(o))
    ]


def _is_news(outcome: Outcome) -> bool:
    """A relation that lost bits within what its contract allows."""
    return outcome.tier == 4 and outcome.status == "ok"


def not_judged(result: DiffResult) -> str:
    """The relations that were not asked for or could not be, by reason, on one line."""
    by_reason: dict[str, list[str]] = {}
    for outcome in result.ruling.outcomes:
        if outcome.tier == 4 and outcome.status == "not-applicable":
            by_reason.setdefault(outcome.reason.removeprefix(f"{outcome.check}: "), []).append(outcome.check)
    parts = [f"{', '.join(dict.fromkeys(names))} ({reason})" for reason, names in by_reason.items()]
    return f"relations not judged: {'; '.join(parts)}" if parts else ""


def stage_lines(result: DiffResult) -> Iterator[str]:
    """One line per stage: sound, made here or handed on, and by how much."""
    if result.stages_note:
        yield f"stages: {result.stages_note}"
    for found in result.stages:
        word = "made here" if found.made else "handed on" if found.handed_on else "sound"
        both = "made here, on top of what was handed on" if found.made and found.handed_on else word
        at = "" if found.place is None else f" at {where(found.place)}"
        yield (
            f"stage {found.stage}: {both}{at} ({number(found.ratio_fed)} times the emulation on the truth's "
            f"values, {number(found.ratio_chain)} in its own chain)"
        )


def would_pass(result: DiffResult) -> str:
    """The tolerances that the firing checks would have needed, and the checks that have none."""
    fired = {o.check: o for o in reversed(result.ruling.outcomes) if o.status == "fires"}
    parts = [
        f"{name}: " + ", ".join(f"{k} {number(v)}" for k, v in o.numbers["would_pass"].items())
        for name, o in reversed(fired.items())
        if o.numbers.get("would_pass")
    ]
    none = [name for name, o in reversed(fired.items()) if not o.numbers.get("would_pass")]
    words = [f"would have passed with {'; '.join(parts)}"] if parts else []
    words += [f"no tolerance would pass {', '.join(none)}"] if none else []
    return "; ".join(words)


def pair_lines(report: DiffReport) -> Iterator[str]:
    """Kernels against each other: what their contracts explain is taken away."""
    for pair in report.pairs:
        text = f"{pair.first} against {pair.second}: output {number(pair.difference['output'])}"
        text += f", state {number(pair.difference['state'])}"
        if pair.one_sided:
            text += (
                f"; less {', '.join(pair.one_sided)}: output {number(pair.under_contracts['output'])}, "
                f"state {number(pair.under_contracts['state'])}"
            )
        if pair.shared:
            text += f"; both have {', '.join(pair.shared)}"
        yield text


def next_steps(report: DiffReport) -> Iterator[str]:
    """What to do next, at most a line per kind of verdict."""
    words = {r.verdict for r in report.results}
    if report.first_bad_layer is not None:
        layer = report.first_bad_layer
        yield f"first bad layer: {layer}; next: gdncheck diff --layer {layer}"
    if "out-of-contract" in words:
        yield "next: the input is to blame before any kernel; see what wrote it: gdncheck inspect CASE"
    if "fail" in words:
        made = [f for r in report.results for f in r.ops if f.made and f.kernel != r.kernel]
        if made and made[0].op != "rule":
            yield f"next: {made[0].op} alone: gdncheck diff CASE --op {made[0].op} --kernel {made[0].kernel}"
        else:
            yield "next: attach the case file and this report; compare another version on it with --kernel"
    if "timeout" in words:
        yield "next: give it longer with --time-limit SECONDS, or fewer tokens with --first N"
    if "error" in words:
        yield "next: the kernel did not answer; see gdncheck doctor for known-bad combinations"
    if "suspect" in words:
        yield "next: a suspect is no proof; run it again with another --seed and with --relations all"


def last_line(report: DiffReport) -> str:
    """Verdict, time, command."""
    style = STYLES[report.verdict]
    again = f"; again: {escape(report.command)}" if report.command else ""
    return f"[{style}]{report.verdict}[/] in {report.seconds:.1f} s{again}"


def write_report(report: DiffReport, directory: Path) -> tuple[Path, Path]:
    """report.json and report.txt in a directory, each whole or not at all. Raises BadInput."""
    document, text = write_files(directory, dumps(report), lambda console: print_report(report, console))
    return document, text

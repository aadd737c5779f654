"""Reads compute-sanitizer's text: one value per kind of fault, function and line, with how often it came.

The idea: every line of the tool's starts with `=========`; a report is a headline and the lines below it up
to an empty one. Each of its tools has its own headline; what no pattern knows is kept in the tool's words, so
that a new version of it loses nothing but structure. One faulty instruction gives a report per thread, which
are counted together.

Source: the text output in NVIDIA's compute-sanitizer manual (memcheck, racecheck, initcheck, synccheck), of
2020 (`at 0x70 in FILE:LINE:FUNCTION`) and later (`at FUNCTION+0x70 in FILE:LINE`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

Kind = Literal["invalid-access", "uninitialised-read", "race", "barrier", "api-error", "other"]
PREFIX = "========="
Triple = tuple[int, int, int]

INVALID = re.compile(r"Invalid (?P<what>__\w+__ \w+|\w+)(?: of size (?P<size>[\d,]+) bytes?)?")
UNINITIALISED = re.compile(r"Uninitialized (?P<what>.*?(?:read|access))(?: of size (?P<size>[\d,]+) bytes?)?")
BARRIER = re.compile(r"Barrier error detected\.?\s*(?P<what>.*)|(?P<divergent>Divergent thread.*)")
HAZARD = re.compile(
    r"(?P<level>Error|Warning|Info)\s*:\s*(?P<what>Potential (?P<order>WAW|RAW|WAR) hazard detected.*)", re.I
)
RACE = re.compile(
    r"(?P<level>Error|Warning|Info)\s*:\s*Race reported between (?P<first>\w+) access at (?P<at>.+)", re.I
)
API = re.compile(
    r'Program hit (?P<what>.+?)(?: \(error (?P<number>\d+)\))? due to "(?P<why>.*?)"(?P<rest>.*)'
)
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (?P<count>[\d,]+) (?:error|hazard)")
# Other lines at the left edge that tell of no fault.
IGNORED = re.compile(
    r"COMPUTE-SANITIZER|LEAK SUMMARY|\w+ SUMMARY|This tool is|Target application (?:terminated|returned)"
    r"|No attachable|Warning: .*(?:suppress|deprecat)",
    re.I,
)
# What the tool says of itself: it could not look.
REFUSAL = re.compile(
    r"Device not supported|Unable to|terminated before first instrumented|Internal Sanitizer Error"
    r"|not supported|Failed to|No kernels? (?:were|was)",
    re.I,
)
AT = re.compile(
    r"(?P<function>[^+]+?)(?:\+|:)0x(?P<offset>[0-9a-fA-F]+)(?: in (?P<file>.+?):(?P<line>\d+))?$"
)
AT_OLD = re.compile(r"0x(?P<offset>[0-9a-fA-F]+) in (?:(?P<file>[^:]+):(?P<line>\d+):)?(?P<function>.+)$")
BY = re.compile(r"thread (?P<thread>\([\d, ]+\)) in block (?P<block>\([\d, ]+\))", re.I)


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What the tool reports of one instruction, in one kind."""

    kind: Kind
    what: str
    """In the tool's words: `__global__ read of size 4 bytes`."""
    level: Literal["error", "warning", "info"] = "error"
    function: str | None = None
    """The kernel's, without its arguments; None where no kernel did it (an API call)."""
    file: str | None = None
    line: int | None = None
    offset: str | None = None
    """Of the instruction in the function, hexadecimal."""
    block: Triple | None = None
    """blockIdx of the first report."""
    thread: Triple | None = None
    detail: tuple[str, ...] = ()
    """The report's further lines: address, the nearest allocation, the other access of a race."""
    times: int = 1
    """Reports of it."""


class SanitizerLog(msgspec.Struct, frozen=True, kw_only=True):
    """A whole log."""

    faults: tuple[Fault, ...]
    total: int | None
    """As the tool's last line counts; None where it never came to write one."""
    refusals: tuple[str, ...] = ()
    """Why the tool could not look."""


def read_log(text: str) -> SanitizerLog:
    """Everything that a log tells."""
    found: dict[tuple[object, ...], Fault] = {}
    refusals: list[str] = []
    totals = [int(m["count"].replace(",", "")) for m in SUMMARY.finditer(text)]
    for headline, below in _reports(text.splitlines()):
        if REFUSAL.search(headline):
            refusals.append(headline)
            continue
        if IGNORED.match(headline):
            continue
        fault = _fault(headline, below)
        key = (fault.kind, fault.what, fault.level, fault.function, fault.file, fault.line, fault.offset)
        before = found.get(key)
        found[key] = fault if before is None else msgspec.structs.replace(before, times=before.times + 1)
    return SanitizerLog(
        faults=tuple(found.values()), total=sum(totals) if totals else None, refusals=tuple(refusals)
    )


def _reports(lines: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """(headline, lines below it). A line at the left edge begins a report; indented ones belong to it."""
    headline, below = "", list[str]()
    for line in lines:
        if not line.startswith(PREFIX):
            continue  # the program's own output
        text = line[len(PREFIX) :]
        indented = text.startswith("    ")
        # The second half of a race's sentence stands below its headline; not every version indents it.
        if headline and (indented or text.strip().startswith("and ")):
            below.append(text.strip())
            continue
        if headline:
            yield headline, below
        headline, below = text.strip(), []
    if headline:
        yield headline, below


def _fault(headline: str, below: list[str]) -> Fault:
    kind, what, level, at = _headline(headline)
    detail: list[str] = []
    where: re.Match[str] | None = _location(at) if at else None
    by: re.Match[str] | None = BY.search(headline)
    for line in below:
        place = re.match(r"(?:at|(?:Read|Write) Thread \([\d, ]+\) at) (?P<at>.+)", line)
        if where is None and place is not None:
            where = _location(place["at"])
            if where is not None and line.startswith("at "):
                continue
        if by is None and (by := BY.search(line)) is not None and line.startswith("by "):
            continue
        detail.append(line)
    groups = {} if where is None else where.groupdict()
    return Fault(
        kind=kind,
        what=what,
        level=level,
        function=plain_name(groups["function"]) if groups else None,
        file=groups.get("file"),
        line=int(groups["line"]) if groups.get("line") else None,
        offset=f"0x{int(groups['offset'], 16):x}" if groups.get("offset") else None,
        block=_triple(by["block"]) if by is not None else _block_of(headline),
        thread=_triple(by["thread"]) if by is not None else None,
        detail=tuple(detail),
    )


def _headline(text: str) -> tuple[Kind, str, Literal["error", "warning", "info"], str | None]:
    """Kind, words, level and, of a race, where its first access is."""
    if match := API.match(text):
        number = f" (error {match['number']})" if match["number"] else ""
        return (
            "api-error",
            f"{match['what']}{number}: {match['why']}{match['rest'].rstrip('.')}",
            "error",
            None,
        )
    if match := RACE.match(text):
        return "race", f"race with a {match['first'].lower()} access", _level(match["level"]), match["at"]
    if match := HAZARD.match(text):
        # Its address and block differ from report to report of the same two lines.
        return "race", f"potential {match['order'].upper()} hazard", _level(match["level"]), None
    if match := INVALID.match(text):
        return "invalid-access", _sized(match), "error", None
    if match := UNINITIALISED.match(text):
        return "uninitialised-read", _sized(match), "error", None
    if match := BARRIER.match(text):
        return "barrier", (match["what"] or match["divergent"] or "barrier error").strip(), "error", None
    return "other", text, _level(text), None


def _level(word: str) -> Literal["error", "warning", "info"]:
    word = word.lower()
    return "warning" if word.startswith("warn") else "info" if word.startswith("info") else "error"


def _sized(match: re.Match[str]) -> str:
    size = f" of size {match['size']} bytes" if match["size"] else ""
    return f"{match['what']}{size}"


def _location(text: str) -> re.Match[str] | None:
    text = re.sub(r"\s*\[[\d,]+ hazards?\]\s*$", "", text.strip())
    return AT_OLD.match(text) if text.startswith("0x") else AT.match(text)


def plain_name(function: str) -> str:
    """`void name<T>(int*)` and `name()` without return type, arguments and template."""
    name = function.replace("(anonymous namespace)::", "").strip()
    name = re.sub(r"\(.*$", "", name)
    name = re.sub(r"<.*$", "", name)
    return name.split()[-1] if name.split() else function.strip()


def _triple(text: str) -> Triple:
    x, y, z = (int(number) for number in text.strip("()").split(","))
    return x, y, z


def _block_of(headline: str) -> Triple | None:
    match = re.search(r"in block (\([\d, ]+\))", headline)
    return None if match is None else _triple(match[1])

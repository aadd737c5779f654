"""What a sweep tries, and in what order: fewest deviations first, then the table of axes.

The idea: an order is a generator of configurations, so that a budget can end it anywhere. Depth 1 is every
single change; depth 2 adds a covering array, rows in which every pair of changes of different axes occurs at
least once (a row has many changes, so it takes far fewer runs than pairs; what fails is reduced afterwards);
full is the whole product.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ...capture.errors import BadInput
from ..axes.axis import Situation
from ..axes.table import AXES, check_names, value_of
from .configuration import Configuration, configuration_of

Change = tuple[str, str]
DEPTHS = ("1", "2", "full")


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Which axes and values a user asked for."""

    values: dict[str, tuple[str, ...]] = {}
    """Axis -> values in place of its own."""
    only: tuple[str, ...] = ()
    excepted: tuple[str, ...] = ()

    def takes(self, name: str) -> bool:
        return name not in self.excepted and (not self.only or name in self.only)


def choice_of(axes: Mapping[str, Sequence[str]], only: Sequence[str], excepted: Sequence[str]) -> Choice:
    """Check what a user asked for. Raises BadInput for an unknown axis or a word that is no value of it."""
    check_names(axes, "--axis")
    check_names(only, "--only")
    check_names(excepted, "--except")
    both = sorted(set(only) & set(excepted))
    if both:
        raise BadInput(f"--only and --except both name {', '.join(both)}; leave one out")
    values = {n: tuple(dict.fromkeys(value_of(n, v, "--axis") for v in given)) for n, given in axes.items()}
    empty = [name for name, given in values.items() if not given]
    if empty:
        raise BadInput(f"--axis {empty[0]}: give at least one value, e.g. {AXES[empty[0]].grammar}")
    choice = Choice(values=values, only=tuple(only), excepted=tuple(excepted))
    unused = [name for name in values if not choice.takes(name)]
    if unused:
        raise BadInput(f"--axis {unused[0]} is left out by --only or --except; name it or leave it")
    return choice


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The changes that can be tried here, and why others cannot."""

    changes: dict[str, list[str]]
    """Axis -> values other than the baseline's."""
    not_covered: list[dict[str, str]]
    """{axis, value, reason} of what was declared and cannot be tried."""


def plan_of(choice: Choice, situation: Situation, baseline: Mapping[str, str]) -> Plan:
    """Walk the table: what can be changed for this kernel on this case."""
    changes: dict[str, list[str]] = {}
    left: list[dict[str, str]] = []
    for name, axis in AXES.items():
        if not choice.takes(name):
            left.append({"axis": name, "value": "*", "reason": "not asked for"})
            continue
        given = choice.values.get(name)
        for value in axis.values(situation) if given is None else given:
            if value == baseline[name]:
                continue
            reason = axis.refuses(situation, value)
            if reason:
                left.append({"axis": name, "value": value, "reason": reason})
            else:
                changes.setdefault(name, []).append(value)
    return Plan(changes=changes, not_covered=_grouped(left))


def _grouped(left: list[dict[str, str]]) -> list[dict[str, str]]:
    """Values of one axis with one reason share a line."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in left:
        found.setdefault((row["axis"], row["reason"]), []).append(row["value"])
    return [{"axis": a, "value": ", ".join(values), "reason": r} for (a, r), values in found.items()]


def singles(plan: Plan, baseline: Configuration) -> Iterator[Configuration]:
    """The baseline, then every single change, in the table's order."""
    yield baseline
    for name, values in plan.changes.items():
        for value in values:
            yield configuration_of({name: value}, baseline)


def product(plan: Plan, baseline: Configuration) -> Iterator[Configuration]:
    """Every combination of two changes or more, fewest first."""
    names = list(plan.changes)
    for count in range(2, len(names) + 1):
        for chosen in itertools.combinations(names, count):
            for values in itertools.product(*(plan.changes[n] for n in chosen)):
                yield configuration_of(dict(zip(chosen, values, strict=True)), baseline)


def product_size(plan: Plan) -> int:
    """How many configurations the whole product has, the baseline and single changes among them."""
    size = 1
    for values in plan.changes.values():
        size *= 1 + len(values)
    return size


class Covering:
    """A covering array of pairs, made row by row; `without` leaves out changes that fail by themselves.

    Greedy: each row takes, axis by axis, the value that covers most pairs that are still missing. A row that
    could not be run covers nothing: `again` gives its pairs back, to be tried two by two.
    """

    def __init__(self, changes: Mapping[str, Sequence[str]], *, without: set[Change]) -> None:
        self.changes = {
            name: kept
            for name, values in changes.items()
            if (kept := [v for v in values if (name, v) not in without])
        }
        every = [(name, value) for name, values in self.changes.items() for value in values]
        self.missing: dict[tuple[Change, Change], None] = {
            (a, b): None for a, b in itertools.combinations(every, 2) if a[0] != b[0]
        }
        self.alone: list[dict[str, str]] = []
        self._forbidden: list[dict[str, str]] = []

    def rows(self) -> Iterator[dict[str, str]]:
        """Deviations of the next row, until every pair has been in one."""
        while self.missing or self.alone:
            row = self.alone.pop(0) if self.alone else self._row()
            for pair in _pairs(row):
                self.missing.pop(pair, None)
            if len(row) > 1 and not self._hopeless(row):
                yield row

    def forbid(self, blamed: Mapping[str, str]) -> None:
        """These changes fail together: no further row is to hold them all, as they would hide the rest."""
        if blamed:
            self._forbidden.append(dict(blamed))

    def _hopeless(self, row: Mapping[str, str]) -> bool:
        return any(blamed.items() <= row.items() for blamed in self._forbidden)

    def again(self, row: Mapping[str, str]) -> None:
        """The row told nothing: its pairs are tried one by one."""
        if len(row) > 2:
            self.alone += [{a: row[a], b: row[b]} for a, b in itertools.combinations(row, 2)]

    def _row(self) -> dict[str, str]:
        """Start from the change with most pairs missing; add whichever change covers most of them."""
        weight: dict[Change, int] = {}
        for pair in self.missing:
            for change in pair:
                weight[change] = weight.get(change, 0) + 1
        row = dict([max(weight, key=lambda c: weight[c])])
        while True:
            best, most = None, (0, 0)
            for name, value in weight:
                if name in row or self._hopeless({**row, name: value}):
                    continue
                gain = sum(self._key((name, value), c) in self.missing for c in row.items())
                if gain and (gain, weight[name, value]) > most:
                    best, most = (name, value), (gain, weight[name, value])
            if best is None:
                break
            row[best[0]] = best[1]
        if len(row) == 1:
            # Every partner would complete what is known to fail: nothing is left to learn of this change.
            alone = next(iter(row.items()))
            self.missing = {pair: None for pair in self.missing if alone not in pair}
        return {name: row[name] for name in self.changes if name in row}

    def _key(self, a: Change, b: Change) -> tuple[Change, Change]:
        names = list(self.changes)
        return (a, b) if names.index(a[0]) < names.index(b[0]) else (b, a)


def _pairs(row: Mapping[str, Any]) -> Iterator[tuple[Change, Change]]:
    yield from itertools.combinations(row.items(), 2)

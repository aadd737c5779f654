"""A configuration: one value for every axis; what deviates from the baseline; the setup it means.

The idea: a configuration is plain data with one canonical key, so that it is the same thing on the command
line, in the store and in a report. Order decides what is found first: fewest deviations, then the table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ..axes.axis import Setup, Situation
from ..axes.table import AXES

Configuration = dict[str, str]


def deviations_of(configuration: Mapping[str, str], baseline: Mapping[str, str]) -> dict[str, str]:
    """{axis: value} where a configuration departs from the baseline, in the table's order."""
    return {n: configuration[n] for n in AXES if n in baseline and configuration[n] != baseline[n]}


def configuration_of(deviations: Mapping[str, str], baseline: Mapping[str, str]) -> Configuration:
    """The baseline with some axes changed, in the table's order."""
    return {n: deviations.get(n, baseline[n]) for n in AXES if n in baseline}


def key_of(configuration: Mapping[str, str]) -> str:
    """One text for one configuration, for stores and caches."""
    return json.dumps({n: configuration[n] for n in AXES if n in configuration})


def in_words(deviations: Mapping[str, str]) -> str:
    """`split=at-65, state_dtype=bfloat16`, or `the baseline`."""
    return ", ".join(f"{name}={value}" for name, value in deviations.items()) or "the baseline"


def setup_of(configuration: Mapping[str, str], situation: Situation) -> Setup:
    """Apply every axis to the case: heads first, neighbours after states, the engine last."""
    case = situation.case
    setup = Setup(
        case=case,
        own=tuple(range(case.n_sequences)),
        chunk_size=situation.chunk_size,
        seed=situation.seed,
    )
    for name in sorted(configuration, key=lambda n: AXES[n].order):
        setup = AXES[name].apply(setup, configuration[name])
    return setup


def refusals(configuration: Mapping[str, str], situation: Situation) -> dict[str, str]:
    """Axis -> why its value cannot be tried."""
    found = {name: AXES[name].refuses(situation, value) for name, value in configuration.items()}
    return {name: reason for name, reason in found.items() if reason}

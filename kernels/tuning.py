"""What Triton's tuners offer: each kernel's configurations, what its choice is remembered by, and what not.

The one idea: a tuner times its configurations once per key and serves every later call with the winner, so
an argument that is not in the key (the number of tokens, as a rule) is one for which the choice was never
made. That is read off the tuner that a call passed, not from a table of ours.

Runs inside a worker. Leaves to others: making a kernel launch one of them (`autotune`), sweeping (compare).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import autotune
from .interface import RunOptions

_told: set[str] = set()
"""Kernels whose tuner this process has already described."""


@contextmanager
def tuner_account(options: RunOptions, evidence: dict[str, Any]) -> Iterator[None]:
    """Pins and tuning as a call asks, and evidence of what was launched, however the call ends.

    `launched`: kernel -> configuration; `pins_unused`; `compile_failures`; and, once per process, `tuners`:
    what each tuner that ran offers.
    """
    if "triton.runtime.autotuner" in sys.modules:
        autotune.install()
    with autotune.pinned(options.pins, options.tune) as launched:
        try:
            yield
        finally:
            failed = autotune.compile_failures
            if launched:
                evidence["launched"] = dict(launched)
            unused = sorted(set(options.pins) - {autotune.ANY, *launched, *failed})
            if unused:
                evidence["pins_unused"] = unused
            if failed:
                evidence["compile_failures"] = dict(failed)
            evidence |= _news(launched)


def _news(launched: dict[str, str]) -> dict[str, Any]:
    """`tuners`: facts of those that ran for the first time in this process."""
    new = [name for name in launched if name not in _told]
    _told.update(new)
    return {"tuners": [tuner_facts(*autotune.seen[name]) for name in new]} if new else {}


def tuner_facts(tuner: Any, scalars: frozenset[str]) -> dict[str, Any]:
    """One tuner as data: kernel, configurations (as pins, in its own order), key, what the key leaves out.

    scalars: arguments of a launch that are no tensors. Triton adds each tensor's dtype to the key, and
    no shape.
    """
    tuned = {name for config in tuner.configs for name in config.kwargs}
    known = {*tuner.keys, *tuned}
    return {
        "kernel": autotune.kernel_name(tuner),
        "configurations": [configuration(config) for config in tuner.configs],
        "key": list(tuner.keys),
        "left_out": [name for name in tuner.arg_names if name in scalars and name not in known],
        "kept_on_disk": bool(getattr(tuner, "cache_results", False)),
        "pruned": getattr(tuner, "early_config_prune", None) is not None,
        "seconds_over_best": timings_over_best(tuner),
    }


def configuration(config: Any) -> dict[str, Any]:
    """A configuration as a pin: its meta-parameters, warps and stages."""
    return {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}


def timings_over_best(tuner: Any) -> dict[str, float]:
    """Configuration -> median time in the last tuning over the winner's; empty where none was timed."""
    timings = getattr(tuner, "configs_timings", None) or {}
    medians = {autotune.describe(c): (t[0] if isinstance(t, list | tuple) else t) for c, t in timings.items()}
    best = min(medians.values(), default=0.0)
    return {name: value / best for name, value in medians.items()} if best > 0 else {}

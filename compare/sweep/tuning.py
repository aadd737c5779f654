"""What the sweep of one kernel adds to its pins: the tuners themselves, and what they pick when asked again.

The idea: made last, since it leaves the process with choices of its own; kept in the run's store once it is
whole, so that a resumed sweep gives the same counts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

import msgspec

from ...capture.errors import BadInput
from ..store import RunStore
from ..tunings import TUNED_AT, TuningAccount, check_tunings, tuners_of, tuning_account
from .kernel_runs import KernelRuns
from .plan import Choice

Say = Callable[[str, int, int | None], None]


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """How a sweep treats tuned kernels."""

    tunings: int = 0
    """Fresh tunings at each length."""
    tuned_at: Sequence[int] = TUNED_AT
    pin_runs: int | None = None
    """Runs of every pin; None: several on a GPU, where a race moves bits, and one in the interpreter."""


def wish_of(choice: Choice, pin_runs: int | None, tunings: int, tuned_at: Sequence[int]) -> Wish:
    """Check what a user asked for. Raises BadInput."""
    check_tunings(tunings, tuned_at)
    if pin_runs is not None and pin_runs < 1:
        raise BadInput(f"pin_runs is {pin_runs}; give 1 or more")
    if tunings and not choice.takes("autotune"):
        raise BadInput(f"{tunings} tunings of the axis autotune, which --only or --except leaves out")
    return Wish(pin_runs=pin_runs, tunings=tunings, tuned_at=tuple(tuned_at))


def account_of(
    runs: KernelRuns,
    wish: Wish,
    *,
    case_digest: str,
    store: RunStore | None,
    deadline: float,
    say: Say | None,
) -> TuningAccount | None:
    """The tuners that the baseline's call passed; None where it passed none and no tuning was asked for."""
    tuners = tuners_of([runs.situation.evidence])
    if not tuners and not wish.tunings:
        return None
    key = "tunings " + json.dumps([runs.info.name, case_digest, wish.tunings, list(wish.tuned_at)])
    known = None if store is None or not wish.tunings else store.recall(key)
    if known is not None:
        return msgspec.convert(known, TuningAccount, strict=False)
    account = tuning_account(
        runs.handle, runs.situation.case, tuners, wish.tunings, wish.tuned_at,
        say=say or (lambda text, done, total: None), late=lambda: time.monotonic() > deadline,
    )  # fmt: skip
    whole = all(table.n == wish.tunings for table in account.tunings)
    if store is not None and account.tunings and whole:
        store.remember(key, msgspec.to_builtins(account))
    return account

"""What an axis is: one dimension in which a call may depart from production, declared as data.

The idea: a configuration is a dictionary {axis: value}, both plain words, so that it can be typed, stored and
compared. Each axis turns one word into a change of a `Setup` (the case, the call's options, the engine around
it), says which words make sense here, what the result must satisfy, and how to prove that the change was
really made. Running and judging a setup is `compare.sweep`'s business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec
from torch import Tensor

from ...capture.case import Case
from ...kernels.interface import KernelInfo
from ..verdict import Outcome

Fill = Literal["zeros", "nan", "huge", "tenant"]


def on_gpu(info: KernelInfo) -> bool:
    """Whether the kernel's worker runs on a GPU."""
    return str(info.environment.get("device", "cpu")).startswith("cuda")


class Situation(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What an axis may look at to say which of its values make sense."""

    case: Case
    info: KernelInfo
    seed: int = 0
    evidence: dict[str, Any] = {}
    """Of a call of the baseline in this kernel's worker; empty before one was made."""

    @property
    def on_gpu(self) -> bool:
        return on_gpu(self.info)

    @property
    def chunk_size(self) -> int | None:
        """Chunk that the kernel works in by itself; None: it has none."""
        return self.info.capabilities.default_chunk_size


class SlotPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How the simulated state pool looks before the first call."""

    fill: Fill = "zeros"
    """What slots hold that no sequence owns, and the own slot of a sequence that starts fresh."""
    reversed: bool = False
    """Sequences take their slots in reverse order, with gaps between."""
    padding: int = 0
    """Padded rows with slot index -1 at the end of every call."""


class Setup(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One configuration, applied: what is called, in what engine, and what of it is judged."""

    case: Case
    """As called, whole; the truth is that of this case."""
    own: tuple[int, ...]
    """Sequences of `case` that are the original case's own, in its order."""
    judged: Literal["all", "own"] = "all"
    """`own`: what a neighbour returns is nobody's business (it was handed NaN, say)."""
    options: dict[str, Any] = {}
    """Fields of `RunOptions` beyond scale and qk."""
    chunk_size: int | None = None
    """Chunk that the kernel works in, for tiles and yardsticks."""
    split: str = "none"
    state_dtype: str | None = None
    """dtype of the pool that hands the state on; None: as the kernel returns it."""
    slots: SlotPlan | None = None
    """A simulated pool; None where nothing needs one."""
    life: str = "prefill"
    """Name of the history that the sequences go through (`life.named`)."""
    runs: int = 1
    process: Literal["warm", "first", "fresh"] = "warm"
    """`warm`: after a call that is thrown away; `first`: the very first call of a process; `fresh`: a process
    of its own, warm."""
    stochastic: bool = False
    """The kernel rounds at random: its honest error is sqrt(2) times that of rounding to nearest."""
    seed: int = 0

    @property
    def through_pool(self) -> bool:
        return self.split != "none" or self.state_dtype is not None or self.slots is not None


class Ran(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What came back for a setup: the outputs put together, or why there are none."""

    status: Literal["ok", "error", "timeout", "crash", "refused", "shape"]
    output: Tensor | None = None
    """[T, HV, V] in the order of the setup's case."""
    state: Tensor | None = None
    """[N, HV, K, V]."""
    seconds: float = 0.0
    """Of the kernel alone, all calls together."""
    message: str = ""
    evidence: dict[str, Any] = {}
    calls: int = 1
    further: tuple[Outcome, ...] = ()
    """What the pool showed (slots that nobody owns)."""


def anything(text: str) -> bool:
    """Every word is a value."""
    return True


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    """One dimension of the sweep."""

    name: str
    what: str
    """What varies, for help and reports."""
    relation: str
    """What the result of a value must satisfy, in one sentence."""
    baseline: Callable[[Situation], str]
    """The value that production runs unless a baseline file says otherwise."""
    values: Callable[[Situation], list[str]]
    """Values to try here, in order; the baseline may be among them."""
    refuses: Callable[[Situation, str], str]
    """Why a value cannot be tried on this kernel, case or machine; empty: it can."""
    apply: Callable[[Setup, str], Setup]
    exercised: Callable[[Setup, Ran], str]
    """Proof, in words with a count, that the run had the change; empty: it had not."""
    valid: Callable[[str], bool] = anything
    """Whether a word that a user typed is a value at all."""
    grammar: str = ""
    """What values look like, for the message about one that is none."""
    order: int = 0
    """Setups are built in this order: the share of heads first, neighbours after states, the engine last."""
    same_bits: Callable[[str], str] | None = None
    """Relation of the contract under which a value must give the baseline's bits; empty or None: no such."""
    work_around: bool = False
    """An engine could run another value in production."""
    alias: Callable[[str], str] | None = None
    """Brings other spellings of a value to the one that is printed."""


def always(value: str) -> Callable[[Situation], str]:
    """A baseline that does not depend on the kernel."""
    return lambda situation: value


def never_refuses(situation: Situation, value: str) -> str:
    """Every value can be tried."""
    return ""

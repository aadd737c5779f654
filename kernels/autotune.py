"""Which configuration each autotuned Triton kernel launches: recorded, pinned, or cut to one.

The one idea: every choice goes through `Autotuner.run`, so one replacement of that method sees all of
them. Installed with `cut_to_one` (Triton's interpreter, where there is nothing to time and the stock
tuner asks for a driver) it takes one configuration without tuning; a pinned kernel takes its pin, on
a GPU too; otherwise the tuner chooses as ever and its choice is recorded. Two further ways to choose:
`never` takes the first configuration that this GPU can hold and times nothing, so that a cold process
answers soon; `fresh` forgets what was tuned before and asks the tuner again. GDNCHECK_TUNE=never|fresh in a
worker's environment is how it chooses where a call does not say.

Upstream: Triton 3.2 to 3.9, `triton.runtime.autotuner.Autotuner`. What a tuner offers and goes by is
told by `tuning`; who sweeps the pins is the caller's business. Names are those of the jitted functions.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args

from ..capture.errors import BadInput, Refused

Tune = Literal["stock", "never", "fresh"]
TUNE_VARIABLE = "GDNCHECK_TUNE"
ANY = "*"
"""A pin under this name holds for every autotuned kernel that has none of its own."""

seen: dict[str, tuple[Any, frozenset[str]]] = {}
"""Every autotuner that was run in this process, by its kernel's name, with the arguments that last had a
value and no dtype: scalars and flags."""
compile_failures: dict[str, str] = {}
"""Kernel -> configuration and message, of pins that could not be compiled or loaded; per `pinned`."""
_pins: dict[str, Mapping[str, Any]] = {}
_launched: dict[str, str] = {}
_tune: Tune = "stock"
_tuned_afresh: set[str] = set()
_cut_to_one = False


def install(cut_to_one: bool = False) -> None:
    """Replace `Autotuner.run` (imports triton). Repeating is harmless; `cut_to_one` stays once asked for."""
    global _cut_to_one, _tune
    _cut_to_one = _cut_to_one or cut_to_one
    from triton.runtime.autotuner import Autotuner

    if cut_to_one:
        _need_no_driver(Autotuner)
    if getattr(Autotuner, "_gdncheck_run", None) is not None:
        return
    _tune = tuning_of_process()
    stock_run = Autotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = kernel_name(self)
        seen[name] = self, _scalars(self, args, kwargs)
        candidates = _candidates(self, name, args, kwargs)
        if candidates is None:
            if _tune == "fresh" and name not in _tuned_afresh:
                forget(self)
                _tuned_afresh.add(name)
            result = stock_run(self, *args, **kwargs)
            _launched[name] = describe(self.best_config)
            return result
        return _run_first_that_fits(stock_run, self, name, candidates, args, kwargs)

    Autotuner._gdncheck_run = stock_run
    Autotuner.run = run


def _need_no_driver(autotuner: Any) -> None:
    """Give the tuner a stopwatch, never used: Triton 3.2 asks a GPU's driver for one at declaration."""
    stock = autotuner.__init__
    if getattr(stock, "_gdncheck", False) or "do_bench" not in inspect.signature(stock).parameters:
        return

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("do_bench") is None:
            kwargs["do_bench"] = _nothing_to_time
        stock(self, *args, **kwargs)

    init._gdncheck = True  # type: ignore[attr-defined]
    autotuner.__init__ = init


def _nothing_to_time(*args: Any, **kwargs: Any) -> float:
    raise AssertionError("one configuration is chosen without timing in the interpreter")


@contextmanager
def pinned(pins: Mapping[str, Mapping[str, Any]], tune: Tune | None = None) -> Iterator[dict[str, str]]:
    """Within it, kernel NAME launches the configuration that matches pins[NAME].

    A pin gives any of its values, e.g. {"BK": 64, "num_warps": 4}; one under `*` is for all kernels
    without their own. tune: how the others choose; `stock`: as $GDNCHECK_TUNE says, else as their tuner
    does; None leaves that as it is. Yields the record kernel -> configuration of everything autotuned
    that is launched meanwhile. Raises BadInput for a word in the variable that is none of the three.
    """
    global _pins, _tune
    chosen = tuning_of_process() if tune == "stock" else tune or _tune
    before, _pins = _pins, {name: dict(pin) for name, pin in pins.items()}
    how, _tune = _tune, chosen
    _launched.clear()
    compile_failures.clear()
    _tuned_afresh.clear()
    try:
        yield _launched
    finally:
        _pins, _tune = before, how


def tuning_of_process() -> Tune:
    """How kernels choose in this process: $GDNCHECK_TUNE. Raises BadInput where it is none of the words."""
    word = os.environ.get(TUNE_VARIABLE) or "stock"
    if word not in get_args(Tune):
        raise BadInput(f"{TUNE_VARIABLE} is {word!r}; use {', '.join(get_args(Tune))}")
    known: Tune = word  # type: ignore[assignment]
    return known


def forget(autotuner: Any) -> None:
    """Let the tuner time everything again at its next run: no memory, and no file of an earlier process."""
    autotuner.cache.clear()
    autotuner.cache_results = False


def _scalars(autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[str]:
    """Arguments of a launch that are no tensors; one left None is a tensor that is not there."""
    given = {**dict(zip(autotuner.arg_names, args, strict=False)), **kwargs}
    return frozenset(
        name
        for name in autotuner.arg_names
        if given.get(name) is not None and not hasattr(given[name], "dtype")
    )


def kernel_name(autotuner: Any) -> str:
    """Name of the jitted function inside an autotuner's wrappers."""
    function = autotuner.fn
    while hasattr(function, "fn"):
        function = function.fn
    return str(function.__name__)


def describe(config: Any) -> str:
    """A configuration on one line: its meta-parameters, warps and stages."""
    meta = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
    return ", ".join(f"{key}={value}" for key, value in meta.items())


def _candidates(autotuner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Configurations to launch, the first that fits; None to let the tuner choose."""
    pin = _pins.get(name, _pins.get(ANY))
    if pin is not None:
        return [_matching(autotuner.configs, name, pin)]
    if len(autotuner.configs) == 1 or not (_cut_to_one or _tune == "never"):
        return None
    autotuner.nargs = dict(zip(autotuner.arg_names, args, strict=False))
    possible = list(autotuner.prune_configs(kwargs))
    if not _cut_to_one:
        return possible
    # The interpreter pays per operation, not per element: the largest blocks are the fewest programs.
    return [max(possible, key=_block_size)]


def _run_first_that_fits(
    stock_run: Any, autotuner: Any, name: str, candidates: list[Any], args: Any, kwargs: Any
) -> Any:
    """Launch the first candidate that compiles and loads; what fails is recorded, the last one raises."""
    everything = autotuner.configs
    for chosen in candidates:
        autotuner.configs = [chosen]
        try:
            result = stock_run(autotuner, *args, **kwargs)
        except Exception as error:
            if not is_compile_failure(error):
                raise
            compile_failures[name] = f"{describe(chosen)}: {type(error).__name__}: {error}"
            if chosen is candidates[-1]:
                raise
        else:
            _launched[name] = describe(chosen)
            return result
        finally:
            autotuner.configs = everything
    raise AssertionError("the tuner pruned every configuration")


def is_compile_failure(error: BaseException) -> bool:
    """Whether a kernel was never launched: it did not compile, or the GPU cannot hold it."""
    names = {"CompilationError", "CompileTimeAssertionFailure", "OutOfResources", "PTXASError"}
    return any(kind.__name__ in names for kind in type(error).__mro__)


def _block_size(config: Any) -> int:
    return math.prod(v for v in config.kwargs.values() if isinstance(v, int) and not isinstance(v, bool))


def _matching(configs: list[Any], name: str, pin: Mapping[str, Any]) -> Any:
    """The first configuration that has every value of the pin. Raises Refused where none has."""
    for config in configs:
        have = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
        if all(have.get(key) == value for key, value in pin.items()):
            return config
    known = "; ".join(describe(config) for config in configs[:4])
    raise Refused(f"pin {dict(pin)} matches no configuration of {name}; it has {len(configs)}, e.g. {known}")

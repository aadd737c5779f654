"""Which configuration each autotuned Triton kernel launches: recorded, pinned, or cut to one.

The one idea: every choice goes through `Autotuner.run`, so one replacement of that method sees all of
them. Installed with `cut_to_one` (Triton's interpreter, where there is nothing to time and the stock
tuner asks for a driver) it takes one configuration without tuning; a pinned kernel takes its pin, on
a GPU too; otherwise the tuner chooses as ever and its choice is recorded.

Upstream: Triton 3.2 to 3.9, `triton.runtime.autotuner.Autotuner`. Which pins a kernel has and who
sweeps them is the caller's business. Names are those of the jitted functions.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..capture.errors import Refused

_pins: dict[str, Mapping[str, Any]] = {}
_launched: dict[str, str] = {}
_cut_to_one = False


def install(cut_to_one: bool = False) -> None:
    """Replace `Autotuner.run` (imports triton). Repeating is harmless; `cut_to_one` stays once asked for."""
    global _cut_to_one
    _cut_to_one = _cut_to_one or cut_to_one
    from triton.runtime.autotuner import Autotuner

    if cut_to_one:
        _need_no_driver(Autotuner)
    if getattr(Autotuner, "_gdncheck_run", None) is not None:
        return
    stock_run = Autotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = kernel_name(self)
        chosen = _choice(self, name, args, kwargs)
        if chosen is None:
            result = stock_run(self, *args, **kwargs)
            _launched[name] = describe(self.best_config)
            return result
        everything = self.configs
        self.configs = [chosen]
        try:
            return stock_run(self, *args, **kwargs)
        finally:
            self.configs = everything
            _launched[name] = describe(chosen)

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
def pinned(pins: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """Within it, kernel NAME launches the configuration that matches pins[NAME].

    A pin gives any of its values, e.g. {"BK": 64, "num_warps": 4}. Yields the record kernel ->
    configuration of everything autotuned that is launched meanwhile.
    """
    global _pins
    before, _pins = _pins, {name: dict(pin) for name, pin in pins.items()}
    _launched.clear()
    try:
        yield _launched
    finally:
        _pins = before


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


def _choice(autotuner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The configuration to launch, or None to let the tuner choose."""
    if name in _pins:
        return _matching(autotuner.configs, name, _pins[name])
    if not _cut_to_one or len(autotuner.configs) == 1:
        return None
    autotuner.nargs = dict(zip(autotuner.arg_names, args, strict=False))
    # The interpreter pays per operation, not per element: the largest blocks are the fewest programs.
    return max(list(autotuner.prune_configs(kwargs)), key=_block_size)


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

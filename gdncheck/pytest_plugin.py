"""pytest: fuzz a kernel of one's own as a test, with a fixed seed and a budget of cases.

The idea: a test names a kernel; the cases, the worker process, the verdict and the shrinking are gdncheck's.
A decorator for a test that returns the kernel, a fixture for one that makes its own calls:

    from gdncheck.pytest_plugin import gdncheck_fuzz

    @gdncheck_fuzz(cases=50, seed=0, dims=(64, 64))
    def test_my_rule():
        return my_kernels.my_rule

    def test_both(gdncheck_fuzz):
        gdncheck_fuzz("my_kernels:my_rule", cases=20)

It is loaded by every pytest run of an environment that has gdncheck, so it imports nothing but pytest.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Kernel = str | Callable[..., Any]
# Options that say how to run, not what to draw.
RUNNING = ("shrink_seconds", "device", "time_limit")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gdncheck")
    words = "Cases of every gdncheck_fuzz test, whatever it asks for."
    group.addoption("--gdncheck-cases", type=int, metavar="N", help=words)
    parser.addini("gdncheck_directory", "where failing cases are kept, below the root", default=".gdncheck")


def gdncheck_fuzz(
    *,
    cases: int = 50,
    seed: int = 0,
    **options: Any,
) -> Callable[[Callable[..., Kernel]], Callable[..., None]]:
    """Decorate a test that returns a kernel: a function, or its name (`module:function`, `fla.chunk`).

    options: families, dims, heads, dtypes, max_tokens, splits (what cases are drawn from), shrink_seconds,
    device, time_limit.
    """

    def decorate(test: Callable[..., Kernel]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, _gdncheck_run: Callable[..., None], **keywords: Any) -> None:
            _gdncheck_run(test(*args, **keywords), cases=cases, seed=seed, **options)

        # pytest reads the signature to know which fixtures to hand in.
        signature = inspect.signature(test)
        own = inspect.Parameter("_gdncheck_run", inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*signature.parameters.values(), own], return_annotation=None
        )
        return run

    return decorate


@pytest.fixture(name="gdncheck_fuzz")
def _fixture(_gdncheck_run: Callable[..., None]) -> Callable[..., None]:
    """gdncheck_fuzz(kernel, cases=50, seed=0, ...): fail with the shrunk case where the kernel fails."""
    return _gdncheck_run


@pytest.fixture
def _gdncheck_run(request: pytest.FixtureRequest) -> Callable[..., None]:
    config = request.config

    def run(kernel: Kernel, *, cases: int = 50, seed: int = 0, **options: Any) -> None:
        __tracebackhide__ = True
        budget = config.getoption("--gdncheck-cases") or cases
        _run(kernel, budget, seed, Path(config.rootpath, config.getini("gdncheck_directory")), options)

    return run


def _run(kernel: Kernel, cases: int, seed: int, directory: Path, options: dict[str, Any]) -> None:
    """Fuzz, and fail the test with one message and no traceback."""
    __tracebackhide__ = True
    from gdncheck.capture.errors import BadInput, CannotRun
    from gdncheck.compare.try_cases import plan_of, try_cases

    running = {name: options.pop(name) for name in RUNNING if name in options}
    try:
        plan = plan_of(seed=seed, **options)
        tried = try_cases(spec_of(kernel), cases=cases, plan=plan, directory=_shown(directory), **running)
    except CannotRun as error:
        tried, skipping, said = None, True, f"gdncheck: {error}"
    except (BadInput, TypeError) as error:
        tried, skipping, said = None, False, f"gdncheck: {error}"
    if tried is None:
        # Outside the handlers, so that pytest shows this line and not a chain of exceptions.
        (pytest.skip if skipping else functools.partial(pytest.fail, pytrace=False))(said)
    if tried.failure is not None:
        pytest.fail(tried.message(), pytrace=False)
    if tried.skipped == tried.cases:
        words = f"{tried.kernel} refused all {tried.cases} cases; draw others (dims, heads, dtypes)"
        pytest.fail(words, pytrace=False)


def _shown(directory: Path) -> Path:
    """Relative to where the user is, if it lies there: the command in the message is for copying."""
    here = Path.cwd()
    return directory.relative_to(here) if directory.is_relative_to(here) else directory


def spec_of(kernel: Kernel) -> Any:
    """What a worker needs to load a kernel: a name as it is, a function by its module and file.

    Raises BadInput for something that a worker cannot import: a lambda, a function inside a function.
    """
    from gdncheck.capture.errors import BadInput

    if isinstance(kernel, str):
        return kernel
    name, module = getattr(kernel, "__qualname__", ""), getattr(kernel, "__module__", "") or ""
    if not callable(kernel) or not name or "<" in name or module in ("", "__main__"):
        raise BadInput(
            f"the kernel is {kernel!r}; return a function of a module, or its name `module:function`: "
            "a worker process has to import it"
        )
    from gdncheck.kernels.protocol import KernelSpec

    file = Path(inspect.getsourcefile(inspect.unwrap(kernel)) or "")
    parts = module.split(".")
    if file.is_file() and parts[-1] == file.stem:
        # The folder from which the dotted name is found, whatever pytest's import mode left on sys.path.
        folder = file.resolve().parents[len(parts) - 1]
        return KernelSpec(
            name=f"{module}:{name}", module=module, attribute=name, by_import_path=True,
            sys_path=(str(folder),),
        )  # fmt: skip
    return f"{module}:{name}"

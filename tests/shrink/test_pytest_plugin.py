"""The plug-in: a test that names a kernel fails with something small, and costs other suites nothing."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from gdncheck.capture.casefile import hash_of
from gdncheck.capture.errors import BadInput
from gdncheck.compare.finding import find
from gdncheck.compare.try_cases import case_of, plan_of

pytest_plugins = ["pytester"]
KERNELS = (Path(__file__).parent / "shrinkable.py").read_text()
INSTALLED = any(e.name == "gdncheck" for e in importlib.metadata.entry_points(group="pytest11"))
LOAD = () if INSTALLED else ("-p", "gdncheck.pytest_plugin")


@pytest.fixture
def suite(pytester):
    """suite('a test file') -> the result of running it."""
    pytester.makepyfile(shrinkable_here=KERNELS)

    def run(text, *words):
        pytester.makepyfile(test_kernels=text)
        return pytester.runpytest_subprocess(*LOAD, "-p", "no:cacheprovider", *words)

    return run


FAILING = """
    from gdncheck.pytest_plugin import gdncheck_fuzz
    import shrinkable_here

    SMALL = dict(dims=(16, 16), heads=(1, 1), max_tokens=40, families=["qwen"], splits=False)

    @gdncheck_fuzz(cases=20, seed=3, shrink_seconds=100, **SMALL)
    def test_leaks(tmp_path):
        assert tmp_path.exists()
        return shrinkable_here.leaks

    def test_sound(gdncheck_fuzz):
        gdncheck_fuzz(shrinkable_here.leaks_mended, cases=3, seed=3, **SMALL)
"""


def test_a_broken_kernel_passes_or_a_sound_one_fails(suite, pytester, monkeypatch):
    result = suite(FAILING)
    result.assert_outcomes(passed=1, failed=1)
    text = result.stdout.str()
    assert "shrinkable_here:leaks: fail, output wrong at sequence 1" in text
    assert "Traceback" not in text
    path = next(pytester.path.glob(".gdncheck/*.safetensors"))
    assert f"gdncheck replay .gdncheck/{path.name.replace('.passing', '')}" in text
    kept = find(path.parent / path.name.replace(".passing", ""))
    assert kept.case.n_tokens == 2
    assert kept.facts.kernel == "shrinkable_here:leaks"


@pytest.mark.slow
def test_what_no_worker_can_import_ends_in_a_traceback(suite):
    result = suite("""
        def test_inside(gdncheck_fuzz):
            gdncheck_fuzz(lambda q: q)

        def test_unknown(gdncheck_fuzz):
            gdncheck_fuzz("no_such_module:rule", cases=1)

        def test_word(gdncheck_fuzz):
            gdncheck_fuzz("shrinkable_here:sound", families=["nonsense"])
    """)
    result.assert_outcomes(failed=3)
    text = result.stdout.str()
    for words in (
        "a worker process has to import it",
        "no module no_such_module",
        "family 'nonsense' is unknown",
    ):
        assert words in text
    assert "Error" not in text.replace("ImportError", "")


def test_a_suite_without_kernels_loads_torch():
    code = """
import sys
import pytest
import gdncheck.pytest_plugin
assert "torch" not in sys.modules
assert "gdncheck.compare" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_the_list_of_cases_depends_on_anything_but_seed_and_number():
    plan = plan_of(seed=5)
    first = [case_of(plan, n) for n in range(12)]
    again = [case_of(plan, n) for n in reversed(range(12))][::-1]
    assert [(hash_of(c), d) for c, d in first] == [(hash_of(c), d) for c, d in again]
    other = [case_of(plan_of(seed=6), n) for n in range(12)]
    assert [hash_of(c) for c, _ in first] != [hash_of(c) for c, _ in other]
    lengths = [n for c, _ in (case_of(plan, i) for i in range(60)) for n in c.lengths]
    assert any(n % 64 == 1 and n > 1 for n in lengths), "no length lies behind a boundary"
    assert min(lengths) >= 1
    assert max(lengths) <= 200


@pytest.mark.parametrize("wrong", [{"dims": (16,)}, {"heads": "all"}, {"max_tokens": 0}, {"families": ["x"]}])
def test_a_wrong_option_is_taken(wrong):
    with pytest.raises(BadInput):
        plan_of(**wrong)

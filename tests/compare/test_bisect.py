"""Bisection over releases: the change that is found, what is passed over, and what is refused.

The search itself runs over random verdicts; releases and commits are those of a toy family that the tests
make: wheels in a folder that pip takes for its index, run in this process, and a git clone, run in workers.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from gdncheck.capture.casefile import write_case
from gdncheck.capture.errors import BadInput, CannotRun
from gdncheck.capture.make import make
from gdncheck.compare import bisect as module
from gdncheck.compare.bisect import bisect, halve
from gdncheck.kernels import cache, checkout, registry, releases
from gdncheck.kernels.interface import RunResult
from gdncheck.kernels.keep import Kept
from hypothesis import given
from hypothesis import strategies as st

from gdncheck.cli import main

spec = importlib.util.spec_from_file_location("toy_family", Path(__file__).with_name("toy_family.py"))
toy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(toy)

GOOD, BAD = toy.SOURCE, toy.SOURCE.replace(toy.LINE, toy.WRONG)
CASE = {"lengths": [5, 3], "dims": (8, 6), "k_heads": 1, "v_heads": 2, "state": "random"}


@given(
    before=st.lists(st.booleans(), max_size=12),
    after=st.lists(st.booleans(), max_size=12),
    good_first=st.booleans(),
)
def test_halving_misses_the_change_or_asks_twice(before, after, good_first):
    """before, after: whether each release between can be run, on either side of the change."""
    sides = ("good", "bad") if good_first else ("bad", "good")
    row = [sides[0], *(sides[0] if runs else None for runs in before)]
    row += [*(sides[1] if runs else None for runs in after), sides[1]]
    asked = []

    def side(index):
        asked.append(index)
        return row[index]

    low, high = halve(len(row), side)
    last = max(i for i, s in enumerate(row[: len(before) + 1]) if s)
    first = min(i for i in range(len(before) + 1, len(row)) if row[i])
    assert (low, high) == (last, first)
    assert all(s is None for s in row[low + 1 : high])
    assert len(asked[1:]) == len(set(asked[1:]))


def test_halving_asks_about_every_release():
    asked = []
    n, change = 1000, 617
    assert halve(n, lambda i: (asked.append(i), "bad" if i < change else "good")[1]) == (change - 1, change)
    assert len(asked) <= 12


@pytest.fixture
def family(tmp_path, monkeypatch):
    """The toy family known here, with an index that is a folder and a cache of its own."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("GDNCHECK_CACHE", str(tmp_path / "cache"))
    kept = Kept(
        family="toy", distribution="toy-gdn", patterns=("toy_adapter.py",), needs="toy_adapter.py", since="1"
    )
    for where in (cache, releases):
        monkeypatch.setattr(where, "KEEP", (kept,))
    known = registry.family_modules()
    monkeypatch.setattr(registry, "family_modules", lambda: {**known, "toy": "toy_adapter"})
    yield index
    checkout.use_sources({})


class HerePool:
    """Stands in for a pool of workers: runs the toy family in this process."""

    def __init__(self, cache_dir=None, sources=None, **options):
        self.where = {"cache_dir": cache_dir, "sources": sources}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def open(self, name):
        spec = registry.resolve(name, **self.where)
        names = {}
        try:
            exec(Path(spec.sys_path[0], "toy_adapter.py").read_text(), names)
        except ImportError as error:
            raise CannotRun(f"{name}: {error}") from error
        return Here(names["Chunk"](spec.version))


class Here:
    def __init__(self, adapter):
        self.adapter, self.info = adapter, adapter.describe()

    def run(self, calls):
        return [RunResult(status="ok", outputs=self.adapter.run(call), seconds=0.0) for call in calls]


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(module, "WorkerPool", HerePool)


def released(index, sources):
    for version, source in sources.items():
        toy.release(index, version, source)


def cached(index, sources):
    """The same, already fetched."""
    released(index, sources)
    for version in sources:
        cache.fetch(f"toy@{version}", from_wheel=index / f"toy_gdn-{version}-py3-none-any.whl")


def test_the_release_that_changed_the_verdict_is_not_named(family, here):
    released(family, {f"1.{n}": GOOD if n >= 10 else BAD for n in (0, 2, 9, 10, 11)} | {"1.9.1rc1": GOOD})
    found = bisect("toy.chunk", make("gaussian", **CASE), good="1.11", bad="1.0", device="cpu")
    assert (found.first_changed.kernel, found.last_before.kernel) == ("toy.chunk@1.10", "toy.chunk@1.9")
    assert (found.bad.verdict, found.good.verdict) == ("fail", "pass")
    assert (found.could_be, found.skipped, found.releases) == ((), (), 5)
    assert [t.kernel for t in found.tried[:2]] == ["toy.chunk@1.0", "toy.chunk@1.11"]
    assert len(found.tried) < 5


def test_a_release_that_cannot_be_run_is_taken_for_a_verdict(family, here):
    cached(family, {"1.0": GOOD, "1.1": toy.BROKEN + GOOD, "1.2": BAD})
    found = bisect("toy.chunk", make("gaussian", **CASE), good="1.0", bad="1.2", device="cpu", offline=True)
    assert found.could_be == ("toy.chunk@1.1", "toy.chunk@1.2")
    assert "a_package_that_nobody_has" in found.skipped[0].reason
    assert any("one of toy.chunk@1.1, toy.chunk@1.2" in line for line in module.lines_of(found))


def test_releases_of_the_index_are_used_offline(family, here):
    cached(family, {"1.0": GOOD, "1.2": BAD})
    released(family, {"1.1": BAD})
    found = bisect("toy.chunk", make("gaussian", **CASE), good="1.0", bad="1.2", device="cpu", offline=True)
    assert (found.first_changed.kernel, found.releases) == ("toy.chunk@1.2", 2)
    assert cache.find("toy", "1.1") is None


@pytest.mark.parametrize(
    ("good", "bad", "error", "words"),
    [
        ("1.0", "1.1", BadInput, "give the same verdict on this case, pass"),
        ("1.2", "1.0", BadInput, "the wrong way round"),
        ("1.0", "1.3", CannotRun, "--bad toy.chunk@1.3 cannot be run"),
        ("1.0", "git:main", BadInput, "give two versions, or two revisions"),
        ("1.0", "path:.", BadInput, "a directory has no releases"),
        ("git:a", "git:b", BadInput, "give --source toy=DIR"),
    ],
)
def test_ends_between_which_there_is_nothing_to_find_are_searched(family, here, good, bad, error, words):
    cached(family, {"1.0": GOOD, "1.1": GOOD, "1.2": BAD, "1.3": toy.BROKEN})
    with pytest.raises(error, match=words):
        bisect("toy.chunk", make("gaussian", **CASE), good=good, bad=bad, device="cpu", offline=True)


def test_an_end_that_was_never_released_is_searched_from(family, here):
    released(family, {"1.0": GOOD})
    with pytest.raises(CannotRun, match=r"the package index has no toy-gdn 1\.9; it has 1\.0"):
        bisect("toy.chunk", make("gaussian", **CASE), good="1.0", bad="1.9", device="cpu")


def test_a_kernel_with_a_version_or_no_family_is_searched(family):
    for name in ("toy.chunk@1.0", "module:function", "toy"):
        with pytest.raises(BadInput):
            bisect(name, make("gaussian", **CASE), good="1.0", bad="1.1", device="cpu")


@pytest.fixture
def clone(tmp_path):
    """Six commits on main, the fourth of which changes one line of the kernel."""
    path = tmp_path / "clone"
    path.mkdir()
    toy.git(path, "init", "--quiet", "--initial-branch=main")
    hashes = [toy.commit(path, GOOD + f"# {n}\n", f"step {n}") for n in range(3)]
    hashes.append(toy.commit(path, BAD, "decay from the second token on"))
    hashes += [toy.commit(path, BAD + f"# {n}\n", f"step {n}") for n in (4, 5)]
    return path, hashes


def test_the_commit_that_changed_one_line_is_not_found(family, clone, tmp_path, capsys):
    path, hashes = clone
    case = tmp_path / "case.safetensors"
    write_case(make("gaussian", **CASE), case)
    arguments = ["kernels", "bisect", "toy.chunk", str(case), "--good", "git:HEAD~5", "--bad", "git:main"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--source", f"toy={path}", "--device", "cpu", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (ended.value.code, found["schema"], found["releases"], found["skipped"]) == (0, 1, 6, [])
    assert found["first_changed"]["kernel"] == f"toy.chunk@git:{hashes[3]}"
    assert found["first_changed"]["title"] == "decay from the second token on"
    assert (found["first_changed"]["verdict"], found["last_before"]["verdict"]) == ("fail", "pass")
    assert f"--source toy={path}" in found["command"]
    assert toy.git(path, "status", "--porcelain") == "", "the clone was written to"


def test_revisions_without_a_common_line_are_searched(family, clone):
    path, hashes = clone
    toy.git(path, "checkout", "--quiet", "-b", "side", hashes[1])
    toy.commit(path, GOOD + "# side\n", "aside")
    with pytest.raises(BadInput, match="neither of main and side is an ancestor"):
        releases.between("toy.chunk", "git:main", "git:side", sources={"toy": str(path)})


def test_commits_of_a_merged_branch_are_walked(family, clone):
    path, hashes = clone
    toy.git(path, "checkout", "--quiet", "-b", "side", hashes[5])
    aside = toy.commit(path, BAD + "# side\n", "aside")
    toy.git(path, "checkout", "--quiet", "main")
    toy.git(path, "merge", "--quiet", "--no-ff", "-m", "merged", "side")
    walked = releases.between("toy.chunk", f"git:{hashes[4]}", "git:main", sources={"toy": str(path)})
    titles = [release.title for release in walked]
    assert titles == ["step 4", "step 5", "merged"]
    assert f"git:{aside}" not in [release.where for release in walked]


@pytest.mark.slow
def test_fla_begins_to_take_empty_sequences_at_another_version(tmp_path):
    """The real one: 0.5.1 is the first fla-core whose chunk kernel numbers chunks past an empty sequence."""
    case = make("gaussian", lengths=[3, 0, 5], dims=(16, 16), k_heads=1, v_heads=1, state="random")
    try:
        found = bisect("fla.chunk", case, good="0.6.0", bad="0.4.0", device="cpu")
    except CannotRun as error:
        pytest.skip(f"no package index here: {error}")
    assert found.first_changed.kernel == "fla.chunk@0.5.1"
    assert (found.bad.verdict, found.good.verdict) == ("skipped", "pass")

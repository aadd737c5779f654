"""The run store: nothing is lost to a kill, a resumed run gives the same answer, another run is refused."""

from __future__ import annotations

import json
import sqlite3

import pytest
from gdncheck.capture.errors import BadInput
from gdncheck.compare.store import FILE_NAME, RunStore, Signature
from gdncheck.compare.sweep.jsonout import document

PARAMETERS = {"what": "sweep", "seed": 1}


def opened(directory, *, resume=False, **parameters):
    return RunStore.open(directory, parameters={**PARAMETERS, **parameters}, resume=resume)


def put(store, key="a", verdict="pass"):
    store.put(key, kernel="k", case="c", verdict=verdict, seconds=0.5, document=json.dumps({"v": verdict}))


def test_a_result_is_gone_when_the_process_dies(tmp_path):
    store = opened(tmp_path)
    put(store)
    # Not closed, as after a kill: another connection must see it.
    assert sqlite3.connect(tmp_path / FILE_NAME).execute("SELECT verdict FROM results").fetchall() == [
        ("pass",)
    ]
    store._lock.release()  # as the system does for a process that died
    with opened(tmp_path, resume=True) as again:
        assert json.loads(again.get("a")) == {"v": "pass"}
        assert again.get("b") is None
    store.close()


def test_results_come_back_out_of_order_or_twice(tmp_path):
    with opened(tmp_path) as store:
        for key in "cab":
            put(store, key)
        put(store, "a", "fail")
        assert [key for key, _ in store.results()] == ["c", "b", "a"]


def test_the_same_finding_is_kept_twice(tmp_path):
    s = Signature(
        kernel="k@1", version="1", tier=3, class_="wrong", stage="output", deviations={"split": "at-65"},
        place_pattern="token first of a chunk",
    )  # fmt: skip
    with opened(tmp_path) as store:
        assert store.add_finding(s, {"n": 1}) == store.add_finding(s, {"n": 2})
        (one,) = store.findings()
    assert (one["times"], one["n"], one["signature"]) == (2, 1, s.digest)


@pytest.mark.parametrize(
    ("prepare", "options", "words"),
    [
        (lambda d: opened(d).close(), {}, "add --resume"),
        (lambda d: None, {"resume": True}, "leave --resume out"),
        (lambda d: opened(d).close(), {"resume": True, "seed": 2}, "seed differ"),
        (
            lambda d: (d / FILE_NAME).write_text("no database at all"),
            {"resume": True},
            "choose another --out",
        ),
    ],
)
def test_a_directory_of_something_else_is_written_to(prepare, options, words, tmp_path):
    prepare(tmp_path)
    with pytest.raises(BadInput, match=words) as error:
        opened(tmp_path, **options)
    assert "\n" not in str(error.value)


def test_a_run_killed_before_its_first_row_cannot_be_resumed(tmp_path):
    sqlite3.connect(tmp_path / FILE_NAME).execute("PRAGMA journal_mode = WAL")
    with opened(tmp_path, resume=True) as store:
        assert store.recall("parameters") == PARAMETERS


def comparable(report):
    """The answer without times."""
    plain = document(report)
    for row in (plain, *plain["kernels"], *plain["results"]):
        row.pop("seconds", None)
    return plain


def test_a_resumed_sweep_gives_another_answer(sweep_of, tmp_path):
    options = {"only": ["state", "state_dtype"], "axes": {"state": ["zeros", "random"]}}
    whole = comparable(sweep_of("state_bf16", **options))
    seen = []

    def stop(text, done, total):
        seen.append(text)
        if len(seen) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep_of("state_bf16", **options, out=tmp_path / "run", progress=stop)
    kept = dict(sqlite3.connect(tmp_path / "run" / FILE_NAME).execute("SELECT key, at FROM results"))
    assert len(kept) == 3
    resumed = sweep_of("state_bf16", **options, out=tmp_path / "run", resume=True)
    assert comparable(resumed) == whole
    rows = sqlite3.connect(tmp_path / "run" / FILE_NAME).execute("SELECT key, rowid FROM results").fetchall()
    assert [key for key, number in sorted(rows, key=lambda r: r[1])][:3] == list(kept)
    (finding,) = sqlite3.connect(tmp_path / "run" / FILE_NAME).execute(
        "SELECT class, stage, deviations, times FROM findings"
    )
    assert finding == ("nan", "state", '{"state_dtype": "bfloat16"}', 1)

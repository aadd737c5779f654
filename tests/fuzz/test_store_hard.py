"""The store: older versions open, one process writes, a full disk and a kill take nothing with them."""

from __future__ import annotations

import json
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time

import pytest
from gdncheck.capture.casefile import read_case
from gdncheck.capture.errors import BadInput
from gdncheck.capture.make import make
from gdncheck.compare.store import CASES, FILE_NAME, SCHEMA_VERSION, RunStore, Signature
from gdncheck.compare.store_schema import RUN_AND_RESULTS

PARAMETERS = {"what": "sweep", "seed": 1}


def signature(**changed):
    given = {"kernel": "k@1", "version": "1", "tier": 3, "class_": "wrong", "stage": "output",
             "deviations": {"split": "at-65"}, "place_pattern": "token first of a chunk"}  # fmt: skip
    return Signature(**{**given, **changed})


def old_store(directory):
    """A store as version 1 wrote it."""
    directory.mkdir()
    connection = sqlite3.connect(directory / FILE_NAME, isolation_level=None)
    connection.executescript(RUN_AND_RESULTS)
    for name, value in (("schema_version", 1), ("parameters", PARAMETERS)):
        connection.execute("INSERT INTO run VALUES (?, ?)", (name, json.dumps(value)))
    connection.execute("INSERT INTO results (key, kernel, case_name, verdict, seconds, document) "
                       "VALUES ('a', 'k', 'c', 'pass', 0.1, '{}')")  # fmt: skip
    connection.execute(
        "INSERT INTO findings (signature, kernel, version, tier, class, stage, deviations, place_pattern, "
        "document) VALUES (?, 'k@1', '1', 3, 'wrong', 'output', ?, 'token first of a chunk', '{}')",
        (signature().digest, json.dumps({"split": "at-65"})),
    )
    connection.close()


@pytest.mark.parametrize("how", ["resume", "read", "change"])
def test_an_older_store_is_refused_or_loses_rows(tmp_path, how):
    old_store(tmp_path / "run")
    if how == "resume":
        store = RunStore.open(tmp_path / "run", parameters=PARAMETERS, resume=True)
    else:
        store = getattr(RunStore, how)(tmp_path / "run")
    with store:
        assert store.recall("schema_version") == SCHEMA_VERSION
        assert [key for key, _ in store.results()] == ["a"]
        (row,) = store.finding_rows()
        assert (row.signature, row.identity, row.status) == (signature().digest, signature(), "confirmed")
    with RunStore.change(tmp_path / "run") as store:
        assert store.add_finding(signature(), {"n": 2}) == signature().digest
        assert store.finding(signature().digest[:5]).times == 2


def test_a_newer_store_is_written_to(tmp_path):
    RunStore.open(tmp_path / "run", parameters=PARAMETERS, resume=False).close()
    connection = sqlite3.connect(tmp_path / "run" / FILE_NAME)
    connection.execute("UPDATE run SET value = ? WHERE name = 'schema_version'", (str(SCHEMA_VERSION + 1),))
    connection.commit()
    connection.close()
    with pytest.raises(BadInput, match="newer gdncheck") as error:
        RunStore.change(tmp_path / "run")
    assert "\n" not in str(error.value)


def child(code, *arguments):
    """Python code in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", textwrap.dedent(code), *map(str, arguments)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


HOLD = """
    import sys, time
    from gdncheck.compare.store import RunStore
    RunStore.open(sys.argv[1], parameters={"what": "sweep", "seed": 1}, resume=False)
    print("open", flush=True)
    time.sleep(60)
"""


def test_two_processes_write_to_one_run(tmp_path):
    holder = child(HOLD, tmp_path / "run")
    try:
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(BadInput, match=f"another process writes.*{holder.pid}") as error:
            RunStore.open(tmp_path / "run", parameters=PARAMETERS, resume=True)
        assert "\n" not in str(error.value)
        # Reading goes on beside it.
        with RunStore.read(tmp_path / "run") as reader:
            assert reader.recall("parameters") == PARAMETERS
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    # The lock went with its holder.
    RunStore.open(tmp_path / "run", parameters=PARAMETERS, resume=True).close()


FILL = """
    import resource, sys
    from gdncheck.capture.errors import CannotRun
    from gdncheck.compare.store import RunStore
    with RunStore.open(sys.argv[1], parameters={"what": "sweep", "seed": 1}, resume=False) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
        try:
            for number in range(100_000):
                with store.transaction():
                    for key in (f"{number}", f"{number}b"):
                        store.put(key, kernel="k", case="c", verdict="pass", seconds=0, document="x" * 500)
                print(number, flush=True)
        except CannotRun as error:
            print(f"full: {error}", flush=True)
            sys.exit(3)
"""


def test_a_full_disk_leaves_a_broken_store_or_a_traceback(tmp_path):
    process = child(FILL, tmp_path / "run")
    printed = process.communicate(timeout=120)[0].splitlines()
    assert process.returncode == 3
    assert printed[-1].startswith(f"full: {tmp_path}/run/{FILE_NAME}: cannot grow")
    assert "--resume" in printed[-1]
    last = int(printed[-2])
    with RunStore.open(tmp_path / "run", parameters=PARAMETERS, resume=True) as store:
        assert store.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        kept = {key for key, _ in store.results()}
        # Both rows of a transaction, or neither; all that was told to be there is.
        assert {f"{n}" for n in range(last + 1)} | {f"{n}b" for n in range(last + 1)} == kept
        store.put("after", kernel="k", case="c", verdict="pass", seconds=0.0, document="{}")


def test_a_row_names_a_case_that_is_not_there(tmp_path, monkeypatch):
    """The file is complete and synced before its name is returned; a second time costs nothing."""
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(descriptor), real(descriptor))[1])
    case = make("qwen", lengths=[5], k_heads=1, v_heads=2, dims=(16, 16), seed=1)
    with RunStore.open(tmp_path / "run", parameters=PARAMETERS, resume=False) as store:
        name = store.put_case(case)
        assert len(synced) == 2
        assert name.startswith(f"{CASES}/")
        assert read_case(store.case_path(name)).content_hash == case.content_hash
        before = store.case_path(name).stat().st_mtime_ns
        time.sleep(0.01)
        assert store.put_case(case) == name
        assert store.case_path(name).stat().st_mtime_ns == before


def test_a_case_that_cannot_be_written_ends_in_a_traceback(tmp_path):
    from gdncheck.capture.errors import CannotRun

    case = make("qwen", lengths=[500], k_heads=1, v_heads=2, dims=(64, 64), seed=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunStore.open(tmp_path / "run", parameters=PARAMETERS, resume=False) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        try:
            with pytest.raises(CannotRun, match="--resume") as error:
                store.put_case(case)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "\n" not in str(error.value)
        assert not list((tmp_path / "run" / CASES).glob("*.safetensors"))


def test_a_finding_loses_what_is_learned_of_it(tmp_path):
    with RunStore.open(tmp_path / "run", parameters=PARAMETERS, resume=False) as store:
        digest = store.add_finding(
            signature(), {"attempt": {"reason": "x"}}, status="found", case_file="cases/a.safetensors",
            number=7, config={"split": "at-65"}, options={"seed": 3},
        )  # fmt: skip
        store.change_finding(digest, status="shrunk", failures=3, runs=10, shrunk_file="cases/b.safetensors")
        row = store.finding(digest)
        assert (row.status, row.failures, row.runs, row.number) == ("shrunk", 3, 10, 7)
        assert row.options == {"seed": 3}
        assert row.document == {"attempt": {"reason": "x"}}
        with pytest.raises(ValueError, match="kernel"):
            store.change_finding(digest, kernel="other")
        with pytest.raises(BadInput, match="no finding starts so"):
            store.finding("zz")

"""The doctor: each known-bad combination shows where it applies and nowhere else."""

from __future__ import annotations

import importlib.metadata

import msgspec
import pytest
from gdncheck.kernels import doctor as doctor_module
from gdncheck.kernels.combinations import COMBINATIONS, applying
from gdncheck.kernels.doctor import Report, doctor, probe
from gdncheck.kernels.inventory import KernelStatus

CPU = {"gpus": {"available": False, "devices": []}, "ptxas": {"version": "12.8"}}


def gpu(capability="9.0", driver="12.8", ptxas="12.8"):
    devices = [{"name": "G", "capability": capability, "bytes": 1}]
    return {
        "gpus": {"available": True, "devices": devices, "driver_cuda": driver},
        "ptxas": {"version": ptxas},
    }


OLD = {"fla-core": "0.4.0", "triton": "3.6.0", "numpy": "2.3.5"}
NEW = {"fla-core": "0.6.0", "triton": "3.9.0", "numpy": "2.4.1"}

# id, facts and versions where it fires, facts and versions where it is silent
LINES = [
    ("fla-block-pointers", CPU, {**OLD, "triton": "3.9.0"}, CPU, OLD),
    ("fla-block-pointers", gpu(), {**OLD, "triton": "3.9.1"}, gpu(), NEW),
    ("numpy-scalars", CPU, {**OLD, "numpy": "2.4.0"}, CPU, OLD),
    ("numpy-scalars", CPU, {**OLD, "numpy": "2.5"}, gpu(), {**OLD, "numpy": "2.5"}),
    ("numpy-scalars", CPU, {**OLD, "numpy": "2.4.1"}, CPU, NEW),
    ("interpreter-bfloat16", CPU, OLD, gpu(), OLD),
    ("hopper-backward", gpu("9.0"), OLD, gpu("8.9"), OLD),
    ("hopper-backward", gpu("9.0"), {**OLD, "triton": "3.4.0"}, gpu("9.0"), {**OLD, "triton": "3.3.1"}),
    ("hopper-backward", gpu("9.0"), {**OLD, "triton": "3.7.0"}, gpu("9.0"), {**OLD, "triton": "3.7.1"}),
    ("hopper-backward", gpu("9.0"), OLD, gpu("10.0"), OLD),
    ("hopper-backward", gpu("9.0"), OLD, CPU, OLD),
    ("ptxas-older-than-driver", gpu(driver="13.0"), OLD, gpu(), OLD),
    (
        "ptxas-older-than-driver",
        gpu(driver="12.10", ptxas="12.9"),
        OLD,
        gpu(driver="12.9", ptxas="12.10"),
        OLD,
    ),
    ("ptxas-newer-than-driver", gpu(driver="12.9", ptxas="13.0"), OLD, gpu(driver="12.4"), OLD),
    ("ptxas-before-blackwell", gpu("12.0", ptxas="12.4"), OLD, gpu("12.0", ptxas="12.8"), OLD),
    ("ptxas-before-blackwell", gpu("10.0", ptxas="12.4"), OLD, gpu("9.0", ptxas="12.4"), OLD),
    ("fla-flashqla", gpu(), {**NEW, "flash-qla": "0.1.3"}, gpu(), NEW),
    ("fla-flashqla", gpu(), {**NEW, "flash-qla": "0.1.3"}, gpu(), {**OLD, "flash-qla": "0.1.3"}),
]


@pytest.mark.parametrize(("name", "facts", "versions", "silent_facts", "silent_versions"), LINES)
def test_a_known_combination_is_missed_or_cried_over(name, facts, versions, silent_facts, silent_versions):
    assert name in {c.id for c in applying(facts, versions)}
    assert name not in {c.id for c in applying(silent_facts, silent_versions)}


def test_a_line_of_the_table_has_no_test_of_its_own():
    assert {c.id for c in COMBINATIONS} == {line[0] for line in LINES}


def test_a_machine_of_which_nothing_is_known_breaks_the_table():
    assert applying({"gpus": None, "ptxas": None}, {}) == []


def test_the_probe_tells_other_versions_than_those_installed():
    facts = probe()
    for name in ("torch", "triton", "fla-core"):
        assert facts["packages"][name] == importlib.metadata.version(name)
    assert facts["interpreter"]["interpreted"]
    assert set(facts["errors"]) <= {"ptxas"}


def report(monkeypatch, versions, runs_on="cpu (interpreted)"):
    status = KernelStatus(name="fla.chunk@0.4.0", found="installed", runs_on=runs_on)
    monkeypatch.setattr(doctor_module, "probe", lambda: {**CPU, "packages": versions, "errors": {}})
    monkeypatch.setattr(doctor_module, "inventory", lambda cache_dir: [status])
    monkeypatch.setattr(doctor_module, "try_out", lambda kernels, **options: kernels)
    return doctor()


def test_a_kernel_that_a_combination_stops_counts_as_running(monkeypatch):
    sound, stopped = report(monkeypatch, OLD), report(monkeypatch, {**OLD, "triton": "3.9.0"})
    assert (sound.exit_status, stopped.exit_status) == (0, 3)
    assert "block pointers" in stopped.kernels[0].why_not


def test_a_machine_where_nothing_runs_is_called_ready(monkeypatch):
    found = report(monkeypatch, OLD, runs_on=None)
    assert found.exit_status == 3
    assert msgspec.json.decode(msgspec.json.encode(found), type=Report) == found


@pytest.mark.slow
def test_an_installed_kernel_does_not_load_on_this_machine():
    found = doctor()
    assert found.exit_status == 0
    assert {k.name: k.why_not for k in found.kernels if k.found == "installed" and k.runs_on is None} == {}

"""`gdncheck kernels` and `gdncheck doctor`: what a person and a script see, and the exit statuses."""

from __future__ import annotations

import importlib.metadata
import json
import zipfile

import pytest
from gdncheck.kernels import doctor as doctor_module
from gdncheck.kernels.combinations import COMBINATIONS
from gdncheck.kernels.doctor import Report
from gdncheck.kernels.inventory import KernelStatus

from gdncheck.cli import main

INSTALLED = importlib.metadata.version("fla-core")


@pytest.fixture
def gdncheck(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("GDNCHECK_CACHE", str(tmp_path / "cache"))

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return run


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "fla_core-0.4.9-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("fla/ops/gated_delta_rule/chunk.py", "x = 1\n")
        archive.writestr("fla_core-0.4.9.dist-info/METADATA", "Name: fla-core\nVersion: 0.4.9\n\n")
    return str(path)


def test_installed_and_cached_kernels_are_missing_from_the_list(gdncheck, wheel):
    assert gdncheck("kernels", "fetch", "fla@0.4.9", "--from-wheel", wheel)[0] == 0
    status, out, _ = gdncheck("kernels", "list")
    assert status == 0
    for words in (
        f"fla.chunk@{INSTALLED}",
        "installed",
        "fla.chunk@0.4.9",
        "cached",
        "emulation.chunk",
        "1 version",
    ):
        assert words in out
    document = json.loads(gdncheck("kernels", "list", "--json")[1])
    assert document["schema"] == 1
    found = {kernel["name"]: kernel["found"] for kernel in document["kernels"]}
    assert found[f"fla.chunk@{INSTALLED}"] == "installed"
    assert found["fla.chunk@0.4.9"] == "cached"
    assert [record["version"] for record in document["cached"]] == ["0.4.9"]


def test_prune_takes_everything_unasked_or_nothing_asked(gdncheck, wheel):
    gdncheck("kernels", "fetch", "fla@0.4.9", "--from-wheel", wheel)
    assert gdncheck("kernels", "prune")[0] == 2
    assert gdncheck("kernels", "prune", "--all", "fla")[0] == 2
    assert gdncheck("kernels", "prune", "fla@0.4.8")[0] == 2
    status, out, _ = gdncheck("kernels", "prune", "fla@0.4.9")
    assert (status, "removed fla@0.4.9" in out) == (0, True)
    assert json.loads(gdncheck("kernels", "list", "--json")[1])["cached"] == []


BAD = [
    (("kernels", "fetch", "fla"), 2, "give the version"),
    (("kernels", "fetch", "fla@0.4.9", "--from-wheel", "/no/such.whl"), 2, "no such file"),
    (("kernels", "fetch", "fla@0.4.9", "fla@0.4.8", "--from-wheel", "x.whl"), 2, "one version"),
    (("kernels", "contract", "fla.chnk"), 2, "did you mean fla.chunk"),
    (("kernels", "contract", "package.module:function"), 2, "gdncheck_capabilities"),
]


@pytest.mark.parametrize(("arguments", "code", "words"), BAD)
def test_bad_input_ends_in_more_than_one_line(gdncheck, arguments, code, words):
    status, _, err = gdncheck(*arguments)
    assert status == code
    assert words in err
    assert err.count("\n") == 1


def test_a_contract_is_printed_without_its_clauses(gdncheck):
    status, out, _ = gdncheck("kernels", "contract", "fla.chunk")
    document = json.loads(gdncheck("kernels", "contract", "fla.chunk", "--json")[1])
    assert status == 0
    assert document["clauses"]
    for clause in document["clauses"]:
        assert clause["id"] in out


def doctored(monkeypatch, runs_on):
    facts = {
        "python": "3.11", "platform": "Linux", "packages": {"torch": "2.13.0"}, "driver": None, "ptxas": None,
        "gpus": {"available": False, "torch_cuda": None, "devices": []},
        "errors": {"interpreter": "it broke"},
    }  # fmt: skip
    status = KernelStatus(name="fla.chunk@0.4.0", found="installed", runs_on=runs_on, why_not="no triton")
    report = Report(facts=facts, kernels=[status], combinations=list(COMBINATIONS[:1]))
    monkeypatch.setattr(doctor_module, "doctor", lambda device: report)


@pytest.mark.parametrize(("runs_on", "code"), [("cpu", 0), (None, 3)])
def test_the_doctor_hides_what_it_found(gdncheck, monkeypatch, runs_on, code):
    doctored(monkeypatch, runs_on)
    status, out, _ = gdncheck("doctor")
    assert status == code
    for words in ("torch 2.13.0", "triton missing", "it broke", "fla.chunk@0.4.0", COMBINATIONS[0].text):
        assert words in out
    assert ("no triton" in out) == (runs_on is None)
    assert out.rstrip().endswith("gdncheck doctor --device auto")
    status, out, _ = gdncheck("doctor", "--json")
    assert (status, json.loads(out)["schema"]) == (code, 1)

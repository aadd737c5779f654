"""compute-sanitizer round a worker: its text is read, blamed on stages and places; missing it is one line."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import logs
import pytest
from gdncheck.capture.casefile import write_case
from gdncheck.capture.errors import BadInput, CannotRun
from gdncheck.capture.make import make
from gdncheck.compare import sanitize as module
from gdncheck.compare.sanitize import blame, sanitize
from gdncheck.compare.sanitize_log import plain_name, read_log
from gdncheck.compare.sanitize_report import dumps
from gdncheck.kernels import sanitizer
from gdncheck.kernels.contract import Capabilities, Contract
from gdncheck.kernels.interface import KernelInfo
from gdncheck.kernels.stage_names import function_named

from gdncheck.cli import main

HERE = Path(__file__).parent
INFO = KernelInfo(name="k", contract=Contract(kernel="k"), capabilities=Capabilities(stages=("twist",)))
LENGTHS = [65, 130]
KKT, RECURRENT = "chunk_scaled_dot_kkt_fwd_kernel", "fused_recurrent_gated_delta_rule_fwd_kernel"


@pytest.fixture(scope="module")
def case():
    return make("qwen", lengths=[7], k_heads=1, v_heads=2, dims=(16, 16), state="random")


# name -> (kind, level, function, file:line, block, times) of each fault, total
READ = {
    "MEMCHECK": (
        [
            ("invalid-access", "error", KKT, "chunk_scaled_dot_kkt.py:63", (3, 1, 0), 2),
            ("invalid-access", "error", "some_kernel", None, (0, 0, 0), 1),
            ("api-error", "error", None, None, None, 1),
        ],
        4,
    ),
    "OLD": ([("invalid-access", "error", "recompute_w_u_fwd_kernel", "memcheck_demo.cu:6", (1, 0, 0), 1)], 1),
    "RACECHECK": (
        [
            ("race", "error", "merge_16x16_to_64x64_inverse_kernel", "solve_tril.py:291", None, 1),
            ("race", "warning", "helper_kernel", "a.cu:3", None, 1),
        ],
        2,
    ),
    "HAZARDS": ([("race", "error", "chunk_fwd_kernel_o", "demo.cu:16", (2, 0, 0), 2)], 2),
    "INITCHECK": ([("uninitialised-read", "error", "chunk_fwd_kernel_o", "chunk_o.py:101", (1, 4, 1), 1)], 1),
    "SYNCCHECK": (
        [("barrier", "error", RECURRENT, "fused_recurrent.py:70", (0, 7, 0), 1)],
        1,
    ),
    "UNKNOWN": ([("other", "error", "chunk_fwd_kernel_o", "chunk_o.py:101", None, 1)], 1),
    "CLEAN": ([], 0),
    "CLEAN_RACECHECK": ([], 0),
    "REFUSED": ([], None),
    "CUT": ([], None),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_report_is_lost_or_misread(name):
    faults, total = READ[name]
    log = read_log(getattr(logs, name))
    found = [
        (f.kind, f.level, f.function, f.file and f"{f.file.rsplit('/', 1)[-1]}:{f.line}", f.block, f.times)
        for f in log.faults
    ]
    assert found == faults
    assert log.total == total
    assert bool(log.refusals) == (name == "REFUSED")


def test_what_a_report_adds_is_lost():
    invalid, _, api = read_log(logs.MEMCHECK).faults
    assert (invalid.what, invalid.offset, invalid.thread) == (
        "__global__ read of size 4 bytes",
        "0x9a0",
        (31, 0, 0),
    )
    assert any("4 bytes after the nearest allocation" in line for line in invalid.detail)
    assert "cudaErrorLaunchFailure (error 719)" in api.what
    (race, _) = read_log(logs.RACECHECK).faults
    assert race.what == "race with a write access"
    assert any("solve_tril.py:302" in line for line in race.detail)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("void ns::name<float, (int)4>(float *, int)", "ns::name"),
        ("name()", "name"),
        ("void (anonymous namespace)::name(int)", "name"),
        ("plain_name", "plain_name"),
    ],
)
def test_a_function_keeps_its_arguments(text, name):
    assert plain_name(text) == name


STAGES = {
    "chunk_local_cumsum_scalar_kernel": "cumsum", "gdn_gate_chunk_cumsum_scalar_kernel": "cumsum",
    "chunk_scaled_dot_kkt_fwd_kernel": "kkt", "chunk_gated_delta_rule_fwd_kkt_solve_kernel": "kkt+solve",
    "solve_tril_16x16_kernel": "solve", "merge_16x16_to_64x64_inverse_kernel": "solve",
    "recompute_w_u_fwd_kernel": "wu", "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": "state",
    "chunk_fwd_kernel_o": "output", "fused_recurrent_gated_delta_rule_fwd_kernel": "recurrent",
    "fused_sigmoid_gating_delta_rule_update_kernel": "recurrent", "l2norm_fwd_kernel": "l2norm",
    "_causal_conv1d_fwd_kernel": "conv", "fused_gdn_gating_kernel": "gate", "layer_norm_fwd_kernel": "norm",
    "vectorized_elementwise_kernel": None, "cumsum": "cumsum", "copy_kernel": None,
}  # fmt: skip


@pytest.mark.parametrize("function", STAGES)
def test_a_function_is_given_to_another_stage(function):
    known = function_named(function)
    assert (None if known is None else known.stage) == STAGES[function]


def test_a_block_is_another_chunk_or_head():
    offsets = [0, LENGTHS[0], sum(LENGTHS)]
    places = {}
    for name in ("MEMCHECK", "INITCHECK", "SYNCCHECK"):
        one = blame(read_log(getattr(logs, name)).faults[0], offsets, INFO)
        places[name] = (one.stage, one.sequence, one.head, one.chunk)
    assert places == {
        # Chunks of 64: two of the first sequence, three of the second; block 3 is the second one's number 1.
        "MEMCHECK": ("kkt", 1, 1, 1), "INITCHECK": ("output", 1, 1, 2),
        "SYNCCHECK": ("recurrent", None, None, None),
    }  # fmt: skip
    beyond = read_log(logs.MEMCHECK.replace("block (3,1,0)", "block (5,1,0)")).faults[0]
    assert blame(beyond, offsets, INFO).chunk is None
    own = read_log(logs.INITCHECK.replace("chunk_fwd_kernel_o", "my_twist_kernel")).faults[0]
    assert blame(own, offsets, INFO).stage == "twist"


@pytest.fixture
def under(monkeypatch, tmp_path, case):
    """under('MEMCHECK') -> the report on the emulation's worker under a tool that writes that log."""

    def run(name, **options):
        log = tmp_path / "given.log"
        log.write_text(getattr(logs, name, ""))
        program = tmp_path / "compute-sanitizer"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "fake_sanitizer.py"} "$@"\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv(sanitizer.VARIABLE, str(program))
        monkeypatch.setenv("FAKE_LOG", str(log) if hasattr(logs, name) else name)
        monkeypatch.setattr(module, "DEVICE", "cpu")
        return sanitize(case, options.pop("kernel", "emulation.chunk"), time_limit=120, **options)

    return run


@pytest.mark.parametrize(
    ("name", "verdict", "words", "status"),
    [
        ("MEMCHECK", "fail", "in stage kkt (chunk_scaled_dot_kkt_fwd_kernel, chunk_scaled_dot_kkt.py:63)", 1),
        pytest.param("CLEAN", "pass", "no error", 0, marks=pytest.mark.slow),
    ],
)
def test_an_answer_or_the_tools_last_lines_are_lost_under_a_wrapper(under, name, verdict, words, status):
    report = under(name)
    (result,) = report.results
    assert (result.verdict, report.exit_status) == (verdict, status)
    assert words in result.reason
    assert (result.answer, result.reported) == ("pass", READ[name][1])
    plain = json.loads(dumps(report))
    assert plain["verdict"] == verdict
    if name == "MEMCHECK":
        assert plain["results"][0]["findings"][0]["stage"] == "kkt"
        assert plain["results"][0]["findings"][0]["place"]["tensor"] == "kkt"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "verdict", "words", "status"),
    [
        ("RACECHECK", "fail", "in stage solve", 1),
        ("INITCHECK", "suspect", "in stage output", 0),
        ("SYNCCHECK", "fail", "barrier", 1),
        ("UNKNOWN", "suspect", "later version", 0),
        ("PROBED", "pass", "1 API calls returned errors", 0),
        ("REFUSED", "skipped", "could not look", 3),
        ("CUT", "suspect", "never wrote its summary", 0),
    ],
)
def test_an_account_is_ruled_on_wrongly(under, name, verdict, words, status):
    report = under(name)
    assert (report.results[0].verdict, report.exit_status) == (verdict, status)
    assert words in report.results[0].reason


def test_a_tool_that_starts_no_worker_hangs(under):
    with pytest.raises(CannotRun, match="compute-sanitizer: the worker exited with status 255"):
        under("refuses to start")


@pytest.mark.slow
def test_a_kernel_that_dies_under_the_tool_takes_its_reports_along(under, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    report = under("MEMCHECK", kernel="dies:rule")
    assert report.results[0].verdict == "fail"
    assert report.results[0].answer is None


def test_a_missing_tool_is_more_than_one_line(monkeypatch, tmp_path, capsys, case):
    path = write_case(case, tmp_path / "case.safetensors")
    monkeypatch.delenv(sanitizer.VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sanitizer, "PLACES", ())
    with pytest.raises(SystemExit) as end:
        main(["sanitize", str(path)])
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (3, "", 1)
    assert "compute-sanitizer is not installed here" in err
    monkeypatch.setenv(sanitizer.VARIABLE, str(tmp_path / "none"))
    with pytest.raises(BadInput, match="is no program"):
        sanitizer.find()


def test_a_gpu_is_claimed(monkeypatch, tmp_path, case):
    program = tmp_path / "compute-sanitizer"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(sanitizer.VARIABLE, raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(CannotRun, match="no CUDA device"):
        sanitize(case, "emulation.chunk")
    with pytest.raises(BadInput, match="compute-sanitizer has memcheck"):
        sanitize(case, "emulation.chunk", tools=["leakcheck"])


@pytest.mark.gpu
def test_a_read_past_the_end_is_missed_or_a_sound_kernel_blamed_by_memcheck(monkeypatch):
    try:
        sanitizer.find()
    except CannotRun as error:
        pytest.skip(str(error))
    monkeypatch.syspath_prepend(str(HERE))
    case = make("qwen", lengths=[20, 7], k_heads=1, v_heads=2, dims=(32, 32), state="random")
    kernels = ["out_of_bounds:past_the_end", "out_of_bounds:sound"]
    report = sanitize(case, kernels, time_limit=240)
    if all("not supported" in result.reason for result in report.results):
        pytest.skip(report.results[0].reason)
    bad, good = report.results
    assert (bad.verdict, good.verdict) == ("fail", "pass"), (bad.reason, good.reason, bad.log, good.log)
    blamed = next(one for one in bad.blamed if one.stage == "twist")
    assert blamed.fault.kind == "invalid-access"
    assert (bad.answer, good.answer) == ("pass", "pass")

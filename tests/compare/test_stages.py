"""Stages: a fault planted in one stage is named as made there, and what follows as handed on."""

from __future__ import annotations

import pytest
import torch
from gdncheck.compare.inputs import call_of
from gdncheck.compare.stages import compare_stages
from gdncheck.compare.trial import Trial
from gdncheck.compare.witness import Witness
from gdncheck.kernels import emulation
from gdncheck.kernels.interface import RunResult

LENGTHS = [70, 0, 130]
STAGES = ("cumsum", "kkt", "solve", "wu", "state", "output")
GIVES = {"wu": ("w", "u"), "state": ("h", "v_new")}


class StageRunner:
    """The emulation's stage functions in this process, one tensor of one stage broken on its way out."""

    def __init__(self, tensor=None, fault=None, profile="fla-0.4"):
        self.adapter = emulation.KERNELS["chunk"]()
        self.tensor, self.fault, self.profile = tensor, fault, profile

    @property
    def info(self):
        info = self.adapter.describe()
        capabilities = type(info.capabilities)(
            **{f: getattr(info.capabilities, f) for f in info.capabilities.__struct_fields__}
            | {"profile": self.profile}
        )
        return type(info)(name="broken", capabilities=capabilities, contract=info.contract)

    def run(self, calls):
        results = []
        for call in calls:
            extra = {**call.options.extra, "profile": self.profile}
            options = type(call.options)(
                **{f: getattr(call.options, f) for f in call.options.__struct_fields__} | {"extra": extra}
            )
            results.append(
                RunResult(status="ok", outputs=self._one(type(call)(tensors=call.tensors, options=options)))
            )
        return results

    def _one(self, call):
        original = emulation.emulate_chunk
        if self.tensor in (None, "output"):
            outputs = self.adapter.run(call)
        else:
            emulation.emulate_chunk = lambda *a, **k: broken(original, self.tensor, self.fault, *a, **k)
            try:
                outputs = self.adapter.run(call)
            finally:
                emulation.emulate_chunk = original
        if self.tensor == "output" and "output" in outputs:
            outputs = {**outputs, "output": self.fault(outputs["output"].clone())}
        return outputs


def broken(original, tensor, fault, *args, **options):
    """Run the emulation with one tensor broken: in the chain, or where its stage alone is run."""
    given = dict(options.get("overrides") or {})
    if given and tensor in given:
        return original(*args, **options)
    given[tensor] = fault
    return original(*args, **{**options, "overrides": given, "before_overrides": False})


def scaled(x):
    return x * 1.05


def one_row(x):
    """One token of one head of the first chunk. In [HV, chunks, C, X]."""
    x = x.clone()
    x[-1, 0, 13] *= 1.3
    x[-1, 0, 13] += 0.05 * x.abs().max()
    return x


def shifted(x):
    """Each row holds its neighbour's value."""
    return x.roll(1, -2)


def zeroed(x):
    x = x.clone()
    x[0, :, 16:32] = 0
    return x


def spoiled(x):
    x = x.clone()
    x[0, 0, 7, 0] = float("nan")
    return x


def with_diagonal(x):
    return x + 0.3 * torch.eye(x.shape[-2], x.shape[-1])


def transposed(x):
    return x.mT.contiguous()


def scaled_state(x):
    return x * 1.02


def neighbour_state(x):
    return x.roll(1, 0)


# tensor -> (stage, faults)
FAULTS = {
    "cumsum": ("cumsum", (scaled, one_row, shifted, spoiled)),
    "kkt": ("kkt", (scaled, one_row, with_diagonal, zeroed, spoiled)),
    "solve": ("solve", (scaled, one_row, transposed, zeroed, spoiled)),
    "w": ("wu", (scaled, one_row, shifted, zeroed, spoiled)),
    "u": ("wu", (scaled, one_row, shifted, zeroed)),
    "h": ("state", (scaled_state, transposed, neighbour_state)),
    "v_new": ("state", (scaled, one_row, zeroed, spoiled)),
}
ROWS = [(tensor, stage, fault) for tensor, (stage, faults) in FAULTS.items() for fault in faults]
# Stages that read, directly or through others, what a stage gives.
AFTER = {stage: STAGES[STAGES.index(stage) + 1 :] for stage in STAGES}


def report_on(case, runner):
    witness = case if isinstance(case, Witness) else Witness(case)
    case = witness.case
    first = runner.run([call_of(case)])[0].outputs
    return compare_stages(runner, Trial(witness, runner.info, first["output"], first["final_state"]))


@pytest.fixture(scope="module")
def small(case_of):
    """Slow decay: no row of a stage is so small that nobody could see it go wrong."""
    case = case_of(lengths=LENGTHS)
    return Witness(case.with_tensors(g=case["g"] * 0.05))


@pytest.mark.parametrize(("tensor", "stage", "fault"), ROWS, ids=[f"{t}-{f.__name__}" for t, _, f in ROWS])
def test_a_fault_in_a_stage_is_not_named_as_made_there(tensor, stage, fault, small):
    report = report_on(small, StageRunner(tensor, fault))
    assert report.note == ""
    by_stage = {f.stage: f for f in report.findings}
    made = [f.stage for f in report.findings if f.made]
    assert made == [stage], report.reason
    assert report.first.stage == stage
    assert by_stage[stage].place.tensor == stage
    handed = {f.stage for f in report.findings if f.handed_on}
    assert handed <= set(AFTER[stage])
    assert "output" in handed or stage == "output"
    assert stage in report.reason


def test_the_place_of_a_fault_in_one_row_is_elsewhere(small):
    for tensor in ("kkt", "solve", "w", "u", "v_new"):
        report = report_on(small, StageRunner(tensor, one_row))
        place = report.first.place
        assert (place.sequence, place.head, place.chunk, place.token) == (0, 1, 0, 13), (tensor, place)


def test_a_wrong_stored_state_is_placed_in_no_chunk(small):
    def third_chunk(x):
        third_chunk.calls += 1
        return x * 1.3 if third_chunk.calls == 4 else x  # the fourth chunk of the call: sequence 2, chunk 1

    class Counting(StageRunner):
        def _one(self, call):
            third_chunk.calls = 0
            return super()._one(call)

    place = report_on(small, Counting("h", third_chunk)).first.place
    assert (place.tensor, place.class_, place.sequence, place.chunk) == ("state", "wrong", 2, 1)


@pytest.mark.parametrize(
    "fault", [lambda o: o * 1.02, lambda o: o.roll(1, 0), lambda o: torch.cat([o[:-2], 0 * o[-2:]])]
)
def test_a_fault_of_the_output_stage_is_blamed_on_an_earlier_one(fault, small):
    report = report_on(small, StageRunner("output", fault))
    assert [f.stage for f in report.findings if f.made or f.handed_on] == ["output"]
    assert report.first.made


SOUND = [
    ("qwen", "bf16"),
    ("qwen", "fp32"),
    ("parallel-keys", "bf16"),
    ("tiny-decay", "fp16"),
    ("no-decay", "fp32"),
]
HARD = [
    (f, d)
    for f in ("gaussian", "identical-keys", "mixed-decay", "beta-zero")
    for d in ("bf16", "fp16", "fp32")
]


@pytest.mark.parametrize(
    ("family", "dtype"), [*SOUND, *(pytest.param(*row, marks=pytest.mark.slow) for row in HARD)]
)
def test_a_sound_stage_is_accused(family, dtype, case_of):
    case = case_of(family, lengths=[70, 1, 0, 65], dtype=dtype, k_heads=2, v_heads=2)
    for profile in ("fla-0.4",) if dtype != "bf16" else ("fla-0.4", "generic"):
        report = report_on(case, StageRunner(profile=profile))
        assert report.note == ""
        assert [f.stage for f in report.findings] == list(STAGES)
        assert report.first is None, report.reason


def test_a_kernel_without_stages_or_a_case_without_finite_stages_gets_findings(case_of, small):
    bare = StageRunner()
    without = type("Bare", (), {"run": bare.run, "info": bare.info})
    info = without.info
    without.info = type(info)(
        name=info.name, capabilities=type(info.capabilities)(profile="fla-0.4"), contract=info.contract
    )
    assert "no stage functions" in report_on(small, without).note
    reset = small.case.with_tensors(g=small.case["g"].index_fill(0, torch.tensor([40]), -float("inf")))
    assert "not finite" in report_on(reset, StageRunner()).note
    assert report_on(case_of(lengths=[0]), StageRunner()).note

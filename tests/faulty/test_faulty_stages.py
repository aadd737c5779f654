"""A fault that lies in one stage is named as made there; a sound kernel's stages are within their limits."""

from __future__ import annotations

import pytest
from faulty_model import Fault
from faulty_run import case_of
from faulty_stages import STAGES, StagedKernel
from faulty_table import FAULTS
from gdncheck.compare.inputs import call_of
from gdncheck.compare.stages import compare_stages
from gdncheck.compare.trial import Trial
from gdncheck.compare.witness import Witness

IN_A_STAGE = {name: f for name, f in FAULTS.items() if f.stage and not f.unseen}


@pytest.fixture(scope="module")
def witnesses():
    return {name: Witness(case_of(name)) for name in ("packed", "fp32", "parallel")}


def report_on(fault, witness):
    runner = StagedKernel(fault)
    first = runner.run([call_of(witness.case)])[0].outputs
    return compare_stages(runner, Trial(witness, runner.info, first["output"], first["final_state"]))


@pytest.mark.parametrize("name", IN_A_STAGE)
def test_a_fault_is_blamed_on_another_stage_than_its_own(name, witnesses):
    fault = IN_A_STAGE[name]
    report = report_on(fault, witnesses[fault.cases[0]])
    made = [f.stage for f in report.findings if f.made]
    assert made[:1] == [fault.stage], (made, report.reason, report.note)
    assert report.first.stage == fault.stage, report.reason


@pytest.mark.parametrize("case", ["packed", "fp32", "parallel"])
def test_a_sound_stage_is_accused(case, witnesses):
    report = report_on(Fault({}), witnesses[case])
    assert [f.stage for f in report.findings] == list(STAGES), report.note
    assert report.first is None, report.reason

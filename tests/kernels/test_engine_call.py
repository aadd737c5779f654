"""What the engines' adapters share: refusals in one line, l2norm by place, stand-ins, contracts as data."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from gdncheck.capture.errors import CannotRun, Refused
from gdncheck.compare.clauses import TRANSFORMS, transforms_of
from gdncheck.kernels import contracts_engines, engine_call, layouts
from gdncheck.kernels.contract import Capabilities
from gdncheck.kernels.interface import KernelCall, RunOptions
from gdncheck.kernels.standins.modules import locate
from gdncheck.reference.precision import CAST_POINTS, DOTS, FORMATS, PROFILES
from hypothesis import given, settings
from hypothesis import strategies as st

CAPABILITIES = Capabilities(input_dtypes=("bfloat16",), state_dtypes=("float32",), default_chunk_size=64)
CONTRACTS = [
    (contracts_engines.vllm_chunk, "0.19.1"),
    (contracts_engines.vllm_chunk, "0.33.0"),
    (contracts_engines.vllm_recurrent, "0.19.1"),
    (contracts_engines.vllm_recurrent, "0.33.0"),
    (contracts_engines.sglang_chunk, None),
    (contracts_engines.sglang_recurrent, None),
    (contracts_engines.flashinfer_chunk, None),
    (contracts_engines.vllm_cpu_chunk, None),
    (contracts_engines.vllm_cpu_recurrent, None),
]


def call(T=4, HK=1, HV=2, dtype=torch.bfloat16, **more):
    options = more.pop("options", RunOptions())
    tensors = {
        "q": torch.ones(T, HK, 8, dtype=dtype),
        "k": torch.ones(T, HK, 8, dtype=dtype),
        "v": torch.ones(T, HV, 8, dtype=dtype),
        "g": torch.zeros(T, HV),
        "beta": torch.ones(T, HV),
        "cu_seqlens": torch.tensor([0, T]),
        **more,
    }
    return KernelCall(tensors=tensors, options=options)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (call(dtype=torch.float32), "must share one of bfloat16, not float32"),
        (call(v=torch.ones(4, 2, 8)), "must share one of bfloat16, not bfloat16, float32"),
        (call(g=torch.zeros(4, 2, 8)), "one decay per head"),
        (call(HK=2, HV=3), "3 value heads cannot share 2 key heads evenly"),
        (call(T=0), "never called without a token"),
        (call(options=RunOptions(chunk_size=16)), "works in chunks of 64, not 16"),
        (call(options=RunOptions(state_dtype="float16")), "keeps its state in float32, not float16"),
    ],
)
def test_what_a_kernel_cannot_take_is_refused_with_the_value(made, message):
    with pytest.raises(Refused, match=message):
        engine_call.check_rule_call("x.chunk", made, CAPABILITIES)


def test_ordinary_call_is_not_refused():
    engine_call.check_rule_call("x.chunk", call(options=RunOptions(chunk_size=64)), CAPABILITIES)


@pytest.mark.parametrize(("lengths", "refused"), [
    ([2, 2], False), ([2, 2, 0, 0], False), ([0, 4], True), ([2, 0, 2], True), ([0, 0], False), ([4], False),
])  # fmt: skip
def test_empty_sequence_is_refused_only_before_another(lengths, refused):
    made = call(cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
    if refused:
        with pytest.raises(Refused, match=f"sequence {lengths.index(0)} is empty"):
            engine_call.check_no_empty("x.chunk", made)
        allowed = call(cu_seqlens=made.tensors["cu_seqlens"], options=RunOptions(extra={"allow_empty": True}))
        engine_call.check_no_empty("x.chunk", allowed)
    else:
        engine_call.check_no_empty("x.chunk", made)


@pytest.mark.parametrize(("qk", "asked", "default", "in_kernel"), [
    ("raw", None, "in_kernel", True), ("raw", None, "before", False), ("raw", "before", "in_kernel", False),
    ("raw", "in_kernel", "before", True), ("normalised", None, "in_kernel", False),
])  # fmt: skip
def test_l2norm_happens_exactly_once(qk, asked, default, in_kernel):
    q, k, flag = engine_call.prepared_qk(call(options=RunOptions(qk=qk, l2norm=asked)), default)
    assert flag is in_kernel
    normalised_here = not torch.equal(q, torch.ones_like(q))
    assert normalised_here == (qk == "raw" and not in_kernel)
    assert normalised_here == (not torch.equal(k, torch.ones_like(k)))


def test_beta_is_rounded_for_bfloat16_models_only():
    beta = torch.tensor([0.1234567])
    assert engine_call.rounded_beta(beta, torch.ones(1, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert engine_call.rounded_beta(beta, torch.ones(1, dtype=torch.float16)) is beta


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 1))
def test_no_bfloat16_logit_comes_nearer_to_a_beta_than_the_chosen_one(beta):
    wanted = torch.tensor([beta], dtype=torch.float32)
    logit, effective = layouts.beta_through_logit(wanted)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[torch.isfinite(every)]
    possible = layouts.sigmoid_in_bfloat16(every).float()
    best = (possible - wanted).abs().min()
    assert torch.equal(layouts.sigmoid_in_bfloat16(logit).float(), effective)
    assert (effective - wanted).abs().item() <= best.item() + 1e-9


def test_zero_half_and_one_pass_through_the_logit_exactly():
    exact = torch.tensor([0.0, 0.5, 1.0])
    assert torch.equal(layouts.beta_through_logit(exact)[1], exact)


@pytest.mark.parametrize(("contract_of", "version"), CONTRACTS)
def test_contract_is_data_that_others_understand(contract_of, version):
    contract = contract_of(version)
    ids = [clause.id for clause in contract.clauses]
    assert len(ids) == len(set(ids)), "a clause is declared twice"
    for clause in contract.clauses:
        assert clause.source, f"{clause.id} says not where it was read"
        if clause.kind == "transform":
            assert clause.id in TRANSFORMS, f"nothing applies {clause.id}"
        if clause.id.startswith("cast."):
            assert clause.id.removeprefix("cast.") in CAST_POINTS
            assert clause.value in ("native", "promoted", *FORMATS)
        if clause.id.startswith("dot."):
            assert clause.id.removeprefix("dot.") in DOTS
    assert contract.value("precision.profile") in PROFILES
    assert contract.relation("run-to-run") == "promised"
    assert version is None or contract.kernel.endswith(f"@{version}")


def test_contract_changes_where_the_versions_did():
    old, new = contracts_engines.vllm_chunk("0.19.1"), contracts_engines.vllm_chunk("0.33.0")
    assert [c.id for c in transforms_of(old)] == ["beta.dtype"], "0.19.1 stores beta in bf16"
    assert transforms_of(new) == ()
    assert old.value("l2norm.place").startswith("in the kernel")
    assert new.value("l2norm.place").startswith("before")
    assert contracts_engines.vllm_recurrent("0.33.0").value("slots.padding").startswith("index 0")


def test_unknown_layout_says_what_was_looked_for(tmp_path):
    with pytest.raises(
        CannotRun, match=r"vllm@9: the layout of its kernels is unknown; looked for vllm/a.py and"
    ):
        locate("vllm@9", ("vllm/a.py", "vllm/b.py"), [str(tmp_path)])
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "b.py").touch()
    assert locate("vllm@9", ("vllm/a.py", "vllm/b.py"), ["", str(tmp_path)]) == (tmp_path, "vllm/b.py")


def test_kernel_file_imports_without_its_engine(tmp_path):
    """A package whose own __init__ would fail; a missing part is named; in a process of its own."""
    folder = tmp_path / "engine_x" / "ops"
    folder.mkdir(parents=True)
    (tmp_path / "engine_x" / "__init__.py").write_text("raise RuntimeError('the engine itself')\n")
    (folder / "__init__.py").write_text("raise RuntimeError('the ops package')\n")
    (folder / "kernel.py").write_text("from engine_x.platform import name\nfrom .other import answer\n")
    (folder / "other.py").write_text("answer = 42\n")
    (folder / "lost.py").write_text("import engine_x.config\n")
    script = textwrap.dedent("""
        import sys
        from importlib import import_module
        from pathlib import Path
        from gdncheck.kernels.standins.modules import bare_packages, missing_part, stand_in
        bare_packages(Path(sys.argv[1]), "engine_x.ops")
        stand_in("engine_x.platform", name="cpu")
        kernel = import_module("engine_x.ops.kernel")
        assert (kernel.name, kernel.answer) == ("cpu", 42)
        try:
            import_module("engine_x.ops.lost")
        except ModuleNotFoundError as error:
            print(missing_part(error, "engine_x@1"))
    """)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "engine_x@1: its kernel files import engine_x.config" in done.stdout

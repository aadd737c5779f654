"""Hypotheses: an undeclared honest transform is a suspect, a named mistake stays a fail, noise is unnamed."""

from __future__ import annotations

import pytest
import torch
from gdncheck.compare.catalogue import CATALOGUE
from gdncheck.compare.inputs import inputs_of


@pytest.fixture(scope="module")
def case(case_of):
    """Slow decays, small keys for the l2norm's eps to matter, float32 beta."""
    made = case_of(lengths=[70, 40], k_heads=2, v_heads=4, dims=(32, 32), dtype="bf16", seed=3)
    wide = (made["beta"].float() * 0.9 + 0.013).clamp(0, 1)
    return made.with_tensors(g=made["g"] * 0.1, beta=wide)


def raw(case, size):
    """The case with raw q and k of such a size."""
    import msgspec

    tensors = {name: (case[name].float() * size).to(case[name].dtype) for name in ("q", "k")}
    changed = case.with_tensors(**tensors)
    return msgspec.structs.replace(changed, options=msgspec.structs.replace(changed.options, qk="raw"))


def normalise(x, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


IN_KERNEL = {"l2norm": "in_kernel"}


@pytest.fixture(scope="module")
def changed(honest):
    """A sound kernel of another function: before(call) changes what it reads, after what it gives."""

    def build(before=None, after=None):
        def rule(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
            call = {
                "q": q,
                "k": k,
                "v": v,
                "g": g,
                "beta": beta,
                "initial_state": initial_state,
                "scale": scale,
            }
            call |= before(call) if before else {}
            tensors = [call.pop(n) for n in ("q", "k", "v", "g", "beta")]
            output, state = honest.chunk(
                *tensors, **call, output_final_state=output_final_state, cu_seqlens=cu_seqlens
            )
            return after(output, state) if after else (output, state)

        return rule

    return build


def with_norm(eps):
    return lambda c: {"q": normalise(c["q"], eps), "k": normalise(c["k"], eps)}


# name of the entry -> (changes of the call, capabilities, size of raw q and k or None)
EXCUSABLE = {
    "l2norm.eps 1e-05": (with_norm(1e-5), IN_KERNEL, 0.01),
    "l2norm.eps 0.001": (with_norm(1e-3), IN_KERNEL, 0.1),
    "gate.alpha-offset 0.0001": (lambda c: {"g": (c["g"].exp() + 1e-4).log()}, None, None),
    "gate.floor -5": (lambda c: {"g": c["g"].clamp(min=-5)}, None, None),
    "beta.dtype bfloat16": (lambda c: {"beta": c["beta"].bfloat16().float()}, None, None),
    "g.dtype bfloat16": (lambda c: {"g": c["g"].bfloat16().float()}, None, None),
}


def case_for(name, case):
    """A case in which the transform moves results beyond rounding: float32 inputs where it is a rounding."""
    if name.startswith("gate.floor"):
        return case.with_tensors(g=case["g"].index_fill(0, torch.tensor([20, 55]), -5.7), **wide(case))
    if name.startswith("gate.alpha"):
        return case.with_tensors(g=case["g"].index_fill(0, torch.tensor([20, 55]), -9.0), **wide(case))
    if "dtype" in name:
        return case.with_tensors(**wide(case))
    return case


def wide(case):
    return {name: case[name].float() for name in ("q", "k", "v")}


@pytest.mark.parametrize("name", EXCUSABLE)
def test_an_undeclared_contract_is_called_a_fault_or_passed(name, case, changed, verdict_on):
    before, capabilities, size = EXCUSABLE[name]
    case = case_for(name, case if size is None else raw(case, size))
    capabilities = {**(capabilities or {}), "profile": "fla-0.4"}
    result = verdict_on(changed(before), case, capabilities=capabilities, relations="none")
    assert result.ruling.hypothesis is not None, result.ruling.reason
    assert (result.verdict, result.ruling.hypothesis.clause) == ("suspect", name), result.ruling.reason
    assert result.ruling.hypothesis.text in result.ruling.reason
    assert "hypothesis" in result.ruling.reason


def interleaved(c):
    order = torch.arange(c["v"].shape[1]) % c["q"].shape[1]
    return {"q": c["q"][:, order], "k": c["k"][:, order]}


MISTAKES = {
    "gate.base-2": (lambda c: {"g": c["g"] * 0.6931471805599453}, None),
    "gate.missing": (lambda c: {"g": torch.zeros_like(c["g"])}, None),
    "gate.next": (lambda c: {"g": torch.cat([c["g"][1:], c["g"][:1]])}, None),
    "decay.after-write": (lambda c: {"v": (c["v"].float() * c["g"].exp()[..., None]).to(c["v"].dtype)}, None),
    "beta.squared": (lambda c: {"beta": c["beta"] ** 2}, None),
    "beta.missing": (lambda c: {"beta": torch.ones_like(c["beta"])}, None),
    "scale.squared": (lambda c: {"scale": c["scale"] ** 2}, None),
    "scale.missing": (lambda c: {"scale": 1.0}, None),
    "state.returned-transposed": (None, lambda o, s: (o, s.mT.contiguous())),
    "state.taken-transposed": (lambda c: {"initial_state": c["initial_state"].mT.contiguous()}, None),
    "state.transposed": (
        lambda c: {"initial_state": c["initial_state"].mT.contiguous()},
        lambda o, s: (o, s.mT.contiguous()),
    ),
    "state.dropped": (lambda c: {"initial_state": None}, None),
    "state.previous": (lambda c: {"initial_state": c["initial_state"].roll(1, 0)}, None),
    "heads.interleaved": (interleaved, None),
    "heads.shifted": (None, lambda o, s: (o.roll(1, 1), s.roll(1, 1))),
    "q-k.swapped": (lambda c: {"q": c["k"], "k": c["q"]}, None),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_that_has_a_name_is_excused_or_unnamed(name, case, changed, verdict_on):
    before, after = MISTAKES[name]
    result = verdict_on(changed(before, after), case, relations="none")
    assert result.verdict == "fail"
    assert result.ruling.hypothesis is not None, result.ruling.reason
    assert result.ruling.hypothesis.clause == name
    assert not result.ruling.hypothesis.excusable
    assert f"looks as if {result.ruling.hypothesis.text}" in result.ruling.reason


def test_a_missing_l2norm_is_excused(case, changed, verdict_on):
    result = verdict_on(changed(), raw(case, 1.2), capabilities=IN_KERNEL, relations="none")
    assert (result.verdict, result.ruling.hypothesis.clause) == ("fail", "l2norm.missing")


@pytest.mark.parametrize("size", [0.0, 0.02, 0.3])
def test_a_local_fault_is_explained_by_some_transform(size, case, changed, verdict_on):
    def after(output, state):
        output = output.clone()
        output[33, 1] += size * output.float().square().mean().sqrt() + output[33, 1] * 0.1 * (size > 0)
        return output, state

    result = verdict_on(changed(after=after), case.with_tensors(**wide(case)), relations="none")
    assert result.ruling.hypothesis is None
    assert result.verdict == ("fail" if size else "pass")


def test_an_excuse_covers_a_breach_of_isolation_or_a_nan(case, changed, verdict_on):
    beta = EXCUSABLE["beta.dtype bfloat16"][0]

    def leaking(output, state):
        if state.shape[0] > 1:
            state = state.clone()
            state[1] += 1e-5 * state[0]
        return output, state

    def spoiled(output, state):
        output = output.clone()
        output[3, 0, 0] = float("nan")
        return output, state

    precise = case.with_tensors(**wide(case))
    for after, rule in ((leaking, "isolation"), (spoiled, "non-finite")):
        options = {"capabilities": {"profile": "fla-0.4"}, "relations": "quick"}
        result = verdict_on(changed(beta, after), precise, **options)
        assert result.verdict == "fail", result.ruling.reason
        assert rule in {o.check for o in result.ruling.outcomes if o.status == "fires"}


def test_a_float32_state_rounded_to_bf16_is_excused(case, changed, verdict_on):
    result = verdict_on(changed(after=lambda o, s: (o, s.bfloat16().float())), case, relations="none")
    assert result.verdict == "fail"


def test_entries_share_an_id_or_do_nothing(case):
    assert len({entry.id for entry in CATALOGUE}) == len(CATALOGUE)
    inputs = inputs_of(case.with_tensors(**wide(case)))
    for entry in CATALOGUE:
        assert (entry.inputs is None) != (entry.result is None), entry.id
        if entry.inputs is not None and entry.needs(inputs):
            other = entry.inputs(inputs)
            assert any(getattr(other, f) is not getattr(inputs, f) for f in inputs.__struct_fields__), (
                entry.id
            )

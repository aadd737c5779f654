"""Every relation of tier 4: a kernel that breaks it alone is caught by it, and a sound one is not accused."""

from __future__ import annotations

import msgspec
import pytest
import torch
from gdncheck.compare.inputs import inputs_of, take_sequences
from gdncheck.compare.relations.beta_zero import pure_decay
from gdncheck.compare.relations.plan import RELATIONS, WITH_PROCESSES, choose
from gdncheck.kernels import contracts_engines, contracts_fla
from gdncheck.kernels.contract import PART_OF, Capabilities, Contract
from gdncheck.kernels.contract import RELATIONS as VOCABULARY
from gdncheck.kernels.interface import KernelInfo, RunResult
from gdncheck.reference.truth import truth

LENGTHS = [70, 1, 130]


def outcomes_of(result, name):
    return [o for o in result.ruling.outcomes if o.check == name]


def fired(result, name):
    return [o for o in outcomes_of(result, name) if o.status == "fires"]


# Each takes (honest result, call, memory of the kernel) and returns what the broken kernel gives. They break
# a relation while the case's own call is right, or nearly so.


def by_place_of_head(q, output, state, call, memory):
    """Its first head is 10 % too large unless it is the head that came first before."""
    g = memory.setdefault("g", call["g"].clone())
    same_heads = g.shape == call["g"].shape and torch.equal(g.sort(1).values, call["g"].sort(1).values)
    if same_heads and not torch.equal(g, call["g"]):
        output[:, 0] *= 1.1
    return output, state


def by_first_sequence(q, output, state, call, memory):
    """Works for sequence lengths that never fall, and drops the last row of the first sequence else."""
    lengths = call["cu_seqlens"].diff()
    if len(lengths) == 3 and int(lengths[0]) != 70:
        output[int(call["cu_seqlens"][1]) - 1] = 0
    return output, state


def clamps(q, output, state, call, memory):
    """Clamps the state: larger values are cut off."""
    limit = memory.setdefault("limit", float(state.abs().max()) * 1.01 if state.numel() else 1.0)
    return output, state.clamp(-limit, limit)


def adds_ungated(q, output, state, call, memory):
    """Writes a little of v whatever beta says."""
    if call["beta"].numel() and float(call["beta"].abs().max()) == 0:
        output = output + 0.05 * call["v"]
    return output, state


def doubles_small_batches(q, output, state, call, memory):
    """A sequence alone comes out 5 % too large."""
    if len(call["cu_seqlens"]) == 2:
        output = output * 1.05
    return output, state


def remembers(q, output, state, call, memory):
    """Hands out the state of a call before, if it had the same shape and its inputs lay elsewhere."""
    key = tuple(state.shape)
    before = memory.get(key)
    memory[key] = state.clone()
    return output, state if before is None or torch.equal(before, state) else 0.5 * (before + state)


def drops_handed_states(q, output, state, call, memory):
    """A call that begins with a state of another size than the case's forgets a tenth of it."""
    start = call["initial_state"]
    first = memory.setdefault("start", None if start is None else start.clone())
    if start is not None and first is not None and start.shape != first.shape:
        output = output * 1.1
    return output, state


def returns_older_state(q, output, state, call, memory):
    """Returns the state of the token before the last: right enough for no check of the output."""
    return output, state * 1.03


BROKEN = {
    "head-permutation": by_place_of_head,
    "sequence-permutation": by_first_sequence,
    "power-of-two-scaling": clamps,
    "beta-zero": adds_ungated,
    "batch-invariance": doubles_small_batches,
    "call-order": remembers,
    "split-concat": drops_handed_states,
    "prefix-state": returns_older_state,
}


@pytest.fixture(scope="module")
def run_broken(honest, as_rule, verdict_on):
    def run(fault, case, kernel=None, **options):
        memory = {}

        def kernel_of(q, k, v, g, beta, **given):
            output, state = (kernel or honest.chunk)(q, k, v, g, beta, **given)
            call = {"v": v, "g": g, "beta": beta, **given}
            return fault(q, output.clone(), state.clone(), call, memory)

        return verdict_on(as_rule(kernel_of), case, **options)

    return run


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_breach_is_missed_or_unplaced(name, dtype, run_broken, case_of):
    case = case_of(lengths=LENGTHS, dtype=dtype, k_heads=1, v_heads=2)
    result = run_broken(BROKEN[name], case)
    found = fired(result, name)
    assert result.verdict == "fail"
    assert found, [(o.check, o.status) for o in result.ruling.outcomes if o.tier == 4]
    assert found[0].place is not None
    assert found[0].numbers["exercised"] > 0
    assert found[0].numbers["would_pass"]
    assert name in found[0].reason


SOUND = [
    {"lengths": LENGTHS},
    {"lengths": [0, 65, 0, 3, 130, 0], "state": "none"},
    {"lengths": [200], "k_heads": 2, "v_heads": 4, "dims": (64, 32)},
    {"lengths": [64, 64], "k_heads": 2, "v_heads": 2},
    {"lengths": [1]},
]


@pytest.mark.parametrize("shape", range(len(SOUND)))
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_sound_kernel_breaks_one(shape, dtype, honest, case_of, verdict_on):
    case = case_of(dtype=dtype, **SOUND[shape])
    for kernel in (honest.chunk, honest.recurrent):
        result = verdict_on(kernel, case)
        assert result.verdict == "pass", result.ruling.reason
        for outcome in (o for o in result.ruling.outcomes if o.tier == 4):
            assert outcome.status in ("ok", "not-applicable"), outcome
            assert outcome.status == "ok" or outcome.reason
            assert outcome.status != "ok" or outcome.numbers["exercised"] > 0


@pytest.mark.parametrize("family", ["parallel-keys", "tiny-decay", "no-decay", "mixed-decay", "beta-zero"])
def test_a_sound_kernel_breaks_one_on_a_hard_family(family, honest, case_of, verdict_on):
    case = case_of(family, lengths=[90, 20], dtype="bf16")
    for kernel in (honest.chunk, honest.recurrent):
        assert verdict_on(kernel, case).verdict == "pass"


@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_sound_kernel_that_declares_no_chunk_size_is_accused_of_how_it_is_cut(
    seed, chunk_size, honest, case_of, verdict_on
):
    """On like keys another chunking moves honest bfloat16 results far."""

    def chunked(*inputs, **call):
        return honest.chunk(*inputs, chunk_size=chunk_size, **call)

    case = case_of("identical-keys", lengths=[300, 70 + 30 * seed, 190], dtype="bf16", seed=seed)
    result = verdict_on(plain(chunked), case)
    assert result.verdict == "pass", result.ruling.reason
    ran = [o for o in result.ruling.outcomes if o.check == "split-concat"]
    assert ran
    assert all(o.status == "ok" for o in ran), ran


def plain(kernel):
    """The kernel with the keywords that every function is called with, and no other."""

    def rule(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
        return kernel(
            q, k, v, g, beta, scale=scale, initial_state=initial_state,
            output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        )  # fmt: skip

    return rule


def test_what_makes_no_sense_for_a_case_is_judged_all_the_same(honest, case_of, verdict_on):
    reasons = {
        o.check: o.reason
        for o in verdict_on(honest.chunk, case_of(lengths=[10], k_heads=1, v_heads=1)).ruling.outcomes
        if o.status == "not-applicable" and o.tier == 4
    }
    assert "one head" in reasons["head-permutation"]
    assert "fewer than two" in reasons["sequence-permutation"]
    # The kernel declares no chunk size, so a cut must suit every usual one.
    assert "longer than 128" in reasons["split-concat"]
    assert "no slots" in reasons["slot-permutation"]
    assert "one process" in reasons["across-processes"]


def test_a_relation_that_a_contract_does_not_promise_is_asked_for(honest, case_of, verdict_on):
    clauses = [
        {
            "id": f"relation.{n}",
            "kind": "relation",
            "applies_to": n,
            "value": "not promised",
            "source": "test",
        }
        for n in ("head-permutation", "call-order")
    ]
    result = verdict_on(honest.chunk, case_of(lengths=[40, 20]), capabilities={"clauses": clauses})
    for name in ("head-permutation", "call-order"):
        (outcome,) = outcomes_of(result, name)
        assert (outcome.status, outcome.reason) == ("not-applicable", "not promised by the kernel's contract")


def test_lost_bits_fail_only_where_bits_are_promised(run_broken, case_of):
    def one_ulp(q, output, state, call, memory):
        memory["calls"] = memory.get("calls", 0) + 1
        if call["cu_seqlens"].tolist() == [0, 40]:
            output[5, 0, 3] *= 1 + 2.0**-7
        return output, state

    case = case_of(lengths=[40, 20])
    mild = run_broken(one_ulp, case)
    assert mild.verdict == "pass", mild.ruling.reason
    lost = [o for o in outcomes_of(mild, "batch-invariance") if o.numbers.get("moved_rows")]
    assert lost
    assert lost[0].numbers["promise"] == "observed"
    clause = {"id": "relation.batch-invariance", "kind": "relation", "applies_to": "bits", "source": "test"}
    strict = run_broken(one_ulp, case, capabilities={"clauses": [clause | {"value": "promised"}]})
    assert (strict.verdict, strict.ruling.rule) == ("fail", "batch-invariance")


class Processes:
    """A runner with processes: each has a memory of its own."""

    def __init__(self, in_process, function_of):
        self.in_process, self.function_of = in_process, function_of
        self.processes_started = 0
        self._new()

    def _new(self):
        self.processes_started += 1
        self.current = self.in_process(self.function_of(self.processes_started))

    @property
    def info(self):
        return self.current.info

    def run(self, calls, *, fresh_process=False):
        if not fresh_process:
            return self.current.run(calls)
        results = []
        for call in calls:
            self._new()
            results += self.current.run([call])
        self._new()
        return results


@pytest.mark.parametrize("broken", ["sound", "first call", "another process"])
def test_a_first_call_or_another_process_gives_something_else(
    broken, honest, case_of, in_process, verdict_on, as_rule
):
    def function_of(process):
        calls = [0]

        def rule(q, k, v, g, beta, **options):
            output, state = honest.chunk(q, k, v, g, beta, **options)
            calls[0] += 1
            if broken == "first call" and calls[0] == 1 and process > 1:
                output = output * 1.05
            if broken == "another process" and process > 1:
                state = state * 1.05
            return output, state

        return as_rule(rule)

    result = verdict_on(None, case_of(lengths=[40, 20]), runner=Processes(in_process, function_of))
    first, other = fired(result, "first-vs-warm"), fired(result, "across-processes")
    assert bool(first) == (broken == "first call")
    assert bool(other) == (broken != "sound")
    assert (result.verdict == "pass") == (broken == "sound")
    assert all(o.numbers["exercised"] > 0 for n in WITH_PROCESSES for o in outcomes_of(result, n))


class WithEvidence:
    """A runner whose calls can be poisoned and guarded, as a worker's can."""

    def __init__(self, in_process, function, fault):
        self.inner, self.fault = in_process(function), fault

    @property
    def info(self):
        return self.inner.info

    def run(self, calls):
        return [self._one(call, result) for call, result in zip(calls, self.inner.run(calls), strict=True)]

    def _one(self, call, result):
        if not call.options.poison or result.status != "ok":
            return result
        written = (
            [{"buffer": "input q", "side": "after", "bytes": 16}] if self.fault == "writes outside" else []
        )
        evidence = {
            "poisoned_bytes": 0 if self.fault == "nothing to poison" else 4096,
            "guard_written": written,
        }
        outputs = dict(result.outputs)
        if self.fault == "reads fresh memory":
            outputs["output"] = outputs["output"].clone()
            outputs["output"][7, 1, 0] = float("nan")
        return RunResult(status="ok", outputs=outputs, evidence=evidence)


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("", "ok"),
        ("reads fresh memory", "fires"),
        ("writes outside", "fires"),
        ("nothing to poison", "not-applicable"),
    ],
)
def test_poisoned_memory_is_read_or_a_guard_written_unseen(
    fault, status, honest, case_of, in_process, verdict_on
):
    result = verdict_on(None, case_of(lengths=[40]), runner=WithEvidence(in_process, honest.chunk, fault))
    (outcome,) = outcomes_of(result, "fresh-memory")
    assert outcome.status == status
    assert (result.verdict == "fail") == (status == "fires")
    if fault == "reads fresh memory":
        assert (outcome.place.class_, outcome.place.head, outcome.place.token) == ("nan", 1, 7)


@pytest.mark.parametrize("fault", ["", "reads them", "refuses"])
def test_rows_that_nobody_owns_reach_a_sequence(fault, honest, case_of, verdict_on, as_rule):
    def rule(q, k, v, g, beta, **options):
        n = int(options["cu_seqlens"][-1])
        if fault == "refuses" and len(v) != n:
            raise ValueError("q has more tokens than cu_seqlens")
        output, state = honest.chunk(q[:n], k[:n], v[:n], g[:n], beta[:n], **options)
        output = torch.cat([output, output.new_full((len(v) - n, *output.shape[1:]), 7.0)])
        if fault == "reads them" and len(v) > n:
            output[n - 1] += v[n]
        return output, state

    result = verdict_on(as_rule(rule), case_of(lengths=[40, 20]))
    (outcome,) = outcomes_of(result, "unowned")
    assert outcome.status == {"": "ok", "reads them": "fires", "refuses": "not-applicable"}[fault]
    assert (result.verdict == "pass") == (fault != "reads them")


def pool_rule(honest, fault=""):
    """A kernel that addresses a pool in place."""

    def rule(
        q,
        k,
        v,
        g,
        beta,
        *,
        scale,
        initial_state,
        output_final_state,
        cu_seqlens,
        pool=None,
        slot_indices=None,
    ):
        options = {"scale": scale, "output_final_state": True, "cu_seqlens": cu_seqlens}
        if pool is None:
            return honest.chunk(q, k, v, g, beta, initial_state=initial_state, **options)
        at = slot_indices.long()
        read = torch.arange(len(at)) if fault == "ignores indices" else at
        output, state = honest.chunk(q, k, v, g, beta, initial_state=pool[read], **options)
        pool[at] = state.to(pool.dtype)
        if fault == "writes slot 0":
            pool[0] = 0
        return output, None

    return rule


@pytest.mark.parametrize("fault", ["", "ignores indices", "writes slot 0"])
def test_a_slot_is_mistaken_for_another(fault, honest, case_of, verdict_on):
    rule = pool_rule(honest, fault)
    result = verdict_on(rule, case_of(lengths=[40, 20, 5]), capabilities={"slots": True})
    (outcome,) = outcomes_of(result, "slot-permutation")
    assert outcome.status == ("fires" if fault else "ok"), outcome
    assert outcome.numbers["exercised"] > 0 or fault == "writes slot 0"
    assert (result.verdict == "fail") == bool(fault)


def test_the_closed_form_of_pure_decay_is_not_the_truth(case_of):
    for raw in (False, True):
        qk = "raw" if raw else "normalised"
        inputs = inputs_of(case_of(lengths=LENGTHS, k_heads=1, v_heads=2, dims=(32, 16), qk=qk))
        inputs = type(inputs)(
            **{f: getattr(inputs, f) for f in inputs.__struct_fields__} | {"beta": inputs.beta * 0}
        )
        output, state, _, _ = pure_decay(inputs)
        true, final = truth(**inputs.keywords())
        assert torch.allclose(output, true, rtol=1e-10, atol=1e-14)
        assert torch.allclose(state, final, rtol=1e-10, atol=1e-14)


def test_states_that_fade_below_float32_are_a_breach(honest, case_of, verdict_on, as_rule):
    """A machine that flushes subnormal numbers to zero is sound."""

    def flushing(*tensors, **options):
        output, state = honest.recurrent(*tensors, **options)
        least = torch.finfo(torch.float32).smallest_normal
        return torch.where(output.abs() < 8 * least, 0, output), torch.where(
            state.abs() < 8 * least, 0, state
        )

    case = case_of(lengths=[90, 20])
    for total in (-84.0, -88.0, -95.0):
        result = verdict_on(as_rule(flushing), case.with_tensors(g=torch.full_like(case["g"], total / 88)))
        assert [o.status for o in outcomes_of(result, "beta-zero")] == ["ok"], total


def test_sequences_taken_out_of_a_call_lose_their_state_or_tokens(case_of):
    inputs = inputs_of(case_of(lengths=LENGTHS))
    part = take_sequences(inputs, [2, 0], tokens=[30, 70])
    assert part.cu_seqlens.tolist() == [0, 30, 100]
    assert torch.equal(part.v[:30], inputs.v[71:101])
    assert torch.equal(part.initial_state, inputs.initial_state[[2, 0]])
    rest = take_sequences(inputs, [2], skip=[30])
    assert torch.equal(rest.k, inputs.k[101:])


def test_contracts_and_checks_speak_of_relations_by_different_names():
    everywhere = {**contracts_fla._TABLE, **{
        name: getattr(contracts_engines, name)
        for name in dir(contracts_engines)
        if name.startswith(("vllm_", "sglang_", "flashinfer_"))
    }}  # fmt: skip
    contracts = [make(None) for make in everywhere.values()]
    contracts += [
        contracts_fla.contract_for(n, None) for n in ("emulation.chunk", "emulation.recurrent", "mine:rule")
    ]
    assert len(contracts) > 10
    for contract in contracts:
        named = {c.id.removeprefix("relation.") for c in contract.clauses if c.kind == "relation"}
        assert named
        assert named <= set(VOCABULARY), (contract.kernel, named - set(VOCABULARY))
        assert {c.value for c in contract.clauses if c.kind == "relation"} <= {
            "promised",
            "observed",
            "not promised",
        }
    assert set(RELATIONS) <= set(VOCABULARY)
    assert set(PART_OF) | set(PART_OF.values()) <= set(VOCABULARY)


def test_auto_starts_processes_or_spares_a_fast_kernel():
    info = KernelInfo(name="k", contract=Contract(kernel="k"))
    small = msgspec.structs.replace(info, environment={"interpreted": True})
    slow = msgspec.structs.replace(small, capabilities=Capabilities(max_tokens_cpu=512))
    for fast in (info, small):
        assert set(choose("auto", fast, 0.1)) == set(RELATIONS) - set(WITH_PROCESSES)
    assert set(choose("auto", slow, 0.1)) == set(choose("quick", info, 0.1)) == {"causality", "isolation"}
    assert set(choose("all", slow, 99.0)) == set(RELATIONS)
    assert choose("none", info, 0.1) == ()

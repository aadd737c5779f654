"""Runs faulty kernels through the real pipeline: one worker, one witness per case, a verdict per fault.

The idea: the worker holds `faulty_kernels:dispatch`, and a runner stands in for one fault by adding its
name to every call. What a verdict may say is the table's (`faulty_model.Fault`).
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import torch
from faulty_base import BASES, namespace
from faulty_model import CASES, SHAPE, Fault
from faulty_table import FAULTS
from gdncheck.capture.make import make
from gdncheck.compare.clauses import TRANSFORMS
from gdncheck.compare.session import Settings, diff_one
from gdncheck.compare.soundness import soundness_of
from gdncheck.compare.witness import Witness
from gdncheck.kernels.callable import CallableAdapter
from gdncheck.kernels.contract import Capabilities, Clause, Contract
from gdncheck.kernels.interface import RunResult
from gdncheck.kernels.pool import WorkerPool

POOL_SLOTS = 7
SOUND = Fault({})


class OneFault:
    """A runner as `session` sees one: the shared worker, asked for one fault."""

    def __init__(self, handle, name, life):
        self.handle = handle
        self.extra = {"fault": name, "life": life}
        fault = FAULTS.get(name, SOUND)
        base = fault.base if name in FAULTS else name
        chunk = None if base == "recurrent" else 64
        info = handle.info
        self.info = msgspec.structs.replace(
            info, name=f"faulty_kernels:{name}", contract=Contract(kernel=name, clauses=clauses_of(fault)),
            capabilities=msgspec.structs.replace(info.capabilities, default_chunk_size=chunk),
        )  # fmt: skip

    def run(self, calls):
        options = [msgspec.structs.replace(c.options, extra=self.extra) for c in calls]
        return self.handle.run(
            [msgspec.structs.replace(c, options=o) for c, o in zip(calls, options, strict=True)]
        )


class Direct:
    """A runner in this process for one Fault of a test's own; nothing tells what it writes into."""

    def __init__(self, fault=SOUND, capabilities=None):
        self.fault = fault
        self.memory = {"calls": 0}
        declared = {"l2norm": "in_kernel", "default_chunk_size": None if fault.base == "recurrent" else 64}
        declared["clauses"] = clauses_of(fault)
        declared |= capabilities or {}
        self.adapter = CallableAdapter("kernel", self.kernel, Capabilities(**declared))

    def kernel(
        self,
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
        use_qk_l2norm_in_kernel=False,
    ):
        call = namespace(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            cu_seqlens=cu_seqlens,
            state=initial_state,
            scale=scale,
            l2norm=use_qk_l2norm_in_kernel,
        )
        result = BASES[self.fault.base](call, self.fault.edits, self.memory)
        self.memory["calls"] += 1
        return result

    @property
    def info(self):
        return self.adapter.describe()

    def run(self, calls):
        results = []
        for call in calls:
            own = {name: tensor.clone() for name, tensor in call.tensors.items()}
            outputs = self.adapter.run(msgspec.structs.replace(call, tensors=own))
            results.append(RunResult(status="ok", outputs=outputs, seconds=0.0))
        return results


def clauses_of(fault):
    return tuple(
        Clause(id=i, kind=kind_of(i), applies_to=i.partition(".")[0], value=v, source="the table of faults")
        for i, v in fault.clauses.items()
    )


def kind_of(clause):
    """The kind of a clause that a test declares."""
    if clause in TRANSFORMS:
        return "transform"
    return "rounding" if clause.startswith("cast.") else "domain"


def verdict_on(fault, case, *, capabilities=None, **settings):
    """The DiffResult of a Fault, or of a sound base by name, on any case."""
    if isinstance(fault, str):
        fault = FAULTS[fault] if fault in FAULTS else Fault({}, base=fault)
    witness = Witness(case)
    chosen = Settings(**{"relations": "none", **settings})
    return diff_one(Direct(fault, capabilities), witness, soundness_of(witness), chosen)


class Bench:
    """The worker and the witnesses that all faults share."""

    case_names = tuple(CASES)

    def __init__(self, grid=None):
        """grid: arguments of `make` that replace every case's (the larger grid)."""
        self.grid = grid or {}
        self.witnesses = {}

    def __enter__(self):
        self.pool = WorkerPool(device="cpu", time_limit=120)
        self.handle = self.pool.open("faulty_kernels:dispatch")
        return self

    def __exit__(self, *error):
        self.pool.close()

    def witness(self, name):
        if name not in self.witnesses:
            witness = Witness(case_of(name, **self.grid))
            self.witnesses[name] = (witness, soundness_of(witness))
        return self.witnesses[name]

    def runner(self, name, life):
        return OneFault(self.handle, name, life)

    def judge(self, name, case, **settings):
        """The DiffResult of a fault (or of a sound base) on a case: a name of the table, or any Case."""
        if isinstance(case, str):
            witness, soundness = self.witness(case)
        else:
            witness = Witness(case)
            soundness, case = soundness_of(witness), f"case {id(witness)}"
        fault = FAULTS.get(name, SOUND)
        needed = fault.relations if name in FAULTS and not fault.unseen else "all"
        chosen = Settings(**{"relations": needed, **settings})
        return diff_one(self.runner(name, case), witness, soundness, chosen)

    def complaint(self, name, case, result):
        """What is wrong with a verdict, in words; nothing where it is right."""
        fault, ruling = FAULTS[name], result.ruling
        wanted = "pass" if fault.unseen else fault.verdict
        if ruling.verdict != wanted:
            return f"verdict is {ruling.verdict}, must be {wanted}: {ruling.reason}"
        if fault.unseen:
            return ""
        if ruling.tier not in fault.tiers:
            return f"tier is {ruling.tier} ({ruling.rule}), must be one of {fault.tiers}: {ruling.reason}"
        if fault.says not in ruling.reason:
            return f"the reason does not say {fault.says!r}: {ruling.reason}"
        places = [p for p in (ruling.first_nonfinite, ruling.worst_tile) if p is not None]
        if fault.verdict == "fail" and not places and ruling.rule != "inputs-kept":
            return f"no place is named: {ruling.reason}"
        # A class belongs to the first non-finite place where there is one: the worst tile is measured.
        expected = [(p, fault.spot if p is places[0] else replace(fault.spot, classes=())) for p in places]
        for place, spot in expected:
            if not spot.holds(place):
                return f"place is wrong: {place} in {ruling.reason}"
        return ""


def case_of(name, **changed):
    """A case of the table; the pools are made of the packed case."""
    arguments = CASES.get(name)
    if arguments is None:
        return pool_case(name, **changed)
    return make(**{**arguments, **changed})


POOLS = {"pool": "random", "stale-pool": ["random", "random", "stale", "stale"], "padded-pool": "random"}


def pool_case(name, **changed):
    """The packed case's states in a pool of POOL_SLOTS, in another order, other tenants' between them."""
    case = make("qwen", **{**SHAPE, "state": POOLS[name], **changed})
    slots = torch.tensor([4, 1, 5, 2]) if name != "padded-pool" else torch.tensor([4, 1, -1, 2])
    state = case["initial_state"]
    dice = torch.Generator().manual_seed(3)
    pool = torch.randn(POOL_SLOTS, *state.shape[1:], generator=dice)
    pool[slots[slots >= 0]] = state[slots >= 0].float()
    has_state = case.get("has_initial_state")
    if has_state is None:
        has_state = torch.ones(len(slots), dtype=torch.bool)
    return case.with_tensors(initial_state=None, pool=pool, slot_indices=slots, has_initial_state=has_state)

"""The stages of a faulty chunk kernel, in the canonical layout: its own chain, or one stage on given values.

The idea: stages are points of `faulty_base`, so a tap on the points both records a chain and feeds a stage:
a fed value replaces the point's, the faulty edit of an earlier stage with it.
"""

from __future__ import annotations

import msgspec
import torch
from faulty_base import chunk, namespace
from faulty_run import Direct
from gdncheck.kernels.interface import RunResult

STAGES = ("cumsum", "kkt", "solve", "wu", "state", "output")
READS = {
    "cumsum": (),
    "kkt": ("cumsum",),
    "solve": ("kkt",),
    "wu": ("solve", "cumsum"),
    "state": ("w", "u", "cumsum"),
    "output": ("v_new", "h", "cumsum"),
}
GIVES = {
    "cumsum": ("cumsum",),
    "kkt": ("kkt",),
    "solve": ("solve",),
    "wu": ("w", "u"),
    "state": ("h", "v_new", "final_state"),
    "output": ("output",),
}
SIZE = 64


class StagedKernel(Direct):
    """A runner of one fault that also answers `stages` and `stage` of a call's extra options."""

    def __init__(self, fault):
        super().__init__(fault, {"stages": STAGES})

    def run(self, calls):
        staged = [c for c in calls if c.options.extra]
        if not staged:
            return super().run(calls)
        return [RunResult(status="ok", outputs=self.staged(c), seconds=0.0) for c in calls]

    def staged(self, call):
        t, stage = call.tensors, call.options.extra.get("stage")
        fed = {name: t[name] for name in READS.get(stage, ())}
        recorder = Recorder(t["v"], t["k"], t["cu_seqlens"], fed)
        fields = {name: t[name] for name in ("q", "k", "v", "g", "beta", "cu_seqlens")}
        inputs = namespace(**fields, state=t.get("initial_state"), scale=call.options.scale, l2norm=False)
        output, final = chunk(inputs, self.fault.edits, {"calls": 0, "tap": recorder})
        values = {**recorder.values, "output": output, "final_state": final}
        wanted = GIVES[stage] if stage else tuple(values)
        return {name: values[name] for name in wanted}

    @property
    def info(self):
        return msgspec.structs.replace(super().info, name="staged")


class Recorder:
    """The tap: keeps what each stage gave, per token or per chunk."""

    def __init__(self, v, k, cu_seqlens, fed):
        tokens, hv, dv = v.shape
        dk = k.shape[-1]
        widths = {"kkt": SIZE, "solve": SIZE, "w": dk, "u": dv, "v_new": dv}
        self.values = {name: torch.zeros(tokens, hv, width) for name, width in widths.items()}
        chunks = sum(-(-int(n) // SIZE) for n in cu_seqlens.diff())
        self.values |= {"cumsum": torch.zeros(tokens, hv), "h": torch.zeros(chunks, hv, dk, dv)}
        self.fed = fed
        self.chunk = -1

    def __call__(self, point, value, run):
        if point == "take":
            self.chunk += 1
        if point not in self.values:
            return value
        if point in self.fed:
            return self._given(point, value, run)
        self._keep(point, value, run)
        return value

    def _given(self, point, value, run):
        given = self.fed[point].float()
        if point == "h":
            return given[self.chunk]
        rows = given[run.rows].transpose(0, 1)
        return rows[..., : value.shape[-1]] if value.ndim == 3 else rows

    def _keep(self, point, value, run):
        if point == "h":
            self.values["h"][self.chunk] = value
        elif point == "cumsum":
            self.values["cumsum"][run.rows] = value.T
        else:
            self.values[point][run.rows, :, : value.shape[-1]] = value.transpose(0, 1)

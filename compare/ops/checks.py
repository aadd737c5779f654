"""What is checked of an operation's answer, each check one statement; they decide in the order of `CHECKS`.

`shape`: every output has the truth's shape, and a dtype no narrower than promised.
`non-finite`: a NaN or an infinity stands where the stored truth has one of the same class, and nowhere else.
`copied`: an output that only holds inputs holds their bits.
`exact`: where no sound kernel rounds, every bit agrees (numerics.md, tier 0).
`emulation-ratio`: elsewhere the error is what the declared precision makes (tier 3).
Silent on: what the precision, the contract's transforms or the truth's own infinities explain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..checks.emulation_ratio import Ratios, ratios, wrong_rows
from ..nonfinite import class_of, first_place, place_of_row
from ..report_words import number, where
from ..tiles import unit_roundoff
from ..trial import Measured
from ..verdict import Outcome, Place
from ..yardstick import Scale
from .layout import CHANNELS, as_rows, channel_words
from .op import Heads, Op, OpInputs
from .trial import OpTrial

# A GPU's fast exp and rsqrt give 0, 1 and powers of two exactly; a kernel that promises nothing may be off.
ULPS_UNPROMISED = 4.0


def check_shapes(op: Op, inputs: OpInputs, outputs: Mapping[str, Tensor]) -> Outcome | None:
    """The first output that is missing, misshapen or too narrow; None where all are as promised."""
    truth = op.truth(inputs)
    native = inputs.tensors[op.reads].dtype
    for name in op.outputs:
        want, got = truth[name], outputs.get(name)
        problem = ""
        if got is None:
            problem = f"{name} is missing"
        elif got.shape != want.shape:
            problem = f"{name} has shape {list(got.shape)} and must have {list(want.shape)}"
        elif not got.is_floating_point():
            problem = f"{name} is {str(got.dtype).removeprefix('torch.')}, no floating-point tensor"
        elif unit_roundoff(got.dtype) > unit_roundoff(torch.float32 if name in op.wide else native):
            least = "float32" if name in op.wide else str(native).removeprefix("torch.")
            problem = f"{name} is {str(got.dtype).removeprefix('torch.')} and must be at least {least}"
        if problem:
            return Outcome(
                check="shape",
                tier=0,
                status="fires",
                reason=problem,
                place=Place(tensor=name, class_="wrong"),
            )
    return None


def check_nonfinite(trial: OpTrial) -> Outcome:
    for name, measured in trial.measured.items():
        masks = measured.masks
        if masks.n_unexplained:
            place = first_place(masks, measured.tiles)
            counts = ", ".join(f"{v} {k}" for k, v in masks.by_class.items() if v)
            assert place is not None
            reason = f"{counts} in {name} at {_where(place, trial.inputs.heads)}, where the truth is finite"
            return _fires("non-finite", 1, reason, place)
        wrong = other_class(measured)
        if bool(wrong.any()):
            row, head = wrong.nonzero()[0].tolist()
            index = _class_differs(measured.got[row, head], measured.want[row, head]).nonzero()[0]
            want, got = (float(x[row, head].flatten()[index]) for x in (measured.want, measured.got))
            place = place_of_row(
                measured.tiles, row, head, "wrong" if abs(got) < float("inf") else class_of(got)
            )
            reason = (
                f"{name} is {got:.3g} at {_where(place, trial.inputs.heads)}, where the truth is {want:g}"
            )
            return _fires("non-finite", 1, reason, place)
    return Outcome(check="non-finite", tier=1, status="ok")


def other_class(measured: Measured) -> Tensor:
    """[R, H] bool: rows in which a non-finite truth is answered by something else."""
    return _class_differs(measured.got.flatten(2), measured.want.flatten(2)).any(-1)


def _class_differs(got: Tensor, want: Tensor) -> Tensor:
    """Entries whose truth is not finite and whose answer is of another class."""
    bad = ~torch.isfinite(want)
    same = (torch.isnan(want) & torch.isnan(got)) | (want == got.to(want.dtype))
    return bad & ~same


def check_copies(trial: OpTrial) -> Outcome:
    """Outputs that hold inputs: a copy has no rounding to excuse it."""
    for name in trial.op.copies:
        measured = trial.measured[name]
        want = measured.want.to(measured.got.dtype)
        differs = ~((measured.got == want) | (torch.isnan(measured.got) & torch.isnan(want)))
        if bool(differs.any()):
            return _wrong_entries("copied", trial, measured, want, differs, "must be a copy of its input:")
    return Outcome(check="copied", tier=0, status="ok" if trial.op.copies else "not-applicable")


def check_exact(trial: OpTrial) -> Outcome:
    if trial.clauses:
        return Outcome(
            check="exact", tier=0, status="not-applicable", reason="the contract changes the function"
        )
    masks = trial.op.exact(trial.inputs)
    promised = trial.info.contract.relation("exact") == "promised"
    n_exact = n_entries = 0
    for name, measured in trial.measured.items():
        n_entries += measured.got.numel()
        if name not in masks:
            continue
        inside = as_rows(name, masks[name], trial.inputs.heads) & torch.isfinite(measured.want)
        n_exact += int(inside.sum())
        want = measured.want.to(measured.got.dtype)
        off = (measured.got.double() - want.double()).abs()
        least = 0.0 if promised else ULPS_UNPROMISED * unit_roundoff(torch.float32)
        differs = inside & ~(off <= least * want.double().abs())
        if bool(differs.any()):
            return _wrong_entries("exact", trial, measured, want, differs, "nothing needs rounding there:")
    if not n_exact:
        return Outcome(check="exact", tier=0, status="not-applicable", reason="no entry is free of rounding")
    return Outcome(check="exact", tier=0, status="ok", numbers={"exact": n_exact, "entries": n_entries})


def _wrong_entries(
    check: str, trial: OpTrial, measured: Measured, want: Tensor, differs: Tensor, why: str
) -> Outcome:
    row, head = differs.flatten(2).any(-1).nonzero()[0].tolist()
    entry = int(differs[row, head].flatten().nonzero()[0])
    place = place_of_row(measured.tiles, row, head, "wrong")
    got, true = (float(x[row, head].flatten()[entry]) for x in (measured.got, want))
    n_bad = int(differs.sum())
    reason = (
        f"{measured.tiles.tensor} is wrong at {_where(place, trial.inputs.heads)}: {why} it is {got:g} and "
        f"must be {true:g} ({n_bad} of {differs.numel()} entries)"
    )
    error = (measured.got.double() - want.double()).abs()
    atol = float(error[torch.isfinite(error)].max()) if bool(torch.isfinite(error).any()) else float("inf")
    return _fires(check, 0, reason, place, {"wrong_entries": n_bad, "would_pass": {"atol": atol}})


def check_ratio(trial: OpTrial) -> Outcome:
    """Tier 3 over all outputs; the largest score decides."""
    return ratio_outcome(
        {n: m for n, m in trial.measured.items() if n not in trial.op.copies},
        trial.scales,
        trial.inputs.heads,
    )


def ratio_outcome(
    measured_by_name: Mapping[str, Measured], scales: Mapping[str, Scale], heads: Heads | None
) -> Outcome:
    """Errors against what is honest, by name."""
    tables = {name: ratios(m, scales[name]) for name, m in measured_by_name.items()}
    numbers: dict[str, object] = {f"{name}_rms_ratio": _largest(t.rms) for name, t in tables.items()}
    numbers |= {f"{name}_max_ratio": _largest(t.peak) for name, t in tables.items()}
    firing = [name for name, t in tables.items() if bool(t.bad.any())]
    if not firing:
        return Outcome(check="emulation-ratio", tier=3, status="ok", numbers=numbers)
    name = max(firing, key=lambda n: _largest(tables[n].score))
    measured, table = measured_by_name[name], tables[name]
    place = first_wrong(measured, scales[name], table)
    error, rule = _rule(table)
    n_bad = int(table.bad.sum())
    reason = (
        f"{name} is wrong at {_where(place, heads)}: {rule}, relative RMS error {number(measured.relative)} "
        f"({n_bad} of {table.bad.numel()} tiles)"
    )
    atol = float(measured.rows.peak.max())
    return _fires(
        "emulation-ratio", 3, reason, place, {**numbers, "ratio": error, "would_pass": {"atol": atol}}
    )


def _rule(table: Ratios) -> tuple[float, str]:
    """The ratio that is furthest above its limit in the worst tile, in words."""
    pool, head = divmod(int(table.score.argmax()), table.score.shape[1])
    candidates = (
        ("RMS error", table.rms, table.rms_limit),
        ("largest error", table.peak, table.peak_limit),
        ("RMS error of one row", table.row, table.row_limit),
    )
    found = [
        (float(r[pool, head]), float(limit.expand_as(r)[pool, head]), name) for name, r, limit in candidates
    ]
    ratio, limit, name = max(found, key=lambda c: c[0] / c[1])
    return ratio, f"{name} is {number(ratio)} times the emulation's (limit {limit:.3g})"


def first_wrong(measured: Measured, scale: Scale, table: Ratios) -> Place:
    """The earliest row that is wrong by itself in a bad tile, else the worst bad tile."""
    pool = scale.pools.pool_of_tile[measured.tiles.tile_of_row]
    in_bad = table.bad[pool]
    rows = (wrong_rows(measured, scale) & in_bad).nonzero()
    if len(rows):
        row, head = rows[0].tolist()
        return place_of_row(measured.tiles, row, head, "wrong")
    error = torch.where(in_bad, measured.rows.square, -1.0)
    row, head = divmod(int(error.argmax()), error.shape[1])
    place = place_of_row(measured.tiles, row, head, "wrong")
    return Place(tensor=place.tensor, class_="wrong", sequence=place.sequence, head=head, chunk=place.chunk)


def _where(place: Place, heads: Heads | None) -> str:
    """As the rule's places, but the convolution's channels by the head that they become."""
    words = where(place)
    if place.tensor in CHANNELS and place.head is not None:
        return words.replace(f"head {place.head}", channel_words(place.head, heads))
    return words


def _largest(table: Tensor) -> float:
    return float(table.max()) if table.numel() else 0.0


def _fires(
    check: str, tier: int, reason: str, place: Place, numbers: dict[str, object] | None = None
) -> Outcome:
    return Outcome(check=check, tier=tier, status="fires", reason=reason, place=place, numbers=numbers or {})


CHECKS: tuple[Callable[[OpTrial], Outcome], ...] = (check_nonfinite, check_copies, check_exact, check_ratio)
"""In the order in which they decide."""

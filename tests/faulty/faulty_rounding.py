"""Faults of precision: something is kept narrower than the kernel may, or normalised otherwise."""

from __future__ import annotations

import torch
from faulty_model import Fault, Spot

STATE = Spot(tensors=("state",))


def narrow_sum(dtype, block=1):
    """A dot whose partial sums are kept in a narrow dtype, rounded after every `block` products."""

    def product(a, b):
        total = torch.zeros(*a.shape[:-1], b.shape[-1])
        for at in range(0, a.shape[-1], block):
            total = (total + a[..., at : at + block] @ b[..., at : at + block, :]).to(dtype).float()
        return total

    return product


def to(dtype):
    return lambda x, run: x.to(dtype).float()


def truncated(x, run):
    """The low 16 bits cut off instead of rounded."""
    return (x.float().contiguous().view(torch.int32) & -65536).view(torch.float32)


def norm_again(x, run):
    return run._unit(x)


ROUNDING = {
    "dots_accumulated_in_bfloat16": Fault(
        {"product": narrow_sum(torch.bfloat16)}, cases=("packed", "deep", "fp32"), tiers=(0, 2, 3)
    ),
    "dots_accumulated_in_float16": Fault(
        {"product": narrow_sum(torch.float16)}, cases=("fp32",), tiers=(0, 2, 3)
    ),
    "state_in_bfloat16_at_each_chunk": Fault(
        {"state": to(torch.bfloat16)}, cases=("packed", "fp32"), tiers=(2, 3), spot=STATE, stage="state"
    ),
    "state_in_bfloat16_at_the_end": Fault(
        {"last": to(torch.bfloat16)}, cases=("packed", "fp32"), tiers=(1, 2, 3), spot=STATE
    ),
    "state_in_float16_at_the_end": Fault(
        {"last": to(torch.float16)}, cases=("packed", "fp32"), tiers=(1, 2, 3), spot=STATE
    ),
    "state_in_bfloat16_at_each_token": Fault(
        {"state": to(torch.bfloat16)}, base="recurrent", cases=("packed", "fp32"), tiers=(2, 3)
    ),
    "state_truncated_at_each_token": Fault(
        {"state": truncated}, base="recurrent", cases=("packed", "fp32"), tiers=(2, 3)
    ),
    "state_in_bfloat16_inside_only": Fault(
        {"state": lambda s, run: s if run.closes else s.bfloat16().float()},
        cases=("fp32",),
        tiers=(2, 3),
        spot=Spot(sequences=(0, 3)),
    ),
    # Rounded as operand of w S and q S in any case, so no error shows; the closed form with beta = 0 does.
    "state_in_bfloat16_inside_a_bfloat16_kernel": Fault(
        {"state": lambda s, run: s if run.closes else s.bfloat16().float()},
        tiers=(4,),
        says="beta-zero",
        relations="all",
        spot=Spot(("state",), (0, 3)),
    ),
    "scores_in_float8": Fault(
        {"qk": lambda x, run: x.to(torch.float8_e4m3fn).float()},
        tiers=(2, 3),
        spot=Spot(("output",)),
        stage="output",
    ),
    "solve_in_bfloat16_for_float32": Fault(
        {"solve": to(torch.bfloat16)}, cases=("fp32",), tiers=(2, 3), stage="solve"
    ),
    "output_of_float32_through_bfloat16": Fault(
        {"o": to(torch.bfloat16)}, cases=("fp32",), tiers=(2, 3), spot=Spot(("output",))
    ),
    # l2norm
    "l2norm_missing": Fault(
        {"norm_q": lambda x, run: run.call.q.float(), "norm_k": lambda x, run: run.call.k.float()},
        cases=("raw",),
        tiers=(0, 1, 2, 3),
    ),
    "l2norm_missing_on_q": Fault(
        {"norm_q": lambda x, run: run.call.q.float()}, cases=("raw",), spot=Spot(("output",))
    ),
    # Another eps is another function, which a kernel may declare: named as a hypothesis.
    "l2norm_eps_of_a_thousandth": Fault(
        {"eps": lambda e, run: 1e-3},
        cases=("raw-fp32",),
        verdict="suspect",
        tiers=(2, 3),
        says="eps 0.001",
    ),
    "l2norm_eps_of_a_thousandth_in_bfloat16": Fault(
        {"eps": lambda e, run: 1e-3},
        cases=("raw",),
        unseen="rows of norm sqrt(32) shrink by 1e-3 / 64 relative, a hundredth of a bfloat16 step: almost "
        "no normalised entry changes",
    ),
    "l2norm_eps_of_one": Fault({"eps": lambda e, run: 1.0}, cases=("raw",), tiers=(0, 2, 3)),
    "l2norm_twice": Fault(
        {"norm_q": norm_again, "norm_k": norm_again},
        cases=("raw", "raw-fp32"),
        unseen="a unit row stays one: the second norm changes it by eps / 2 = 5e-7, less than it rounds",
    ),
    "l2norm_of_the_mean_square": Fault(
        {"norm_k": lambda x, run: x * x.shape[-1] ** 0.5}, cases=("raw",), tiers=(0, 1, 2, 3)
    ),
    # rounding order
    "l2norm_over_the_wrong_head": Fault({"norm_k": lambda x, run: x.roll(1, 1)}, cases=("raw",)),
}

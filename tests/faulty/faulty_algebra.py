"""Faults of the rule itself: masks, beta, the triangular solve, the order of decay and error, scale."""

from __future__ import annotations

import torch
from faulty_base import inverse
from faulty_model import Fault, Spot

OUTPUT = Spot(tensors=("output",))


def mask(diagonal):
    return lambda m, run: torch.ones_like(m).tril(diagonal)


def neumann(terms):
    """I - A + A^2 - ..., so many powers of A."""

    def edit(value, run):
        total = power = torch.eye(run.kkt.shape[-1]).expand_as(run.kkt)
        for _ in range(terms):
            power = -power @ run.kkt
            total = total + power
        return run.narrow(total)

    return edit


def without_merge(value, run):
    """Each 16 x 16 diagonal block inverted, what links them forgotten."""
    block = torch.arange(run.length) // 16
    return run.narrow(inverse(torch.where(block[:, None] == block[None, :], run.kkt, 0.0)))


def first_block_only_merged(value, run):
    """The inverse is right in its first 32 rows; below, blocks are not linked."""
    whole, apart = inverse(run.kkt), without_merge(value, run)
    return run.narrow(torch.where(torch.arange(run.length)[:, None] < 32, whole, apart))


def half(value, run):
    return inverse(run.kkt.half().float()).half().float()


ALGEBRA = {
    # masks
    "kkt_misses_the_token_before": Fault(
        {"kkt_mask": mask(-2)}, stage="kkt", spot=Spot(tokens=lambda t: t > 0)
    ),
    "kkt_holds_the_diagonal": Fault(
        {
            "solve": lambda t, run: run.narrow(torch.linalg.inv(torch.eye(run.length) + run.kkt)),
            "kkt_mask": mask(0),
        },
        stage="kkt",
    ),
    "kkt_looks_one_token_ahead": Fault(
        {
            "solve": lambda t, run: run.narrow(torch.linalg.inv(torch.eye(run.length) + run.kkt)),
            "kkt_mask": mask(1),
        },
        stage="kkt",
        tiers=(0, 1, 2, 3, 4),
    ),
    "qk_misses_the_diagonal": Fault({"qk_mask": mask(-1)}, stage="output", spot=OUTPUT),
    "qk_looks_one_token_ahead": Fault(
        {"qk_mask": mask(1)},
        stage="output",
        tiers=(0, 1, 2, 3, 4),
        spot=Spot(tensors=("output",), sequences=(0, 3)),
    ),
    "qk_unmasked": Fault(
        {"qk_mask": lambda m, run: torch.ones_like(m), "decay": lambda d, run: d.clamp(max=1.0)},
        stage="output",
        tiers=(0, 1, 2, 3, 4),
        spot=OUTPUT,
    ),
    "qk_unmasked_past_token_16_of_a_tile": Fault(
        {
            "qk_mask": lambda m, run: (
                m | ((torch.arange(run.length) // 16 == 0)[:, None] & (torch.arange(run.length) == 16))
            )
        },
        stage="output",
        tiers=(0, 1, 2, 3, 4),
        spot=Spot(tensors=("output",), tokens=lambda t: t % 64 < 16),
    ),
    # beta
    "beta_squared": Fault({"beta": lambda b, run: b.square()}),
    "beta_squared_in_a_recurrence": Fault({"beta": lambda b, run: b.square()}, base="recurrent"),
    "beta_missing_in_kkt": Fault({"kkt_beta": lambda b, run: torch.ones_like(b)}, stage="kkt"),
    "beta_missing_in_u": Fault({"u_beta": lambda b, run: torch.ones_like(b)}, stage="wu"),
    "beta_missing_in_w": Fault({"w_beta": lambda b, run: torch.ones_like(b)}, stage="wu"),
    "beta_twice_in_w": Fault({"w_beta": lambda b, run: b.square()}, stage="wu"),
    "beta_of_the_column_in_kkt": Fault({"kkt_beta": lambda b, run: b.mT}, stage="kkt"),
    "beta_of_the_next_head": Fault({"beta": lambda b, run: b.roll(-1, 0)}),
    # solve
    "solve_takes_two_terms_of_the_series": Fault(
        {"solve": neumann(2)}, cases=("packed", "parallel"), stage="solve"
    ),
    "solve_takes_six_terms_of_the_series": Fault({"solve": neumann(6)}, cases=("parallel",), stage="solve"),
    "solve_is_transposed": Fault({"solve": lambda t, run: t.mT}, stage="solve"),
    "solve_has_no_diagonal": Fault({"solve": lambda t, run: t - torch.eye(run.length)}, stage="solve"),
    "solve_forgets_to_merge_blocks": Fault(
        {"solve": without_merge}, stage="solve", spot=Spot(sequences=(0, 3), tokens=lambda t: t >= 16)
    ),
    "solve_forgets_to_merge_the_last_blocks": Fault(
        {"solve": first_block_only_merged},
        stage="solve",
        spot=Spot(sequences=(0, 3), tokens=lambda t: t >= 32),
    ),
    "solve_in_fp16_for_float32": Fault({"solve": half}, cases=("fp32",), tiers=(3,), stage="solve"),
    "solve_in_fp16_for_bfloat16": Fault(
        {"solve": half},
        stage="solve",
        unseen="float16 keeps three bits more than the bfloat16 in which sound kernels hold the inverse, "
        "and inside the domain no entry passes 1: the answer is as good as theirs",
    ),
    # order and sign
    "decay_after_the_error": Fault(
        {"read": lambda r, run: (run.k_all[run.token][..., None] * run.before).sum(1, keepdim=True)},
        base="recurrent",
    ),
    "output_reads_the_state_before_the_write": Fault(
        {"seen": lambda s, run: run.decayed}, base="recurrent", spot=OUTPUT
    ),
    "error_has_the_wrong_sign": Fault({"read": lambda r, run: -r}, base="recurrent"),
    "w_added_instead_of_taken": Fault({"v_new": lambda x, run: 2 * run.u - x}, stage="state"),
    "negative_values_lose_their_sign": Fault({"o": lambda o, run: o.abs()}, stage="output", spot=OUTPUT),
    "negative_scores_lose_their_sign": Fault({"qk": lambda a, run: a.abs()}, stage="output", spot=OUTPUT),
    # scale
    "scale_missing": Fault({"scale": lambda s, run: 1.0}, spot=OUTPUT),
    "scale_twice": Fault({"scale": lambda s, run: s * s}, spot=OUTPUT),
    "scale_of_V_instead_of_K": Fault(
        {"scale": lambda s, run: s * (run.call.k.shape[-1] / run.call.v.shape[-1]) ** 0.5},
        cases=("uneven",),
        spot=OUTPUT,
    ),
    "scale_on_the_second_term_only": Fault(
        {"o": lambda o, run: o + run.q @ run.h * run.growth[..., None] * (1 - run.scale)},
        stage="output",
        spot=OUTPUT,
    ),
}

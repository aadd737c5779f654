"""A kernel whose process ends in the middle of a call."""

import os


def rule(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
    os._exit(0)

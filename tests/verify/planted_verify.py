"""A sound verify kernel in torch, and faults planted in it: kernels by import path, `planted_verify:NAME`.

Sound is vLLM's contract: the state after token t goes to column t, the call starts from column
num_accepted - 1, float32 inside, the columns in the pool's dtype.
"""

from __future__ import annotations

import torch

CAPABILITIES = {
    "columns": True,
    "slots": True,
    "default_chunk_size": None,
    "profile": "fla-recurrent",
    "state_dtypes": ("float32", "bfloat16", "float16"),
}


class Step:
    """How a step reads and writes; a fault overrides one decision."""

    def start(self, n, columns, accepted):
        """Slot that sequence n starts from."""
        return int(columns[n, accepted[n] - 1])

    def column(self, n, t, length, columns):
        """Slot of the state after token t; -1 for none."""
        return int(columns[n, t])

    def heads(self, n_heads):
        """Heads in which the decisions of this class hold; the others follow the sound ones."""
        return range(n_heads)

    def after(self, pool, before, n, states, columns, accepted):
        """Anything written besides. states: after each token of sequence n."""

    def outputs(self, rows):
        """The output rows of one sequence."""
        return rows

    def stored(self, state):
        return state

    fresh_zeroed = True


class AcceptedOffByOne(Step):
    def start(self, n, columns, accepted):
        return int(columns[n, min(int(accepted[n]), columns.shape[1] - 1)])


class AcceptedIgnored(Step):
    def start(self, n, columns, accepted):
        return int(columns[n, 0])


class RejectedTokensLeak(Step):
    """Starts from the last column, as if all of the last draft had been accepted."""

    def start(self, n, columns, accepted):
        return int(columns[n, -1])


class NeighboursColumn(Step):
    def start(self, n, columns, accepted):
        return int(columns[n - 1, accepted[n] - 1])


class NeighboursAccepted(Step):
    def start(self, n, columns, accepted):
        return int(columns[n, accepted[n - 1] - 1])


class WrongColumnKept(Step):
    """The state after token t goes to the column before."""

    def column(self, n, t, length, columns):
        return int(columns[n, max(t - 1, 0)])


class ColumnsReversed(Step):
    def column(self, n, t, length, columns):
        return int(columns[n, length - 1 - t])


class LastColumnNotWritten(Step):
    def column(self, n, t, length, columns):
        return -1 if t == length - 1 and length > 1 else int(columns[n, t])


class OverTheBaseColumn(Step):
    """The last state is also written over the column that was read."""

    def after(self, pool, before, n, states, columns, accepted):
        pool[int(columns[n, accepted[n] - 1])] = states[-1]


class EveryColumnTheLast(Step):
    """All columns hold the state after the last token: rejected tokens leak into what is read next."""

    def after(self, pool, before, n, states, columns, accepted):
        for t in range(len(states)):
            pool[int(columns[n, t])] = states[-1]


class NeighbourWritten(Step):
    def after(self, pool, before, n, states, columns, accepted):
        pool[int(columns[n - 1, -1])] = states[0]


class StraySlotWritten(Step):
    def after(self, pool, before, n, states, columns, accepted):
        owned = set(columns.flatten().tolist())
        pool[next(s for s in range(len(pool)) if s not in owned)] = states[0]


class OneHeadFromTheWrongColumn(AcceptedOffByOne):
    def heads(self, n_heads):
        return range(n_heads - 1, n_heads)


class DraftRowsSwapped(Step):
    def outputs(self, rows):
        return rows if len(rows) < 3 else torch.cat([rows[:1], rows[2:3], rows[1:2], rows[3:]])


class StaleFreshSequence(Step):
    fresh_zeroed = False


class StoredInBfloat16(Step):
    def stored(self, state):
        return state.bfloat16().float()


def step_kernel(decide):
    """A kernel function that steps as `decide` does."""
    sound = Step()

    def kernel(
        q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens, pool, slot_indices,
        num_accepted, has_initial_state=None,
    ):  # fmt: skip
        before = pool.clone()
        groups, n_heads = v.shape[1] // q.shape[1], v.shape[1]
        k, q = (x.float().repeat_interleave(groups, 1) for x in (k, q))
        columns, accepted = slot_indices.long(), num_accepted.long()
        output = torch.zeros_like(v)
        for n in range(len(cu_seqlens) - 1):
            rows = range(int(cu_seqlens[n]), int(cu_seqlens[n + 1]))
            if len(rows) == 0 or sound.start(n, columns, accepted) < 0:
                continue
            special = list(decide.heads(n_heads))
            state = before[sound.start(n, columns, accepted)].float().clone()
            state[special] = before[decide.start(n, columns, accepted)].float()[special]
            if has_initial_state is not None and not bool(has_initial_state[n]) and decide.fresh_zeroed:
                state.zero_()
            states = []
            for t, row in enumerate(rows):
                state = state * g[row].exp()[:, None, None]
                u = beta[row].float()[:, None] * (v[row].float() - torch.einsum("hk,hkv->hv", k[row], state))
                state = state + k[row][..., None] * u[:, None]
                output[row] = (scale * torch.einsum("hk,hkv->hv", q[row], state)).to(v.dtype)
                states.append(decide.stored(state).to(pool.dtype))
                slot = decide.column(n, t, len(rows), columns)
                if slot >= 0:
                    pool[slot] = states[-1]
            output[list(rows)] = decide.outputs(output[list(rows)])
            decide.after(pool, before, n, states, columns, accepted)
        return output, None

    kernel.gdncheck_capabilities = CAPABILITIES
    return kernel


FAULTS = {
    cls.__name__: step_kernel(cls())
    for cls in (
        AcceptedOffByOne, AcceptedIgnored, RejectedTokensLeak, NeighboursColumn, NeighboursAccepted,
        WrongColumnKept, ColumnsReversed, LastColumnNotWritten, OverTheBaseColumn, EveryColumnTheLast,
        NeighbourWritten, StraySlotWritten, OneHeadFromTheWrongColumn, DraftRowsSwapped, StaleFreshSequence,
        StoredInBfloat16,
    )
}  # fmt: skip
sound = step_kernel(Step())
globals().update(FAULTS)

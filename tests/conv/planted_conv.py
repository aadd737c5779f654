"""A sound convolution on slots, and the faults that one wrong line of it would be.

Every function has the operation's own signature (`--op conv --kernel planted_conv:NAME`); a fault is the
sound function with one of its steps replaced. `planted_conv:sound` takes slots, `gathered` a state per
sequence, `stateless` neither. The same for `conv-update`, by names that end in `_update`.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F


class Conv:
    """One call, in float32, rounded once; every step is a method that a fault replaces."""

    advance_by_accepted = True

    def __init__(self, conv_input, conv_weight, cu_seqlens, conv_bias, past):
        self.x, self.weight, self.bias = conv_input, conv_weight.float(), conv_bias
        self.bounds = cu_seqlens.tolist()
        self.history = conv_weight.shape[1] - 1
        self.dtype = conv_input.dtype
        self.pool, self.write, self.read, self.fresh, self.accepted = past

    def start(self, n):
        """[D, L]: the row that sequence n starts from."""
        row = self.pool[self.read[n]].float()
        return torch.zeros_like(row) if self.fresh[n] else row

    def window_at(self, n, row):
        """[D, W-1]."""
        first = 0 if self.accepted is None else int(self.accepted[n]) - 1
        return row[:, first : first + self.history]

    def convolve(self, n, window, tokens):
        """[D, W-1 + T] -> [T, D] before SiLU."""
        whole = torch.cat([window, tokens.T], dim=1)
        total = torch.zeros(tokens.shape, dtype=torch.float32)
        if self.bias is not None:
            total = total + self.bias.float()
        for tap in range(self.history + 1):
            total = self.add(total, whole[:, tap : tap + len(tokens)].T * self.weight[:, tap])
        return total

    def add(self, total, product):
        return total + product

    def activate(self, total):
        return F.silu(total)

    def left(self, n, row, window, tokens):
        """[D, L]: the row that sequence n leaves."""
        if self.accepted is None:
            whole = torch.cat([window, tokens.T], dim=1)
            return whole[:, whole.shape[1] - self.history :]
        new = torch.cat([window[:, 1:], tokens.T], dim=1)
        return torch.cat([new, row[:, new.shape[1] :]], dim=1)

    def store(self, n, row):
        if self.write[n] >= 0:
            self.pool[self.write[n]] = row.to(self.pool.dtype)

    def sequence(self, n, start, stop):
        row = self.start(n)
        window = self.window_at(n, row)
        tokens = self.x[start:stop].float()
        return row, window, tokens

    def run(self):
        output = torch.zeros_like(self.x)
        for n, (start, stop) in enumerate(itertools.pairwise(self.bounds)):
            if self.write[n] < 0:
                self.padded(n, start, stop)
                continue
            row, window, tokens = self.sequence(n, start, stop)
            if len(tokens):
                output[start:stop] = self.activate(self.convolve(n, window, tokens)).to(self.dtype)
                self.store(n, self.left(n, row, window, tokens))
            else:
                self.store(n, row)
        return output

    def padded(self, n, start, stop):
        """A padded sequence: nothing happens."""


def past_of(conv_input, conv_weight, n, conv_pool, slot_indices, read, has_initial_state, accepted):
    fresh = torch.zeros(n, dtype=torch.bool)
    if conv_pool is None:
        shape = (n, conv_input.shape[1], conv_weight.shape[1] - 1)
        conv_pool, slot_indices = torch.zeros(shape, dtype=conv_input.dtype), torch.arange(n)
    if has_initial_state is not None:
        fresh = ~has_initial_state
    read = slot_indices if read is None else read
    return conv_pool, slot_indices, read, fresh, accepted


def on_slots(kind):
    """The operation by one class, with slots."""

    def conv(
        *, conv_input, conv_weight, cu_seqlens, conv_bias=None, conv_pool=None, slot_indices=None,
        read_slot_indices=None, has_initial_state=None, num_accepted=None,
    ):  # fmt: skip
        n = len(cu_seqlens) - 1
        past = past_of(
            conv_input, conv_weight, n, conv_pool, slot_indices, read_slot_indices, has_initial_state,
            num_accepted,
        )  # fmt: skip
        call = kind(conv_input, conv_weight, cu_seqlens, conv_bias, past)
        output = call.run()
        state = call.pool[call.write.clamp_min(0)].clone()
        state[call.write < 0] = 0
        found = {"conv_output": output, "final_conv_state": state}
        return found if conv_pool is None else {**found, "conv_pool": call.pool}

    return conv


def gathered(*, conv_input, conv_weight, cu_seqlens, conv_bias=None, conv_state=None):
    """A convolution that knows no slots: rows come gathered."""
    n = len(cu_seqlens) - 1
    pool = None if conv_state is None else conv_state.clone()
    slots = None if pool is None else torch.arange(n)
    found = on_slots(Conv)(
        conv_input=conv_input, conv_weight=conv_weight, cu_seqlens=cu_seqlens, conv_bias=conv_bias,
        conv_pool=pool, slot_indices=slots,
    )  # fmt: skip
    return found["conv_output"], found["final_conv_state"]


def stateless(*, conv_input, conv_weight, cu_seqlens, conv_bias=None):
    """One that starts every sequence from zeros and takes no other."""
    return gathered(
        conv_input=conv_input, conv_weight=conv_weight, cu_seqlens=cu_seqlens, conv_bias=conv_bias
    )


class RoundsProducts(Conv):
    """Sound: products in the input's dtype, as vLLM's kernels make them."""

    def add(self, total, product):
        return total + product.to(self.dtype).float()


class RoundsBefore(Conv):
    """Sound: the sum is rounded before SiLU, as torch's conv1d stores it."""

    def activate(self, total):
        return F.silu(total.to(self.dtype)).float()


class WindowShifted(Conv):
    def window_at(self, n, row):
        return super().window_at(n, row).roll(1, dims=1)


class WindowOfTokensShifted(Conv):
    def convolve(self, n, window, tokens):
        return super().convolve(n, window, torch.cat([window[:, -1:].T, tokens])[:-1])


class NotAdvanced(Conv):
    def left(self, n, row, window, tokens):
        return row


class ShortForgets(Conv):
    """Fewer tokens than the window: zeros instead of the old state's newest part."""

    def left(self, n, row, window, tokens):
        if len(tokens) < self.history:
            window = torch.zeros_like(window)
        return super().left(n, row, window, tokens)


class ShortKeepsOldest(Conv):
    """Fewer tokens than the window: the old state is not moved up."""

    def left(self, n, row, window, tokens):
        new = super().left(n, row, window, tokens)
        if len(tokens) < self.history and self.accepted is None:
            new = torch.cat([window[:, : self.history - len(tokens)], tokens.T], dim=1)
        return new


class OneTokenDropsState(Conv):
    """A sequence of one token starts from zeros."""

    def window_at(self, n, row):
        window = super().window_at(n, row)
        one = self.bounds[n + 1] - self.bounds[n] == 1
        return torch.zeros_like(window) if one else window


class WritesWhereRead(Conv):
    def store(self, n, row):
        self.pool[self.read[n]] = row.to(self.pool.dtype)


class ShortWritesWhereRead(Conv):
    """As vLLM 0.19.1: only sequences of W-1 tokens and more look up the slot to write."""

    def store(self, n, row):
        short = self.bounds[n + 1] - self.bounds[n] < self.history
        self.pool[(self.read if short else self.write)[n]] = row.to(self.pool.dtype)


class NeighbourLeaks(Conv):
    """A sequence's first tokens see the tokens packed before it."""

    def window_at(self, n, row):
        first = self.bounds[n]
        if first < self.history:
            return super().window_at(n, row)
        return self.x[first - self.history : first].float().T


class IgnoresFresh(Conv):
    def start(self, n):
        return self.pool[self.read[n]].float()


class AlwaysFresh(Conv):
    def start(self, n):
        return torch.zeros_like(self.pool[self.read[n]].float())


class PaddingWrites(Conv):
    """Index -1 is the last row."""

    def padded(self, n, start, stop):
        tokens = self.x[start:stop].float()
        row = self.pool[-1].float()
        self.pool[-1] = torch.cat([row, tokens.T], dim=1)[:, -row.shape[1] :].to(self.pool.dtype)


class WritesNextSlot(Conv):
    """The row after the sequence's own is cleared as well."""

    def store(self, n, row):
        super().store(n, row)
        self.pool[(self.write[n] + 1) % len(self.pool)] = 0
        super().store(n, row)


class SwapsSlots(Conv):
    """Sequence n reads the slot of sequence n - 1."""

    def start(self, n):
        row = self.pool[self.read[n - 1]].float()
        return torch.zeros_like(row) if self.fresh[n] else row


class SiluTwice(Conv):
    def activate(self, total):
        return F.silu(F.silu(total))


class NoSilu(Conv):
    def activate(self, total):
        return total


class BlockBoundary(Conv):
    """A block of 8 tokens does not see the oldest token before it."""

    def convolve(self, n, window, tokens):
        total = super().convolve(n, window, tokens)
        for first in range(8, len(tokens), 8):
            whole = torch.cat([window, tokens.T], dim=1)
            total[first] = total[first] - whole[:, first] * self.weight[:, 0]
        return total


class LastChannel(Conv):
    """The last channel has its neighbour's taps."""

    def convolve(self, n, window, tokens):
        self.weight = torch.cat([self.weight[:-1], self.weight[-2:-1]])
        return super().convolve(n, window, tokens)


class SmallChannel(Conv):
    """A channel that is a thousand times smaller than the others in the tests' data is twice too large."""

    def convolve(self, n, window, tokens):
        total = super().convolve(n, window, tokens)
        total[:, 3] = total[:, 3] * 2
        return total


class SumsInBfloat16(Conv):
    def add(self, total, product):
        return (total + product).bfloat16().float()


class StateInBfloat16(Conv):
    """The state is stored in fewer bits than the input has."""

    def store(self, n, row):
        super().store(n, row.bfloat16().float() if self.dtype != torch.bfloat16 else row * 1.01)


class BiasAfterFirst(Conv):
    """The bias reaches the first token of a sequence only."""

    def convolve(self, n, window, tokens):
        total = super().convolve(n, window, tokens)
        if self.bias is not None:
            total[1:] = total[1:] - self.bias.float()
        return total


class AcceptedOffByOne(Conv):
    """The window starts one column too early."""

    def window_at(self, n, row):
        if self.accepted is None:
            return super().window_at(n, row)
        first = max(int(self.accepted[n]) - 2, 0)
        return row[:, first : first + self.history]


class KeepsWholeWindow(Conv):
    """A verify step leaves the window with its oldest input."""

    def left(self, n, row, window, tokens):
        if self.accepted is None:
            return super().left(n, row, window, tokens)
        new = torch.cat([window, tokens.T], dim=1)[:, : row.shape[1]]
        return torch.cat([new, row[:, new.shape[1] :]], dim=1)


SOUND = {
    "sound": Conv, "rounds_products": RoundsProducts, "rounds_before": RoundsBefore,
}  # fmt: skip
FAULTS = {
    "window_shifted": WindowShifted, "window_of_tokens_shifted": WindowOfTokensShifted,
    "not_advanced": NotAdvanced, "short_forgets": ShortForgets, "short_keeps_oldest": ShortKeepsOldest,
    "one_token_drops_state": OneTokenDropsState, "writes_where_read": WritesWhereRead,
    "short_writes_where_read": ShortWritesWhereRead, "neighbour_leaks": NeighbourLeaks,
    "ignores_fresh": IgnoresFresh, "always_fresh": AlwaysFresh, "padding_writes": PaddingWrites,
    "writes_next_slot": WritesNextSlot, "swaps_slots": SwapsSlots, "silu_twice": SiluTwice,
    "no_silu": NoSilu, "block_boundary": BlockBoundary, "last_channel": LastChannel,
    "small_channel": SmallChannel, "sums_in_bfloat16": SumsInBfloat16,
    "state_in_bfloat16": StateInBfloat16, "bias_after_first": BiasAfterFirst,
}  # fmt: skip
UPDATE_FAULTS = {
    "window_shifted_update": WindowShifted, "not_advanced_update": NotAdvanced,
    "writes_where_read_update": WritesWhereRead, "ignores_fresh_update": IgnoresFresh,
    "padding_writes_update": PaddingWrites, "writes_next_slot_update": WritesNextSlot,
    "swaps_slots_update": SwapsSlots, "silu_twice_update": SiluTwice,
    "short_forgets_update": ShortForgets, "short_keeps_oldest_update": ShortKeepsOldest,
    "accepted_off_by_one_update": AcceptedOffByOne, "keeps_whole_window_update": KeepsWholeWindow,
    "sums_in_bfloat16_update": SumsInBfloat16, "small_channel_update": SmallChannel,
}  # fmt: skip
SOUND_UPDATES = {"sound_update": Conv, "rounds_products_update": RoundsProducts}
for _table in (SOUND, FAULTS, UPDATE_FAULTS, SOUND_UPDATES):
    globals().update({name: on_slots(kind) for name, kind in _table.items()})

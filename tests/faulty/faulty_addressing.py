"""Faults of addressing: the wrong head, token, sequence, slot or layout is read or written."""

from __future__ import annotations

import torch
from faulty_model import LENGTHS, STARTS, Fault, Spot

OUTPUT, STATE = Spot(tensors=("output",)), Spot(tensors=("state",))
LAST = LENGTHS[3] - 2  # first token of the third sequence's partial chunk


def at_end(function):
    """Change what one partial chunk does."""
    return lambda value, run: function(value, run) if run.length < run.size and run.length > 1 else value


def window(by):
    """v read by tokens off, inside the whole packed call."""

    def edit(call, run):
        call.v = call.v.roll(by, 0)
        return call

    return edit


def swapped(call, run):
    call.q, call.k = call.k, call.q
    return call


def wrapped(limit):
    """A flat offset into k of `limit` entries and more starts over, as an int of that range does."""

    def edit(rows, run):
        stride = run.hk * run.call.k.shape[-1]
        return (rows * stride % limit) // stride

    return edit


def wrapped_q(limit):
    def edit(value, run):
        stride = run.hk * run.call.k.shape[-1]
        return run.q_all[(run.rows * stride % limit) // stride].transpose(0, 1)

    return edit


def into(row, head, function):
    """Change one row of the finished output."""

    def edit(output, run):
        output[row, head] = function(output[row, head].float(), run).to(output.dtype)
        return output

    return edit


def of_rows(rows, value):
    def edit(output, run):
        output[rows] = value
        return output

    return edit


def one_lane(row, head, lane):
    """10 % of its tile's RMS, in one entry."""

    def edit(output, run):
        tile = output[STARTS[3] : STARTS[3] + 64, head].float()
        output[row, head, lane] += 0.1 * tile.square().mean().sqrt()
        return output

    return edit


def leak(token, distance, size, sequence=3):
    """Some of a later token's value."""
    row = STARTS[sequence] + token
    return into(row, 1, lambda o, run: o + size * run.call.v[row + distance, 1].float())


def through_the_mask(token, distance, size):
    """One row of the first chunk lets a later token in, faintly; wherever the sequence lies in the call."""

    def edit(scores, run):
        if run.chunk == 0 and run.length > token + distance:
            later = run.k[1, token + distance]
            scores[1, token, token + distance] += size * (run.q[1, token] * later).sum()
        return scores

    return edit


def one_off(target, source):
    """The output of one token, written where another's belongs."""

    def edit(output, run):
        output[target] = output[source]
        return output

    return edit


def swap_states(final, run):
    return final[[3, 1, 2, 0]] if len(final) == 4 else final


def late_state(h, run):
    """The stored states are counted from one too many: a chunk reads the start of the one before."""
    before = run.memory.get("h", h) if run.chunk else h
    run.memory["h"] = h
    return before


def write_unowned(pool, slots, final):
    owned = slots >= 0
    pool[slots[owned]] = final[owned].to(pool.dtype)
    free = next(s for s in range(len(pool)) if s not in slots.tolist())
    pool[free, 1] = final[0, 1].to(pool.dtype)


def padding_writes_last(pool, slots, final):
    pool[slots] = final.to(pool.dtype)  # -1 counts from the end


def scatter_in_order(pool, slots, final):
    pool[: len(slots)] = final.to(pool.dtype)


def spoil(tensor):
    def edit(final, run):
        getattr(run.call, tensor).zero_()
        return final

    return edit


def poisoned_neighbour(value, run):
    """Rows past the end of the sequence are read and multiplied by zero."""
    past = run.rows[-1] + 1
    behind = run.call.v[past : past + 1].float().sum() if run.closes and past < len(run.call.v) else 0.0
    return value + 0.0 * behind


ADDRESSING = {
    # heads
    "key_heads_interleaved": Fault(
        {"key_head": lambda h, run: torch.arange(run.hv) % run.hk}, spot=Spot(heads=(1, 2))
    ),
    "q_and_k_swapped": Fault({"inputs": swapped}),
    "output_of_the_next_head": Fault({"output": lambda o, run: o.roll(-1, 1)}, spot=OUTPUT),
    "output_of_two_heads_swapped": Fault(
        {"output": lambda o, run: o[:, [0, 2, 1, 3]]}, spot=Spot(("output",), heads=(1, 2))
    ),
    "state_of_the_next_head": Fault({"start": lambda s, run: s.roll(-1, 0)}),
    "final_state_of_the_next_head": Fault({"last": lambda s, run: s.roll(-1, 0)}, spot=STATE),
    "one_head_is_nan": Fault(
        {"o": lambda o, run: torch.where((torch.arange(run.hv) == 2)[:, None, None], torch.nan, o)},
        tiers=(1,),
        spot=Spot(("output",), (0,), (2,), lambda t: t == 0, ("nan",)),
    ),
    # tokens
    "v_window_shifted_back": Fault({"inputs": window(1)}),
    "v_window_shifted_ahead": Fault({"inputs": window(-1)}, tiers=(0, 1, 2, 3, 4)),
    "one_token_zeroed": Fault(
        {"output": into(STARTS[3] + 100, 1, lambda o, run: 0 * o)},
        spot=Spot(("output",), (3,), (1,), lambda t: t == 100),
    ),
    "two_tokens_swapped_at_a_chunk_start": Fault(
        {"output": one_off(STARTS[3] + 64, STARTS[3] + 63)},
        spot=Spot(("output",), (3,), tokens=lambda t: t == 64),
    ),
    "one_lane_in_many_off": Fault(
        {"output": one_lane(STARTS[3] + 33, 2, 7)},
        cases=("fp32",),
        spot=Spot(("output",), (3,), (2,), lambda t: t == 33),
    ),
    "offset_of_k_wraps": Fault(
        {"take": wrapped(1 << 13)}, spot=Spot(sequences=(3,), tokens=lambda t: t >= 128 - STARTS[3])
    ),
    "offset_of_q_wraps": Fault(
        {"q": wrapped_q(1 << 13)}, spot=Spot(("output",), (3,), tokens=lambda t: t >= 128 - STARTS[3])
    ),
    "one_entry_plus_inf": Fault(
        {"output": into(STARTS[3] + 5, 1, lambda o, run: o.index_fill(0, torch.tensor([4]), torch.inf))},
        tiers=(1,),
        spot=Spot(("output",), (3,), (1,), lambda t: t == 5, ("+inf",)),
    ),
    "one_entry_minus_inf": Fault(
        {"output": into(STARTS[3] + 5, 1, lambda o, run: o.index_fill(0, torch.tensor([4]), -torch.inf))},
        tiers=(1,),
        spot=Spot(("output",), (3,), (1,), lambda t: t == 5, ("-inf",)),
    ),
    "one_state_entry_inf": Fault(
        {"last": lambda s, run: s.index_fill(0, torch.tensor([1]), torch.inf) if run.sequence == 3 else s},
        tiers=(1,),
        spot=Spot(("state",), (3,), (1,), classes=("+inf",)),
    ),
    # leaks
    "next_token_leaks_at_a_chunk_boundary": Fault(
        {"output": leak(63, 1, 0.02)},
        cases=("packed", "fp32"),
        tiers=(0, 2, 3, 4),
        spot=Spot(("output",), (3,), (1,), lambda t: t == 63),
    ),
    "next_token_leaks_at_token_15": Fault(
        {"output": leak(15, 1, 0.02)},
        cases=("packed", "fp32"),
        tiers=(0, 2, 3, 4),
        spot=Spot(("output",), (3,), (1,), lambda t: t == 15),
    ),
    "a_later_token_leaks_faintly": Fault(
        {"output": lambda o, run: leak(40, 2, 1e-4)(o.float(), run)},
        tiers=(4,),
        says="silent",
        relations="all",
        spot=Spot(("output",), (3,), (1,), lambda t: t == 40),
    ),
    "a_late_token_leaks_faintly": Fault(
        {"output": lambda o, run: leak(126, 2, 1e-4)(o.float(), run)},
        tiers=(4,),
        says="silent",
        relations="all",
        spot=Spot(("output",), (3,), (1,), lambda t: t == 126),
    ),
    "a_row_of_the_mask_leaks_faintly": Fault(
        {"qk": through_the_mask(40, 2, 1e-4)},
        tiers=(4,),
        says="causality",
        relations="all",
        spot=Spot(("output",), (0, 3), (1,), lambda t: t == 40),
    ),
    "a_late_row_of_the_mask_leaks_faintly": Fault(
        {"qk": through_the_mask(62, 1, 1e-4)},
        tiers=(4,),
        says="causality",
        relations="all",
        spot=Spot(("output",), (0, 3), (1,), lambda t: t == 62),
    ),
    "output_of_a_later_token_leaks_faintly": Fault(
        {
            "output": lambda o, run: o.float().index_add(
                0, torch.tensor([STARTS[3] + 40]), 1e-4 * o[STARTS[3] + 42 :][:1].float()
            )
        },
        tiers=(4,),
        says="silent",
        relations="all",
        spot=Spot(("output",), (3,), tokens=lambda t: t == 40),
    ),
    "sequence_before_leaks": Fault(
        {"output": into(STARTS[3], 0, lambda o, run: o + 0.2 * run.call.v[STARTS[3] - 1, 0].float())},
        tiers=(0, 2, 3, 4),
        spot=Spot(("output",), (3,), (0,), lambda t: t == 0),
    ),
    "a_poisoned_neighbour_spoils_the_end": Fault(
        {"o": poisoned_neighbour},
        tiers=(4,),
        says="isolation",
        spot=Spot(("output",), (0, 2), classes=("nan",)),
    ),
    # partial chunks and lengths
    "last_chunk_missing_in_the_state": Fault(
        {"state": at_end(lambda s, run: run.state_in)}, spot=Spot(("state",), (0, 3))
    ),
    "last_chunk_missing_in_the_output": Fault(
        {"o": at_end(lambda o, run: 0 * o)}, spot=Spot(("output",), (0, 3), tokens=lambda t: t >= 64)
    ),
    "tail_rows_unwritten_nan": Fault(
        {"output": of_rows(slice(STARTS[3] + LAST, None), torch.nan)},
        tiers=(1,),
        spot=Spot(("output",), (3,), tokens=lambda t: t == LAST, classes=("nan",)),
    ),
    "tail_rows_unwritten_garbage": Fault(
        {"output": of_rows(slice(STARTS[3] + LAST, None), 1e30)},
        spot=Spot(("output",), (3,), tokens=lambda t: t >= LAST),
    ),
    "last_token_of_64n_plus_1_unread": Fault(
        {"o": lambda o, run: 0 * o if run.length == 1 and run.chunk else o},
        cases=("65",),
        spot=Spot(("output",), (0, 1), tokens=lambda t: t in (64, 128)),
    ),
    "empty_sequence_loses_its_state": Fault(
        {"last": lambda s, run: 0 * s if run.begin == run.end else s}, spot=Spot(("state",), (1,))
    ),
    "one_token_sequence_is_not_written_back": Fault(
        {"last": lambda s, run: run.state_in if run.end - run.begin == 1 else s}, spot=Spot(("state",), (2,))
    ),
    "one_token_sequence_takes_its_neighbours_state": Fault(
        {"start": lambda s, run: run.call.state[run.sequence - 2].float() if run.end - run.begin == 1 else s},
        spot=Spot(sequences=(2,)),
    ),
    # states
    "state_returned_transposed": Fault({"last": lambda s, run: s.mT.contiguous()}, spot=STATE),
    "state_read_transposed": Fault({"start": lambda s, run: s.mT.contiguous()}),
    "state_of_the_neighbour": Fault({"inputs": lambda c, run: setattr(c, "state", c.state.roll(1, 0)) or c}),
    "initial_state_ignored": Fault({"start": lambda s, run: 0 * s}),
    "initial_state_missing_in_o": Fault(
        {"h": lambda h, run: h if run.chunk else 0 * h}, stage="state", spot=OUTPUT
    ),
    "final_states_of_two_sequences_swapped": Fault({"final": swap_states}, spot=Spot(("state",), (0, 3))),
    "final_state_from_before_the_last_chunk": Fault(
        {"last": lambda s, run: run.state_in if run.end - run.begin > 64 else s},
        spot=Spot(("state",), (0, 3)),
    ),
    "output_reads_the_state_one_chunk_late": Fault(
        {"h": late_state}, stage="state", spot=Spot(("output",), (0, 3), tokens=lambda t: t >= 64)
    ),
    # slots
    "stale_state_used": Fault(
        {"states": lambda held, fresh, slots: held},
        cases=("fresh", "stale-pool"),
        spot=Spot(sequences=(2, 3)),
    ),
    "padding_reads_the_first_slot": Fault(
        {"states": lambda held, has, slots: torch.where(has.view(-1, 1, 1, 1), held.float(), 0.0)},
        cases=("padded-pool",),
        spot=Spot(sequences=(2,)),
    ),
    "padding_writes_the_last_slot": Fault(
        {"scatter": padding_writes_last}, cases=("padded-pool",), tiers=(4,), says="slot 6"
    ),
    "a_slot_of_no_sequence_is_written": Fault(
        {"scatter": write_unowned}, cases=("pool", "stale-pool"), tiers=(4,), says="slot"
    ),
    "slots_written_in_order": Fault(
        {"scatter": scatter_in_order}, cases=("pool",), tiers=(0, 1, 2, 3, 4), spot=STATE
    ),
    "slots_read_in_order": Fault(
        {"slots": lambda slots, _: torch.arange(len(slots))}, cases=("pool",), tiers=(0, 1, 2, 3, 4)
    ),
    # inputs
    "v_is_overwritten": Fault({"final": spoil("v")}, tiers=(4,), says="v"),
    "g_is_overwritten": Fault({"final": spoil("g")}, tiers=(4,), says="g"),
    "cu_seqlens_is_overwritten": Fault({"final": spoil("cu_seqlens")}, tiers=(4,), says="cu_seqlens"),
}

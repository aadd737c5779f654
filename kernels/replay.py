"""A decode batch captured in a CUDA graph and replayed with fewer rows, as engines replay it.

The idea: a graph is captured for a batch of fixed size. When fewer sequences run, the engine replays the same
launches with other numbers in the same tensors; the rows that are left over are told to be nobody's by their
slot index, or by having no token. A kernel that touches them writes into somebody's state. So the launch is
captured on the call as it is, then indices and offsets of the last rows are changed in place and the graph is
replayed. Without a GPU the launch is made once more instead: the same kernel on the same numbers.

Leaves to others: which padding a kernel promises to respect (its contract), judging (compare).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from ..capture.errors import Refused

WARM_UPS = 2


class Replay(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the captured batch is replayed: `extra["replay"]` of a call."""

    live: int
    """Rows that are still sequences; the rest is padding."""
    tail: int | Literal["first"] | None = None
    """The kernel's slot index of every padded row; `first`: that of the first live row, to which the slot has
    been handed on; None leaves the captured one (stale, but valid)."""
    empty: bool = False
    """Padded rows have no token (where the kernel takes offsets)."""


def replay_of(extra: Mapping[str, Any], n_rows: int) -> Replay | None:
    """The replay that a call asks for, if any. Raises Refused for one that does not fit its rows."""
    if "replay" not in extra:
        return None
    try:
        replay = msgspec.convert(extra["replay"], Replay)
    except msgspec.ValidationError as error:
        raise Refused(f"replay: {error}") from error
    if not 0 <= replay.live <= n_rows:
        raise Refused(f"replay: {replay.live} live rows of a batch of {n_rows}")
    return replay


def launched(
    launch: Callable[[], Tensor], *, replay: Replay | None, indices: Tensor, offsets: Tensor | None,
    pool: Tensor,
) -> tuple[Tensor, dict[str, Any]]:  # fmt: skip
    """(output, evidence) of a launch, or of its replay.

    launch: runs the kernel on tensors that stay where they are, among them `indices` [N] or [N, columns]
    (kernel's numbering), `offsets` [N+1] or None, and `pool`, which it changes. The pool is as it was before
    when the replay begins. Raises Refused for empty padded rows of a kernel without offsets.
    """
    if replay is None:
        return launch(), {}
    if replay.empty and offsets is None:
        raise Refused("replay: this kernel takes one token per row and no offsets, so no row can be empty")
    before = pool.clone()
    graph, output = _captured(launch) if pool.is_cuda else (None, None)
    pool.copy_(before)
    if replay.tail is not None:
        indices[replay.live :] = indices[:1].clone() if replay.tail == "first" else replay.tail
    if replay.empty and offsets is not None:
        offsets[replay.live + 1 :] = offsets[replay.live].clone()
    if graph is None or output is None:
        return launch(), {"replayed": "eager", "padded_rows": indices.shape[0] - replay.live}
    graph.replay()
    torch.cuda.synchronize()
    return output.clone(), {"graph_replayed": 1, "padded_rows": indices.shape[0] - replay.live}


def _captured(launch: Callable[[], Tensor]) -> tuple[Any, Tensor]:
    """The launch as a CUDA graph, and the tensor that a replay writes its output to."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):  # compiles and tunes, which a capture must not do
            launch()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = launch()
    return graph, output

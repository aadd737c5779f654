"""Run a transformers model on a frozen token array and write its GDN calls: the part that lives in the child.

The idea: the model is run as it would be served (its own class, its own cache, the prefill cut as asked)
while `hooks` watches; each call is on disk before the next one starts, so memory holds one call, not a
run. The same pass is the control: logits that are finite here put the blame elsewhere. Loading it is
`loading`'s business.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .casefile import write_case
from .checkpoint import model_shape, read_config
from .errors import CannotRun, GdncheckError
from .fingerprint import fingerprint, package_version
from .hooks import LayerCall, StopCapture, recording
from .huggingface import Source, case_from_huggingface
from .loading import choose_backend, choose_device, first_line, load_model, tokenize
from .plan import check_room, make_plan
from .records import CapturedCase, CaptureRequest, CaptureResult, Logits, Message
from .tokens import check_ids, token_hash
from .weights import LayerWeights, block_of, check_layer_weights

Tell = Callable[[Message], None]
# Logits are made this many positions at a time: a 248,320-word vocabulary takes 0.5 MB a position in bf16.
POSITIONS = 256


def capture_live(request: CaptureRequest, model_name: str, tell: Tell) -> CaptureResult:
    """Do what the request says; cases land in `request.out`. Raises BadInput and CannotRun, one line each."""
    started = time.monotonic()
    directory = Path(request.directory)
    device = choose_device(request.device)
    choose_backend(request.backend, device)
    shape = model_shape(directory)
    ids = request.ids if request.ids is not None else tokenize(directory, request)
    check_ids(ids, shape.vocab_size, request.tokens_path)
    plan = make_plan(
        shape, len(ids), request.layers, request.what,
        split=request.split, decode=request.decode, dtype=request.dtype,
    )  # fmt: skip
    if request.ids is None:
        check_room(plan, Path(request.out))
        tell(Message(kind="plan", plan=plan))
    tell(Message(kind="note", text=f"loading {model_name}"))
    model = load_model(request, device)
    weights = [check_layer_weights(block_of(model, layer), layer, directory) for layer in request.layers]
    source = Source(
        model=model_name,
        token_hash=token_hash(ids),
        engine=f"transformers@{package_version('transformers')}",
        model_config=portable_config(directory),
        fingerprint=fingerprint(),
    )
    writer = CaseWriter(Path(request.out), source, request, tell)
    stop_after = max(request.layers) if request.early_stop else None
    try:
        with recording(model, request.layers, writer.write, what=request.what, stop_after=stop_after):
            logits, generated = run_calls(
                model, ids, plan.lengths, decode=request.decode, before=writer.announce
            )
    except GdncheckError:
        raise
    except torch.OutOfMemoryError:
        raise CannotRun(f"{device} ran out of memory; use --split, --early-stop or --device-map") from None
    except Exception as error:  # whatever the model's own code or a kernel under it raises
        remedy = "" if request.backend == "torch" or device.type == "cpu" else "; try --backend torch"
        raise CannotRun(f"the model failed while it ran ({first_line(error)}){remedy}") from error
    verdict, reason = judge(logits, weights, writer.cases)
    return CaptureResult(
        verdict=verdict, reason=reason, model=model_name, model_class=type(model).__name__,
        layers=request.layers, what=request.what, n_tokens=len(ids), token_hash=source.token_hash,
        lengths=plan.lengths, cases=writer.cases, bytes=sum(case.bytes for case in writer.cases),
        logits=logits, weights=weights, engine=source.engine, backends=sorted(writer.backends),
        generated=generated, seconds=round(time.monotonic() - started, 3),
    )  # fmt: skip


def run_calls(
    model: Any, ids: list[int], lengths: list[int], *, decode: int = 0,
    before: Callable[[int, int, int], None] = lambda call, length, calls: None,
) -> tuple[Logits, list[int]]:  # fmt: skip
    """Feed the ids in calls of these lengths through one cache, then `decode` greedy tokens one by one.

    before(call, length, calls) is called ahead of each call. Returns the logits check and the generated ids.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    control = Control(model)
    n_calls, start = len(lengths) + decode, 0
    generated: list[int] = []
    with torch.no_grad():
        for call in range(n_calls):
            fed = ids[start : start + lengths[call]] if call < len(lengths) else generated[-1:]
            before(call, len(fed), n_calls)
            try:
                hidden = forward(model, cache, fed)
            except StopCapture:
                control.stopped = True
            else:
                best = control.look(hidden, call, start)
                if call >= len(lengths) - 1 and len(generated) < decode:
                    generated.append(best)
            start += len(fed)
    return control.result(), generated


def forward(model: Any, cache: Any, ids: list[int]) -> Tensor:
    """Last hidden states [1, T, hidden] of one call; the cache moves on."""
    base = model.base_model
    # Renamed between 5.7 and 5.24.
    word = "cache" if "cache" in inspect.signature(type(base).forward).parameters else "past_key_values"
    embedding = model.get_input_embeddings()
    hook = getattr(embedding, "_hf_hook", None)
    device = getattr(hook, "execution_device", None) if hook else embedding.weight.device
    input_ids = torch.tensor([ids], device=device)
    hidden: Tensor = base(input_ids=input_ids, use_cache=True, **{word: cache}).last_hidden_state
    return hidden


class Control:
    """Checks the logits of every position for finiteness, a few positions at a time."""

    def __init__(self, model: Any) -> None:
        self.head = model.get_output_embeddings()
        self.n_positions = self.n_nonfinite = 0
        self.first: dict[str, Any] | None = None
        self.stopped = False

    def look(self, hidden: Tensor, call: int, start: int) -> int:
        """Check one call's positions [1, T, hidden]; returns the greedy next id."""
        best = 0
        for piece in torch.split(hidden, POSITIONS, dim=1):
            logits = self.head(piece)[0]
            bad = (~torch.isfinite(logits)).any(-1)
            if self.first is None and bool(bad.any()):
                row = int(bad.nonzero()[0])
                values = logits[row][~torch.isfinite(logits[row])]
                kind = "nan" if bool(values.isnan().any()) else "+inf" if float(values[0]) > 0 else "-inf"
                self.first = {"call": call, "token": start + row, "class": kind}
            self.n_nonfinite += int(bad.sum())
            self.n_positions += len(bad)
            start += len(bad)
            best = int(logits[-1].argmax())
        return best

    def result(self) -> Logits:
        if self.stopped:
            return Logits(checked=False, reason="stopped after the last layer asked for")
        return Logits(
            checked=True, n_positions=self.n_positions, n_nonfinite=self.n_nonfinite, first=self.first
        )


class CaseWriter:
    """Turns each recorded call into a file at once and remembers what it wrote."""

    def __init__(self, out: Path, source: Source, request: CaptureRequest, tell: Tell) -> None:
        self.out, self.source, self.request, self.tell = out, source, request, tell
        self.cases: list[CapturedCase] = []
        self.backends: set[str] = set()

    def announce(self, call: int, length: int, calls: int) -> None:
        self.tell(Message(kind="note", text=f"call {call + 1} of {calls}: {length} tokens"))

    def write(self, call: LayerCall) -> None:
        case = case_from_huggingface(call, self.source, self.request.what)
        path = write_case(case, self.out / f"{case.label}.safetensors")
        self.backends.add(call.backend)
        self.cases.append(CapturedCase(
            path=path.name, layer=call.layer, call=call.call, phase=case.origin.phase or "",
            n_tokens=case.n_tokens, bytes=path.stat().st_size, finite=case.finite,
        ))  # fmt: skip


def judge(logits: Logits, weights: list[LayerWeights], cases: list[CapturedCase]) -> tuple[Any, str]:
    """(verdict, one sentence): bad weights first, then the logits, then what the layers were handed."""
    for found in weights:
        for complaint in [
            *found.nonfinite,
            *found.different,
            *(f"{n}: not in the checkpoint" for n in found.not_on_disk),
        ]:
            return "fail", f"layer {found.layer}, weight {complaint}"
    if logits.first is not None:
        place = f"call {logits.first['call']}, token {logits.first['token']}"
        return "fail", (
            f"logits are {logits.first['class']} from {place} on "
            f"({logits.n_nonfinite} of {logits.n_positions} positions): not finite under transformers either"
        )
    for case in cases:
        if not case.finite:
            return "fail", f"{case.path}: the layer's inputs are not finite; the fault lies before this layer"
    control = (
        f"logits finite at {logits.n_positions} positions"
        if logits.checked
        else f"logits not checked ({logits.reason})"
    )
    count = sum(found.n_compared for found in weights)
    return "pass", f"{control}; {count} weights finite and equal to the checkpoint's"


def portable_config(directory: Path) -> dict[str, Any]:
    """The text model's configuration without anything that names a place or a person."""
    config = read_config(directory)
    return {k: v for k, v in (config.get("text_config") or config).items() if not k.startswith("_")}

"""The process that holds the live model: `python -m gdncheck.capture.child`, one request, then it ends.

The idea: the parent, which later gives verdicts, never imports transformers; and a model that runs out
of memory takes only this process with it. The request comes as one JSON document on stdin; messages
(`records.Message`) go out one a line on the stdout this process was started with, while everything that
libraries print is sent to stderr.
"""

from __future__ import annotations

import os
import sys

import msgspec

from .errors import BadInput, GdncheckError
from .records import CaptureRequest, Message


class Errand(msgspec.Struct, frozen=True, kw_only=True):
    """What stdin carries."""

    model_name: str
    request: CaptureRequest


def main() -> int:
    """Serve one request; the exit status is 0 whenever a last message went out."""
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    encoder = msgspec.json.Encoder()

    def tell(message: Message) -> None:
        channel.write(encoder.encode(message) + b"\n")
        channel.flush()

    errand = msgspec.json.decode(sys.stdin.buffer.read(), type=Errand)
    try:
        from .live import capture_live

        tell(Message(kind="result", result=capture_live(errand.request, errand.model_name, tell)))
    except GdncheckError as error:
        tell(Message(kind="bad-input" if isinstance(error, BadInput) else "cannot-run", text=str(error)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""gdncheck: a numerical differential tester for Gated DeltaNet kernels.

Every command has a twin here with the same name and arguments, loaded on first use so that
`import gdncheck` stays light. `capture` and `kernels` are packages too, so their twins live in them:
`gdncheck.capture.run.capture`, `gdncheck.kernels.catalogue`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Twin -> module that defines it.
_TWINS = {
    "bisect": "gdncheck.compare.bisect",
    "decode": "gdncheck.compare.decode.drift",
    "decode_drafts": "gdncheck.compare.verify.drafted",
    "diff": "gdncheck.compare.diff",
    "doctor": "gdncheck.kernels.doctor",
    "export": "gdncheck.compare.export",
    "inspect": "gdncheck.compare.inspect",
    "fuzz": "gdncheck.compare.fuzz.fuzz",
    "life": "gdncheck.compare.life.life",
    "make": "gdncheck.capture.make",
    "merge": "gdncheck.compare.fuzz.merge",
    "repeat": "gdncheck.compare.repeats",
    "replay": "gdncheck.compare.replay",
    "sanitize": "gdncheck.compare.sanitize",
    "selftest": "gdncheck.compare.selftest",
    "shrink": "gdncheck.compare.shrink",
    "sweep": "gdncheck.compare.sweep.sweep",
    "read_case": "gdncheck.capture.casefile",
    "write_case": "gdncheck.capture.casefile",
    "Case": "gdncheck.capture.case",
}


def __getattr__(name: str) -> Any:
    if name in _TWINS:
        return getattr(import_module(_TWINS[name]), name)
    raise AttributeError(f"module 'gdncheck' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_TWINS])

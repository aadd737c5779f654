"""A finding, wherever it is kept: a row of a run's store, or a case file that carries what failed on it.

The idea: whatever shrinks, replays or exports a failure needs the same facts: the case, the kernel, the
deviations and options, what was seen and on what machine. A shrunk case file has them in its header (under
`fingerprint`), so that one file is enough to send; a store has them in its row.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..capture.case import Case
from ..capture.casefile import read_case
from ..capture.errors import BadInput
from ..capture.fingerprint import fingerprint
from ..kernels.interface import KernelInfo
from .jsonout import plain_numbers
from .store import FILE_NAME, FindingRow, RunStore, Signature
from .sweep.attempt import Attempt

KEY = "finding"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a failure, as plain data."""

    kernel: str
    """Name with version, as it was run."""
    version: str | None = None
    signature: str | None = None
    """16 hex digits."""
    verdict: str = "fail"
    tier: int | None = None
    rule: str | None = None
    kind: str = ""
    """nonfinite, wrong, error, crash, timeout or out-of-contract."""
    class_: str = msgspec.field(name="class", default="")
    stage: str | None = None
    place_pattern: str = ""
    reason: str = ""
    deviations: dict[str, str] = {}
    baseline: str | None = None
    relation: str = ""
    """The relation that shows it, where the case's own numbers do not."""
    failures: int | None = None
    runs: int | None = None
    """`failures` of so many runs in new processes."""
    seed: int = 0
    tune: str = "stock"
    time_limit: float = 300.0
    """Seconds for one call."""
    environment: dict[str, Any] = {}
    """Of the kernel's process: versions, device."""
    machine: dict[str, Any] = {}
    """Software and hardware: `capture.fingerprint`."""
    launched: dict[str, str] = {}
    """Triton kernel -> configuration that ran."""
    history: tuple[str, ...] = ()
    """How it was made smaller."""


class Finding(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A failure that can be run again."""

    name: str
    """As the user gave it."""
    case: Case
    facts: Facts
    neighbour: Case | None = None
    """The nearest case that passes, where one is kept."""
    identity: Signature | None = None
    """The signature as data, where a store has it."""
    store: Path | None = None
    """Directory of the run that it comes from."""


def facts_of(info: KernelInfo, attempt: Attempt, *, kind: str, signature: str | None, **more: Any) -> Facts:
    """The facts of a failing attempt. more: further fields."""
    place = attempt.place
    launched = attempt.evidence.get("launched") or {}
    return Facts(
        kernel=info.name,
        version=info.version,
        signature=signature,
        verdict=attempt.verdict,
        tier=attempt.tier,
        rule=attempt.rule,
        kind=kind,
        class_="" if place is None else place.class_,
        stage=None if place is None else place.tensor,
        reason=attempt.reason,
        environment=plain_numbers(msgspec.to_builtins(info.environment, enc_hook=repr)),
        machine=fingerprint(),
        launched={str(name): str(value) for name, value in launched.items()},
        **more,
    )


def with_facts(case: Case, facts: Facts) -> Case:
    """The case with the facts in its header."""
    document = plain_numbers(msgspec.to_builtins(facts))
    return msgspec.structs.replace(case, fingerprint={**case.fingerprint, KEY: document}, content_hash=None)


def facts_in(case: Case) -> Facts | None:
    """The facts that a case's header carries; None where it carries none, or none of this form."""
    document = case.fingerprint.get(KEY)
    if not isinstance(document, Mapping):
        return None
    try:
        return msgspec.convert(document, Facts, strict=False)
    except msgspec.ValidationError:
        return None


def find(words: Case | Path | str, *, original: bool = False) -> Finding:
    """The finding of a case, a case file, `RUN/SIGNATURE` (a run's directory and its first digits), or a run
    that has one finding. original: the case as it was found, where a smaller one is kept, too.

    A case without facts has a kernel of "": the caller must be told it. Raises BadInput.
    """
    if isinstance(words, Case):
        return _of_case(words.label, words)
    path = Path(words)
    if path.is_file():
        return _of_case(str(words), read_case(path))
    for directory, prefix in ((path, ""), (path.parent, path.name)):
        if (directory / FILE_NAME).is_file():
            with RunStore.read(directory) as store:
                return _of_row(str(words), store, store.finding(prefix), original)
    raise BadInput(
        f"{words}: is neither a case file nor RUN/SIGNATURE of a run's directory; runs have a {FILE_NAME}"
    )


def _of_case(name: str, case: Case) -> Finding:
    return Finding(name=name, case=case, facts=facts_in(case) or Facts(kernel=""))


def _of_row(name: str, store: RunStore, row: FindingRow, original: bool) -> Finding:
    """A row's finding; what its document and its shrunk file say besides goes along."""
    file = row.case_file if original or not row.shrunk_file else row.shrunk_file
    if file is None:
        raise BadInput(f"{name}: its case was not kept; run the sweep or fuzz that found it again")
    case = read_case(store.case_path(file))
    attempt = row.document.get("attempt") or {}
    known = facts_in(case)
    if known is None or known.kernel != row.kernel:
        known = Facts(
            kernel=row.kernel,
            version=row.version,
            tier=row.tier,
            class_=row.class_,
            stage=row.stage,
            place_pattern=row.place_pattern,
            verdict=str(attempt.get("verdict", "fail")),
            rule=attempt.get("rule"),
            reason=str(attempt.get("reason", "")),
            deviations=row.deviations,
            baseline=row.options.get("baseline"),
            failures=row.failures,
            runs=row.runs,
            seed=int(row.options.get("seed", 0)),
            tune=str(row.options.get("tune", "stock")),
            time_limit=float(row.options.get("time_limit", 300.0)),
            machine=row.document.get("machine") or row.options.get("machine") or {},
        )
    known = msgspec.structs.replace(known, signature=row.signature)
    neighbour = read_case(store.case_path(row.neighbour_file)) if row.neighbour_file else None
    return Finding(
        name=name, case=case, facts=known, neighbour=neighbour, identity=row.identity, store=store.directory
    )


def environment_for(facts: Facts) -> dict[str, str]:
    """Variables of the kernel's process under which it was found."""
    return {"GDNCHECK_TUNE": facts.tune} if facts.tune != "stock" else {}

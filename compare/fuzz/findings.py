"""The findings of a run as it goes: seen, kept with its file, confirmed, reduced, counted.

The idea: a failure that no row explains becomes a row at once (with its case on the disk), so that no kill
loses it; confirming and shrinking come after, within budgets, and replace the row by the one under its final
name.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from ...capture.casefile import read_case
from ...capture.errors import BadInput, CannotRun
from ...kernels.pool import WorkerPool
from ..finding import Facts, with_facts
from ..jsonout import plain_numbers
from ..shrink import Shrunk, shrink
from ..store import FindingRow, RunStore, Signature
from ..sweep.attempt import Attempt, Kind
from .build import build
from .confirm import Confirmation, Confirmed, Limits
from .naming import known_as, signature_of
from .plan import Plan
from .recipe import to_json
from .subject import Verdict

if TYPE_CHECKING:
    from .runner import Flying

# Share of a run's time that confirming and shrinking may take, once it has run for a while.
SHARE, AT_LEAST = 0.5, 120.0
UNDONE = ("found", "to-shrink")
LEAST_BUDGET = 3.0  # seconds below which no shrink is begun

Tell = Callable[[str, dict[str, Any]], None]


class Findings:
    """Keeps the store's findings up to date for one runner."""

    def __init__(
        self, store: RunStore, workers: WorkerPool, plan: Plan, tell: Tell, *, first: bool = True
    ) -> None:
        """first: takes up what an earlier sitting left undone."""
        self.store, self.workers, self.plan, self.tell = store, workers, plan, tell
        self._rows = store.finding_rows()
        self._to_do = [row.signature for row in self._rows if first and row.status in UNDONE]
        self._started, self._spent = time.monotonic(), 0.0

    def seen(self, flying: Flying, verdict: Verdict) -> str:
        """A failing case: count the finding that it is, or keep a new one. Returns the raw digest."""
        attempt, job = verdict.attempt, verdict.job
        assert attempt is not None
        raw = signature_of(attempt, flying.subject.info.version, job.setup.chunk_size)
        table = self.store.findings_table
        known = table.alias(raw.digest)
        if known is None:
            self._reread()
            row = known_as(raw, self._rows)
            if row is not None:
                known = row.signature
                table.add_alias(raw.digest, known)
        if known is not None:
            table.seen_again(known)
            return raw.digest
        path = self.store.put_case(build(job.recipe, flying.subject.stock))
        # A hang is one within its own limit; replaying it is not to take the compiler's.
        limit = flying.limit([job]) if attempt.verdict == "timeout" else self.plan.time_limit
        self.store.add_finding(
            raw,
            {"recipe": to_json(job.recipe), "attempt": _plain(attempt)},
            status="found", case_file=path, number=job.number, config=job.config,
            options={
                "seed": self.plan.seed, "device": self.plan.device, "tune": self.plan.tune,
                "baseline": self.plan.baseline, "time_limit": limit,
            },
        )  # fmt: skip
        table.add_alias(raw.digest, raw.digest)
        self._reread()
        self._to_do.append(raw.digest)
        self.tell("new", {"signature": raw.digest, "kernel": raw.kernel, "reason": attempt.reason,
                          "number": job.number})  # fmt: skip
        return raw.digest

    def pending(self, kernels: list[Flying], deadline: float) -> None:
        """Confirm and shrink what is new, while there is time for it."""
        while self._to_do and time.monotonic() < deadline:
            allowed = max(AT_LEAST, SHARE * (time.monotonic() - self._started))
            if self._spent > allowed:
                return
            digest = self._to_do[0]
            row = next((r for r in self._rows if r.signature == digest), None)
            flying = _kernel_of(row, kernels)
            if row is not None and flying is not None:
                began = time.monotonic()
                if row.status == "found":
                    digest = self._confirm(flying, row)
                row = next(r for r in self._rows if r.signature == digest)
                if row.status == "to-shrink":
                    self._shrink(flying, row, deadline)
                self._spent += time.monotonic() - began
            self._to_do.pop(0)

    @property
    def waiting(self) -> int:
        """Findings that are not confirmed yet."""
        return len(self._to_do)

    def _confirm(self, flying: Flying, row: FindingRow) -> str:
        """Confirm a finding; the digest under which it is kept now."""
        self.tell("confirming", {"signature": row.signature, "kernel": row.kernel})
        subject = flying.subject
        attempt = msgspec.convert(row.document["attempt"], Attempt, strict=False)
        kind: Kind = attempt.kind or "wrong"
        later = flying.limit([])
        confirmation = Confirmation(
            self.workers, flying.handle, subject.info, read_case(self.store.case_path(row.case_file or "")),
            subject.given, seed=subject.seed, device=subject.device,
            limits=Limits(first=self.plan.time_limit if subject.device != "cpu" else later, later=later),
            budget=self.plan.confirm_seconds,
        )  # fmt: skip
        confirmed = confirmation.run(row.identity, kind, row.deviations)
        return self._keep(row, confirmed)

    def _keep(self, row: FindingRow, confirmed: Confirmed) -> str:
        """Replace the row by one under the final signature; or count it to the one that is there."""
        document = {**row.document, "confirmed": confirmed.attempt is not None,
                    "interval": list(confirmed.interval), "found_as": row.deviations}  # fmt: skip
        if confirmed.attempt is not None:
            document["attempt"] = _plain(confirmed.attempt)
        status = "not-reproduced" if confirmed.attempt is None else "to-shrink"
        digest = self.rename(row, confirmed.signature, {
            "status": status, "failures": confirmed.failures, "runs": confirmed.runs, "document": document,
        })  # fmt: skip
        self.tell("confirmed", {
            "signature": digest, "kernel": row.kernel, "failures": confirmed.failures,
            "runs": confirmed.runs, "status": status, "deviations": confirmed.deviations,
        })  # fmt: skip
        return digest

    def _shrink(self, flying: Flying, row: FindingRow, deadline: float) -> None:
        """Make a confirmed finding's case as small as it goes in its budget."""
        budget = min(self.plan.shrink_seconds, deadline - time.monotonic())
        if budget < LEAST_BUDGET or row.case_file is None:
            return
        info = flying.subject.info

        def say(words: str, *rest: object) -> None:
            self.tell("shrinking", {"signature": row.signature, "words": words})

        # A journal beside the cases: a shrink that is killed goes on where it was.
        out = self.store.directory / "shrinking" / f"{row.signature}.safetensors"
        try:
            shrunk = shrink(
                with_facts(read_case(self.store.case_path(row.case_file)), Facts(
                    kernel=info.name, version=info.version, tune=self.plan.tune, seed=self.plan.seed,
                    deviations=row.deviations, baseline=self.plan.baseline,
                )),
                flying.handle.spec.name, budget=budget, report=say, out=out, device=self.plan.device,
                time_limit=flying.limit([]),
            )  # fmt: skip
        except (BadInput, CannotRun) as error:
            document = {**row.document, "not_shrunk": str(error)}
            self.store.change_finding(row.signature, document=document)
        else:
            self._take_shrunk(row, shrunk)
        self._reread()

    def _take_shrunk(self, row: FindingRow, shrunk: Shrunk) -> None:
        neighbour = None if shrunk.neighbour is None else self.store.put_case(shrunk.neighbour.case)
        change = "" if shrunk.neighbour is None else shrunk.neighbour.change
        self.store.change_finding(
            row.signature, status="shrunk", shrunk_file=self.store.put_case(shrunk.case),
            neighbour_file=neighbour,
            document={
                **row.document, "shrunk": {
                    "words": shrunk.words, "from": shrunk.start_words, "confirmed": shrunk.confirmed,
                    "neighbour": change, "attempt": _plain(shrunk.attempt), "stopped": shrunk.stopped,
                },
            },
        )  # fmt: skip
        self.tell("shrunk", {"signature": row.signature, "words": shrunk.words})
        if shrunk.stopped == "interrupted":
            raise KeyboardInterrupt

    def rename(self, row: FindingRow, name: Signature, columns: dict[str, Any]) -> str:
        """Give a finding its final signature, all at once; its raw one stays known as an alias."""
        table, digest = self.store.findings_table, name.digest
        with self.store.transaction():
            if digest == row.signature:
                self.store.change_finding(digest, **columns)
            else:
                known = any(r.signature == digest for r in table.all())
                (times,) = self.store.execute(
                    "SELECT times FROM findings WHERE signature = ?", (row.signature,)
                ).fetchone()
                self.store.execute("DELETE FROM findings WHERE signature = ?", (row.signature,))
                if known:
                    table.seen_again(digest, times)
                else:
                    self.store.add_finding(
                        name, columns.pop("document"), times=times, case_file=row.case_file,
                        number=row.number, config=row.config, options=row.options, **columns,
                    )  # fmt: skip
                self.store.execute(
                    "UPDATE aliases SET signature = ? WHERE signature = ?", (digest, row.signature)
                )
                table.add_alias(digest, digest)
        self._reread()
        return digest

    def _reread(self) -> None:
        self._rows = self.store.finding_rows()


def _kernel_of(row: FindingRow | None, kernels: list[Flying]) -> Flying | None:
    if row is None:
        return None
    return next((k for k in kernels if k.subject.info.name == row.kernel and not k.lost), None)


def _plain(attempt: Attempt) -> dict[str, Any]:
    plain: dict[str, Any] = plain_numbers(msgspec.to_builtins(attempt, enc_hook=repr))
    return plain

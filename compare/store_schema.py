"""The run store's tables, their version, and how a store of an older version is brought up to this one.

The idea: `SCHEMA` is what a new store gets; `MIGRATIONS[n]` takes a store from version n to n + 1 and nothing
else is ever changed in place, so a store of any earlier version opens and keeps every row. What the columns
mean is told to people in docs/run-store.md.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from ..capture.errors import BadInput

SCHEMA_VERSION = 2

RUN_AND_RESULTS = """
CREATE TABLE run (
    name TEXT PRIMARY KEY,      -- schema_version, command, parameters, ...
    value TEXT NOT NULL         -- JSON
);
CREATE TABLE results (
    key TEXT PRIMARY KEY,       -- what was run: kernel, case, configuration, how
    kernel TEXT NOT NULL,
    case_name TEXT NOT NULL,
    verdict TEXT NOT NULL,
    seconds REAL NOT NULL,      -- of the kernel
    at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%SZ', 'now')),
    document TEXT NOT NULL      -- the whole result, JSON
);
CREATE TABLE findings (
    signature TEXT PRIMARY KEY, -- 16 hex digits, see Signature
    kernel TEXT NOT NULL,
    version TEXT,
    tier INTEGER,
    class TEXT,                 -- nan, +inf, -inf, wrong, moves, error
    stage TEXT,                 -- tensor or stage of the place
    deviations TEXT NOT NULL,   -- JSON {axis: value}, the minimal set
    place_pattern TEXT NOT NULL,
    times INTEGER NOT NULL DEFAULT 1,
    document TEXT NOT NULL      -- the finding, JSON
);
"""

# Added in version 2: what a fuzz run keeps, and what a finding needs to be shrunk, replayed and merged.
SINCE_2 = """
ALTER TABLE findings ADD COLUMN status TEXT NOT NULL DEFAULT 'confirmed';
ALTER TABLE findings ADD COLUMN case_file TEXT;      -- cases/HASH.safetensors, below the run's directory
ALTER TABLE findings ADD COLUMN number INTEGER;      -- of the fuzz case that showed it first
ALTER TABLE findings ADD COLUMN config TEXT;         -- JSON {axis: value}, every axis
ALTER TABLE findings ADD COLUMN options TEXT;        -- JSON: seed, device, time limit
ALTER TABLE findings ADD COLUMN failures INTEGER;    -- of so many runs in fresh processes
ALTER TABLE findings ADD COLUMN runs INTEGER;
ALTER TABLE findings ADD COLUMN shrunk_file TEXT;    -- cases/HASH.safetensors
ALTER TABLE findings ADD COLUMN neighbour_file TEXT; -- the nearest case that passes
ALTER TABLE findings ADD COLUMN at TEXT;
CREATE TABLE aliases (
    raw TEXT PRIMARY KEY,       -- signature as a case first showed it, before it was reduced
    signature TEXT NOT NULL     -- of the finding that it turned out to be
);
CREATE TABLE cases (
    kernel INTEGER NOT NULL,    -- number of the kernel in the run's parameters
    number INTEGER NOT NULL,    -- of the case, from 0, for each kernel
    verdict TEXT NOT NULL,      -- started (it was running), interrupted, or a verdict
    recipe TEXT NOT NULL,       -- JSON: how to make the case
    seconds REAL,               -- of the kernel
    numbers TEXT,               -- JSON [feedback numbers], see compare/fuzz/feedback.py
    signature TEXT,             -- raw signature where it failed
    PRIMARY KEY (kernel, number)
) WITHOUT ROWID;
CREATE TABLE corpus (
    kernel INTEGER NOT NULL,
    lane INTEGER NOT NULL,      -- number modulo the run's lanes
    number INTEGER NOT NULL,    -- case that raised a maximum
    reason TEXT NOT NULL,       -- which
    recipe TEXT NOT NULL,
    PRIMARY KEY (kernel, lane, number)
) WITHOUT ROWID;
CREATE TABLE maxima (
    kernel INTEGER NOT NULL,
    lane INTEGER NOT NULL,
    bucket TEXT NOT NULL,       -- feature and the region of inputs that it was seen in
    value REAL NOT NULL,
    PRIMARY KEY (kernel, lane, bucket)
) WITHOUT ROWID;
CREATE TABLE windows (
    kernel INTEGER NOT NULL,
    lane INTEGER NOT NULL,
    done INTEGER NOT NULL,      -- windows of numbers whose feedback is in `corpus` and `maxima`
    PRIMARY KEY (kernel, lane)
) WITHOUT ROWID;
CREATE TABLE tallies (
    part TEXT NOT NULL,         -- of a merged run: the run it came from; '' in a run of its own
    name TEXT NOT NULL,         -- cases, seconds.kernel, seconds.truth, axis.split=at-1, verdict.pass, ...
    value REAL NOT NULL,
    PRIMARY KEY (part, name)
) WITHOUT ROWID;
"""

SCHEMA = RUN_AND_RESULTS + SINCE_2
MIGRATIONS = {1: SINCE_2}


def create(connection: sqlite3.Connection) -> None:
    """Make the tables of a new store, in one transaction: a run killed here has none, and starts again."""
    connection.executescript(f"BEGIN; {SCHEMA} {_version(SCHEMA_VERSION)} COMMIT;")


def migrate(connection: sqlite3.Connection, version: int, path: Path) -> None:
    """Bring an older store up to this version, a step and a transaction at a time. Raises BadInput."""
    if version > SCHEMA_VERSION:
        raise BadInput(
            f"{path}: has schema {version}, this gdncheck reads up to {SCHEMA_VERSION}; use a newer gdncheck"
        )
    for step in range(version, SCHEMA_VERSION):
        if step not in MIGRATIONS:
            raise BadInput(f"{path}: has schema {version}, which never was one; choose another --out")
        connection.executescript(f"BEGIN IMMEDIATE; {MIGRATIONS[step]} {_version(step + 1)} COMMIT;")


def _version(number: int) -> str:
    return f"INSERT OR REPLACE INTO run VALUES ('schema_version', '{number}');"

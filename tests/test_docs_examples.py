"""The examples in README.md and docs/ run as printed, in order, in a fresh folder.

A fenced `console` block holds lines `$ command`; one under `<!-- not run: reason -->` is left out. The
exit status must be 0, or one of those in `<!-- exit: 1 -->`: an example with a wrong option fails here.
A `python` block under `<!-- file: NAME -->` is written to NAME first.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])
BLOCK = re.compile(
    r"(?:<!-- (?P<mark>not run|file|exit): ?(?P<note>.*?) -->\n)?"
    r"```(?P<kind>console|python)\n(?P<body>.*?)```",
    re.S,
)
LINKED = ("models", "examples")
SKIPPED_REASON_MIN_LENGTH = 10


def blocks(page: Path) -> list[re.Match[str]]:
    return list(BLOCK.finditer(page.read_text()))


def run_line(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = shlex.split(line)
    assert words[0] == "gdncheck", f"examples run gdncheck only; mark others as not run: {line}"
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "COLUMNS": "100"}
    environment.pop("GDNCHECK_CAPTURES", None)
    return subprocess.run(
        [sys.executable, "-m", "gdncheck.cli", *words[1:]],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_an_example_in_the_docs_does_not_run_as_printed(page, tmp_path):
    for name in LINKED:
        (tmp_path / name).symlink_to(ROOT / name)
    for block in blocks(page):
        mark, note, body = block["mark"], (block["note"] or "").strip(), block["body"]
        if mark == "not run":
            assert len(note) >= SKIPPED_REASON_MIN_LENGTH, f"{page.name}: say why the block is not run"
            continue
        if block["kind"] == "python":
            if mark == "file":
                (tmp_path / note).write_text(body)
            continue
        expected = {int(s) for s in note.split(",")} if mark == "exit" else {0}
        for line in body.splitlines():
            if not line.startswith("$ "):
                continue
            done = run_line(line[2:], tmp_path)
            assert done.returncode in expected, f"{page.name}: {line}\n{done.stdout}\n{done.stderr}"
            assert "Traceback" not in done.stderr, done.stderr

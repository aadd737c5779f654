"""Every command is documented, has an example, and docs/commands.md is what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from gdncheck.cli import cli
from gdncheck.cli.manual import help_of, walk

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = list(walk(cli))


def test_the_manual_in_docs_is_stale_or_edited_by_hand():
    # In a process of its own: click keeps a command's help option as it was first asked for, which another
    # test may have done without our context.
    words = [sys.executable, "-P", "-m", "gdncheck.cli.manual"]
    made = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert (ROOT / "docs" / "commands.md").read_text() == made, "run: make docs"


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[" ".join(path) for path, _ in COMMANDS])
def test_a_command_without_an_example_or_with_an_undescribed_option(path, command):
    text = help_of(path, command)
    assert f"gdncheck {' '.join(path)}" in text.split("\n", 1)[1], f"no example in the help of {path}"
    # Arguments are described by the help text itself.
    undescribed = [p.name for p in command.params if isinstance(p, click.Option) and not p.help]
    assert undescribed == []

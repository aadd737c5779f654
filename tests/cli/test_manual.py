"""Every command is documented, has an example, and docs/commands.md is what the code says."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from gdncheck.cli import cli
from gdncheck.cli.manual import help_of, manual, walk

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = list(walk(cli))


def test_the_manual_in_docs_is_stale_or_edited_by_hand():
    assert (ROOT / "docs" / "commands.md").read_text() == manual(), "run: make docs"


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[" ".join(path) for path, _ in COMMANDS])
def test_a_command_without_an_example_or_with_an_undescribed_option(path, command):
    text = help_of(path, command)
    assert f"gdncheck {' '.join(path)}" in text.split("\n", 1)[1], f"no example in the help of {path}"
    # Arguments are described by the help text itself.
    undescribed = [p.name for p in command.params if isinstance(p, click.Option) and not p.help]
    assert undescribed == []

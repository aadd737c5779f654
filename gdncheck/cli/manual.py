"""The manual of the commands, made from the commands themselves: docs/commands.md.

`python -m gdncheck.cli.manual` prints it; `make docs` writes it; a test holds the file to the code, so a
command, an option or an example cannot go undocumented.
"""

from __future__ import annotations

from collections.abc import Iterator

import click

from gdncheck.cli import CONTEXT, cli

HEADER = """# Commands

Made from the commands' own help by `make docs`; do not edit. Exit status everywhere: 0 all pass, suspect
or skipped; 1 something failed, errored, timed out or is out of contract; 2 bad input or usage; 3 nothing
could run; 130 interrupted.
"""
WIDTH = 100


def walk(group: click.Group, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command below a group with the words that call it, in the order of the help."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        path = (*prefix, name)
        if isinstance(command, click.Group):
            yield from walk(command, path)
        else:
            yield path, command


def help_of(path: tuple[str, ...], command: click.Command) -> str:
    """The help text as `gdncheck PATH --help` prints it, at a fixed width."""
    context = click.Context(
        command,
        info_name=" ".join(("gdncheck", *path)),
        terminal_width=WIDTH,
        max_content_width=WIDTH,
        help_option_names=CONTEXT["help_option_names"],
    )
    return command.get_help(context)


def manual() -> str:
    """The whole of docs/commands.md."""
    parts = [HEADER]
    for path, command in walk(cli):
        parts.append(f"\n## gdncheck {' '.join(path)}\n\n```text\n{help_of(path, command).rstrip()}\n```\n")
    return "".join(parts)


if __name__ == "__main__":
    print(manual(), end="")

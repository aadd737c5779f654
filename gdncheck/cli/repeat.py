"""The command that repeats a run: the last words of every command's last line."""

from __future__ import annotations

import shlex

import click


def command_line(context: click.Context) -> str:
    """`gdncheck diff --layer 17`: every argument, and every option that is not at its default."""
    words = context.command_path.split()
    for parameter in context.command.params:
        # An option that no command is handed (--source) leaves its words in `meta`.
        value = context.params.get(parameter.name or "", context.meta.get(f"gdncheck.{parameter.name}"))
        several = parameter.multiple if isinstance(parameter, click.Option) else parameter.nargs != 1
        values = [] if value is None else list(value) if several else [value]
        if isinstance(parameter, click.Argument):
            words += [str(one) for one in values]
        elif values and value != parameter.get_default(context):
            off = parameter.secondary_opts if value is False else []  # --busy/--no-busy
            flag = max(off or parameter.opts, key=len)
            for one in values:
                words += [flag] if parameter.is_flag else [flag, str(one)]  # type: ignore[attr-defined]
    return shlex.join(words)

"""The command line: one light group; a command's module is imported only when help or a run needs it.

Bad input ends in one line on stderr and the exit status of its error class; a bug keeps its traceback.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import click

from gdncheck.capture.errors import GdncheckError

# Command -> "module:attribute". Modules import heavy libraries inside functions only.
COMMANDS = {
    "capture": "gdncheck.cli.capture:capture",
    "decode": "gdncheck.cli.decode:decode",
    "diff": "gdncheck.cli.diff:diff",
    "doctor": "gdncheck.cli.doctor:doctor",
    "fuzz": "gdncheck.cli.fuzz:fuzz",
    "export": "gdncheck.cli.export:export",
    "inspect": "gdncheck.cli.inspect:inspect",
    "kernels": "gdncheck.cli.kernels:kernels",
    "life": "gdncheck.cli.life:life",
    "make": "gdncheck.cli.make:make",
    "merge": "gdncheck.cli.merge:merge",
    "repeat": "gdncheck.cli.repeat_runs:repeat",
    "replay": "gdncheck.cli.replay:replay",
    "sanitize": "gdncheck.cli.sanitize:sanitize",
    "selftest": "gdncheck.cli.selftest:selftest",
    "shrink": "gdncheck.cli.shrink:shrink",
    "sweep": "gdncheck.cli.sweep:sweep",
}


class LazyGroup(click.Group):
    """A group that finds its commands in COMMANDS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name].split(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command


CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(cls=LazyGroup, context_settings=CONTEXT)
@click.version_option(package_name="gdncheck", prog_name="gdncheck")
def cli() -> None:
    """Find the first configuration in which a Gated DeltaNet kernel gives a non-finite or wrong state.

    Example: gdncheck diff --layer 17
    """


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit with the statuses of the design: 0, 1, 2, 3 or 130."""
    try:
        status = cli.main(args=argv, prog_name="gdncheck", standalone_mode=False)
    except GdncheckError as error:
        click.echo(f"gdncheck: {error}", err=True)
        sys.exit(error.exit_status)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("gdncheck: interrupted", err=True)
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)

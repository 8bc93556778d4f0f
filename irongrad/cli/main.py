"""The `irongrad` command: finds the verbs, and turns errors into messages and exit codes."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from keyword import iskeyword

import click

from irongrad import compiler_missing
from irongrad.runtime.errors import IronGradError, UserError

VERBS = (
    "compile",
    "import",
    "check",
    "train",
    "run",
    "inspect",
    "verify",
    "golden",
    "rebuild",
    "passes",
    "opt",
    "bisect",
    "cache",
    "targets",
    "cmake-dir",
)


class _Verbs(click.Group):
    """Imports a verb when it is used: `irongrad train` never imports torch."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        module = f"{name}_" if iskeyword(name) else name.replace("-", "_")
        command: click.Command = import_module(f"irongrad.cli.{module}").command
        return command


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="irongrad")
def cli() -> None:
    """Compile PyTorch training steps ahead of time, and run them without PyTorch.

    \b
    Example:
      irongrad compile examples/digits.py:make_step -o build/digits
      irongrad train build/digits --data digits.npz --epochs 10 --checkpoint digits.safetensors
    """


def main() -> None:
    """Run the command line; exits with the error class's code (see `irongrad.runtime.errors`)."""
    try:
        cli(standalone_mode=True)
    except IronGradError as error:
        _report(error)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        missing = compiler_missing("this command", error)
        if missing is None:
            raise
        _report(missing)
        sys.exit(UserError.exit_code)


def _report(error: Exception) -> None:
    if "--json" in sys.argv:
        print(json.dumps({"error": {"class": type(error).__name__, "message": str(error)}}))
    else:
        from rich.console import Console
        from rich.markup import escape

        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)

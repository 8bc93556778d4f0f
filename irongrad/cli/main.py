"""The `irongrad` command: finds the verbs, and turns errors into messages and exit codes."""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from keyword import iskeyword
from types import FrameType
from typing import Any

import click

from irongrad import compiler_missing
from irongrad.runtime.errors import IronGradError, UserError

VERBS = (
    "compile",
    "import",
    "check",
    "train",
    "plan",
    "place",
    "run",
    "export",
    "inspect",
    "analyze",
    "machine",
    "profile",
    "report",
    "compare",
    "verify",
    "golden",
    "rebuild",
    "sign",
    "passes",
    "opt",
    "bisect",
    "cache",
    "targets",
    "cmake-dir",
)


# PyTorch reads it when it allocates its first tensor: whether tensors of over 2 MB lie on large pages. Verifying GPT-2
# 124M touches 13 GB for the first time, and Linux clears them page by page. Compiling it takes 0.94 of the time.
_LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"


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
    os.environ.setdefault(_LARGE_PAGES, "1")
    with _noted_interrupts() as interrupts, _plain_warnings():
        try:
            code = cli.main(standalone_mode=False)
            sys.exit(code if isinstance(code, int) else 0)
        except click.Abort:
            click.echo("Aborted!", err=True)
            sys.exit(1)
        except click.ClickException as error:
            if "--json" in sys.argv:
                _report(UserError(error.format_message()))
            else:
                error.show()
            sys.exit(error.exit_code)
        except IronGradError as error:
            if str(error):  # another rank says it
                _report(error)
            sys.exit(error.exit_code)
        except Exception as error:
            # An interrupt inside an import or a callback of a library comes out as another error: a RecursionError of
            # numpy, for one.
            if interrupts:
                click.echo("Aborted!", err=True)
                sys.exit(1)
            known = _as_user_error(error)
            if known is None:
                raise
            _report(known)
            sys.exit(UserError.exit_code)


def _as_user_error(error: Exception) -> UserError | None:
    """The error in words, if the user can do something about it; None for a bug."""
    if isinstance(error, ModuleNotFoundError):
        missing = compiler_missing("this command", error)
        return UserError(str(missing)) if missing else None
    if isinstance(error, OSError) and error.strerror:  # a full disk, a directory that cannot be written
        about = f": {error.filename}" if error.filename is not None else ""
        return UserError(f"{error.strerror}{about}")
    return None


@contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """Yield a list that gets an entry for every Ctrl-C."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield noted
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show warnings for the user as one line, without the place in our code."""
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any) -> None:
        if issubclass(category, UserWarning):
            sys.stderr.write(f"warning: {message}\n")
        else:
            usual(message, category, *place)

    warnings.showwarning = show  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.showwarning = usual


def _report(error: IronGradError) -> None:
    if "--json" in sys.argv:
        print(json.dumps({"error": error.described()}))
    else:
        from rich.markup import escape

        from irongrad.cli.common import error_console

        said = f"[bold red]error:[/] {escape(str(error))}\n[dim]see {error.section}[/]"
        error_console.print(said, markup=True, soft_wrap=True, highlight=False)

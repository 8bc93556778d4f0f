"""Options and output that several verbs share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from unicodedata import category

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from irongrad.pipeline.choices import Choice, declared
from irongrad.runtime.atomic_files import check_writable
from irongrad.runtime.errors import GuardError, UserError
from irongrad.runtime.report import WHY_UNJUDGED

if TYPE_CHECKING:
    import numpy as np

Command = TypeVar("Command", bound=Callable[..., Any])

_SHOWN = 10


class _PlainConsole(Console):
    """A console that shows control characters of names and messages, and never sends them to the terminal.

    Text that comes from a model or a file could otherwise move the cursor, set the title or hide what stands before it.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as Rich does, with controls of its own only."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=_visible(segment.text))


def _visible(text: str) -> str:
    """`text` with its control and formatting characters as Python writes them, but for tabs and line breaks."""
    if text.isprintable():
        return text
    return "".join(c if c in "\t\n" or category(c) not in _INVISIBLE else ascii(c)[1:-1] for c in text)


# Control characters, those that change the direction of text, and halves of surrogate pairs.
_INVISIBLE = ("Cc", "Cf", "Cs")

# Names, paths and messages may hold brackets, so text is no markup unless a call asks for it.
console = _PlainConsole(markup=False)
error_console = _PlainConsole(stderr=True, markup=False)

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, for scripts.")
device_option = click.option("--device", help="IREE device URI, such as local-task, cuda or vulkan.")
precision_option = click.option(
    "--precision",
    type=click.Choice(["f32", "bf16", "f16"]),
    help="Run the model under autocast; f16 with a dynamic loss scale. The step's own otherwise.",
)
fallback_option = click.option(
    "--bucket-fallback",
    type=click.Choice(["dynamic"]),
    help="A function of any size beside the buckets, for calls that fit into none of them.",
)
step_argument = click.argument("source", metavar="FILE:FUNCTION")
step_option = click.option("--step", "step_name", metavar="NAME", help="Which of several steps over one state.")
targets_option = click.option(
    "--target", "targets", multiple=True, default=["llvm-cpu"], show_default=True, help="What to compile for."
)
base_option = click.option(
    "--base",
    type=click.Path(path_type=Path),
    help="Where the artifact's base file is, if not where it was when the artifact was compiled.",
)
directory_argument = click.argument("directory", type=click.Path(path_type=Path))
trusted_option = click.option(
    "--trusted",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A public key (PEM, Ed25519); one of them must have signed the artifact. Repeatable.",
)
target_option = click.option("--target", help="Which of the artifact's targets; by default one that fits the device.")


_FORMS: dict[str, Callable[[Choice], dict[str, Any]]] = {
    "count": lambda choice: {"type": click.IntRange(0, choice.most), "show_default": True},
    "text": lambda choice: {"show_default": bool(choice.default)},
    "texts": lambda choice: {"multiple": True},
    "switch": lambda choice: {"is_flag": True},
    "path": lambda choice: {"type": click.Path(path_type=Path)},
}


def choice_options(*names: str) -> Callable[[Command], Command]:
    """Flags for choices of `irongrad.pipeline.choices`, in order; the command takes them as `**choices`."""

    def decorate(command: Command) -> Command:
        for name in reversed(names):
            choice = declared()[name]
            settings = {"default": choice.default, "help": choice.help, "metavar": choice.metavar}
            command = click.option(*choice.flag, **(settings | _FORMS[choice.form](choice)))(command)
        return command

    return decorate


def given_choices(choices: Mapping[str, Any]) -> dict[str, Any]:
    """The choices that the user gave as flags; a repeatable flag without a value is left out, for its default."""
    return {name: value for name, value in choices.items() if value != ()}


def print_json(value: Any) -> None:
    """Print `value` as one JSON document (RFC 8259); a number that is NaN or infinite becomes null."""
    print(json.dumps(_plain(value), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    """`value` in the types that JSON has; arrays by attribute, because numpy is not imported here."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return value if isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def print_unjudged(names: Sequence[str]) -> None:
    """Say which values a verification cannot judge, and why; nothing if it judges all."""
    if names:
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        text = f"cannot be judged: {len(names)} values, because {WHY_UNJUDGED}: {shown}"
        console.print(text, style="yellow", highlight=False, soft_wrap=True)


def pairs(items: tuple[str, ...], option: str) -> dict[str, str]:
    """Split `name=value` options.

    Raises:
        UserError: an item has no `=`.
    """
    result: dict[str, str] = {}
    for item in items:
        name, separator, value = item.partition("=")
        if not separator:
            raise UserError(f"{option} {item!r} is not NAME=VALUE")
        result[name] = value
    return result


def numbers(items: tuple[str, ...], option: str) -> dict[str, float]:
    """Split `name=number` options.

    Raises:
        UserError: a value is not a number.
    """
    try:
        return {n: float(v) for n, v in pairs(items, option).items()}
    except ValueError as error:
        raise UserError(f"{option}: {error}") from None


def refuse_unwritable(path: Path, option: str) -> None:
    """Refuse a file that cannot be written, before any work for it.

    Raises:
        UserError: gives the system's reason.
    """
    try:
        check_writable(path)
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written: {error.strerror or error}") from None


def load_npy(name: str, path: str) -> np.ndarray[Any, Any]:
    """Read one .npy file.

    Raises:
        GuardError: the file cannot be read; the message names the input.
    """
    from irongrad.training.numpy_files import read_npy  # numpy is not imported for every verb

    try:
        return read_npy(Path(path))
    except GuardError as error:
        raise GuardError(f"the file for input {name!r}: {error}") from None

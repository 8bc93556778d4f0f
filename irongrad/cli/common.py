"""Options and output that several verbs share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from irongrad.runtime.errors import GuardError, UserError

if TYPE_CHECKING:
    import numpy as np

console = Console()
error_console = Console(stderr=True)

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
    help="A function of any size beside the buckets, for calls that none of them holds.",
)
directory_argument = click.argument("directory", type=click.Path(path_type=Path))
target_option = click.option("--target", help="Which of the artifact's targets; one for the device by default.")


def pass_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What chooses the passes: `opt_level`, `passes`, `disable_passes`, `max_memory`, `tune` and `route`."""
    options = [
        click.option(
            "--opt-level", type=click.IntRange(0, 3), default=2, show_default=True, help="How much to optimise."
        ),
        click.option("--passes", metavar="NAME,NAME{OPTION=VALUE},…", help="Exactly these passes, not the level's."),
        click.option("--disable-pass", "disable_passes", metavar="NAME", multiple=True, help="Leave a pass out."),
        click.option(
            "--max-memory", default="", metavar="SIZE", help="Have a step fit, say into 512MiB, or 50% of its memory."
        ),
        click.option("--tune", is_flag=True, help="Choose the forms of convolutions by measurement on this machine."),
        click.option("--route", default="linalg", show_default=True, help="To linalg directly, or over stablehlo."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def print_json(value: Any) -> None:
    """Print `value` as one JSON document."""
    print(json.dumps(value, indent=2, default=_plain))


def _plain(value: Any) -> Any:
    # numpy's arrays and scalars, without importing it
    return value.tolist() if hasattr(value, "tolist") else str(value)


def pairs(items: tuple[str, ...], option: str) -> dict[str, str]:
    """Split `name=value` options.

    Raises:
        UserError: one has no `=`.
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
        UserError: one is no number.
    """
    try:
        return {n: float(v) for n, v in pairs(items, option).items()}
    except ValueError as error:
        raise UserError(f"{option}: {error}") from None


def load_npy(name: str, path: str) -> np.ndarray[Any, Any]:
    """Read one .npy file.

    Raises:
        GuardError: it cannot be read, naming the input.
    """
    import numpy as np

    try:
        return np.asarray(np.load(path, allow_pickle=False))
    except (OSError, ValueError) as error:
        raise GuardError(f"the file for input {name!r} cannot be read: {error}") from None

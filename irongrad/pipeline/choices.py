"""What a user chooses of a compilation, declared once: `irongrad.compile` takes it by name, the command line as flags.

The command line reads this file to make its flags, so it imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypedDict, cast, get_type_hints


@dataclass(frozen=True)
class Choice:
    """One thing to choose.

    Attributes:
        default: what holds if nothing is chosen.
        help: what it does, as `--help` says it.
        flag: its flags on the command line, as click takes them.
        form: how the flag reads its value: `count` up to `most`, `text`, `texts` for a repeatable flag, `switch`, or
            `path`.
        metavar: what stands for the value in `--help`.
        most: the largest count.
    """

    default: Any
    help: str
    flag: tuple[str, ...]
    form: str = "text"
    metavar: str | None = None
    most: int = 0


class Choices(TypedDict, total=False):
    """What `irongrad.compile` takes by name."""

    opt_level: Annotated[int, Choice(2, "How much to optimise, 0 to 3.", ("--opt-level",), "count", most=3)]
    passes: Annotated[
        str | None,
        Choice(None, "Exactly these passes, not the level's.", ("--passes",), metavar="NAME,NAME{OPTION=VALUE},…"),
    ]
    disable_passes: Annotated[
        Sequence[str],
        Choice((), "Leave a pass out; repeatable.", ("--disable-pass", "disable_passes"), "texts", "NAME"),
    ]
    max_memory: Annotated[
        str,
        Choice("", "Have a step fit, say into 512MiB, or 50% of its memory.", ("--max-memory",), metavar="SIZE"),
    ]
    tune: Annotated[
        bool, Choice(False, "Choose the forms of convolutions by measurement on this machine.", ("--tune",), "switch")
    ]
    route: Annotated[str, Choice("linalg", "To linalg directly, or over stablehlo.", ("--route",))]
    entry_points: Annotated[
        Sequence[str] | None,
        Choice(None, "Include only these entry points; repeatable.", ("--entry-point", "entry_points"), "texts"),
    ]
    dump_dir: Annotated[
        str | os.PathLike[str] | None, Choice(None, "Write every stage's readable form here.", ("--dump-dir",), "path")
    ]
    cache: Annotated[
        bool, Choice(True, "Take what was compiled before from the cache on disk.", ("--cache/--no-cache",), "switch")
    ]


# What chooses the passes.
OF_PASSES = ("opt_level", "passes", "disable_passes", "max_memory", "tune", "route")


@cache
def declared() -> Mapping[str, Choice]:
    """Every choice, by name."""
    hints = get_type_hints(Choices, include_extras=True)
    return {name: next(m for m in hint.__metadata__ if isinstance(m, Choice)) for name, hint in hints.items()}


def completed(choices: Choices) -> Choices:
    """`choices` with the defaults of all others.

    Raises:
        TypeError: there is no such choice.
    """
    if unknown := choices.keys() - declared().keys():
        raise TypeError(f"compile() got an unexpected keyword argument {min(unknown)!r}")
    defaults = {name: choice.default for name, choice in declared().items()}
    return cast(Choices, defaults | dict(choices))

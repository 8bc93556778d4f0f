"""The choices of a compilation, declared once: keyword arguments of `irongrad.compile`, flags on the command line.

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
    """One choice.

    Attributes:
        default: the value if the user does not choose.
        help: the effect, as `--help` shows it.
        flag: the flags on the command line, in click's syntax.
        form: how the flag reads its value: `count` up to `most`, `text`, `texts` for a repeatable flag, `switch`, or
            `path`.
        metavar: the placeholder for the value in `--help`.
        most: the largest count.
    """

    default: Any
    help: str
    flag: tuple[str, ...]
    form: str = "text"
    metavar: str | None = None
    most: int = 0


class Choices(TypedDict, total=False):
    """The keyword arguments of `irongrad.compile`."""

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
        Choice(
            "",
            "Memory budget of a step: a size such as 512MiB, or a share such as 50%.",
            ("--max-memory",),
            metavar="SIZE",
        ),
    ]
    tune: Annotated[
        bool,
        Choice(
            False,
            "Choose the forms of products, convolutions and attention by measurement on this machine.",
            ("--tune",),
            "switch",
        ),
    ]
    tune_seconds: Annotated[
        int,
        Choice(60, "With --tune, how long to measure in seconds.", ("--tune-seconds",), "count", most=86_400),
    ]
    communicate: Annotated[
        bool,
        Choice(
            False, "Exchange gradients between ranks inside the step, if ranks are there.", ("--communicate",), "switch"
        ),
    ]
    bucket_size: Annotated[
        str,
        Choice("25MiB", "The most that ranks exchange at once.", ("--bucket-size",), metavar="SIZE"),
    ]
    shard: Annotated[
        str,
        Choice(
            "",
            "With --communicate, divide this among ranks: optimizer, for its state.",
            ("--shard",),
            metavar="WHAT",
        ),
    ]
    sync_batch_norm: Annotated[
        bool,
        Choice(
            False,
            "With --communicate, BatchNorm takes the statistics of all ranks' batches.",
            ("--sync-batch-norm",),
            "switch",
        ),
    ]
    place: Annotated[
        Mapping[str, str] | Sequence[str],
        Choice((), "Run this module on a target of its own; repeatable.", ("--place",), "texts", "MODULE=TARGET,…"),
    ]
    route: Annotated[str, Choice("linalg", "How to reach linalg: directly, or over stablehlo.", ("--route",))]
    entry_points: Annotated[
        Sequence[str] | None,
        Choice(None, "Include only these entry points; repeatable.", ("--entry-point", "entry_points"), "texts"),
    ]
    base: Annotated[
        str | os.PathLike[str] | None,
        Choice(
            None,
            "Keep frozen tensors in this .irpa, which artifacts share, or the model's own .safetensors or .gguf.",
            ("--base",),
            "path",
        ),
    ]
    dump_dir: Annotated[
        str | os.PathLike[str] | None, Choice(None, "Write every stage's readable form here.", ("--dump-dir",), "path")
    ]
    cache: Annotated[
        bool, Choice(True, "Take what was compiled before from the cache on disk.", ("--cache/--no-cache",), "switch")
    ]


# The choices that determine the passes.
OF_PASSES = ("opt_level", "passes", "disable_passes", "max_memory", "tune", "tune_seconds", "route")


@cache
def declared() -> Mapping[str, Choice]:
    """Every choice, by name."""
    hints = get_type_hints(Choices, include_extras=True)
    return {name: next(m for m in hint.__metadata__ if isinstance(m, Choice)) for name, hint in hints.items()}


def completed(choices: Choices) -> Choices:
    """Add the defaults of all choices that `choices` leaves out.

    Raises:
        TypeError: a choice does not exist.
    """
    if unknown := choices.keys() - declared().keys():
        raise TypeError(f"compile() got an unexpected keyword argument {min(unknown)!r}")
    defaults = {name: choice.default for name, choice in declared().items()}
    return cast(Choices, defaults | dict(choices))

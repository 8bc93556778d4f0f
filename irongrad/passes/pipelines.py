"""The passes of each `--opt-level`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from irongrad.passes.base import Pass
from irongrad.passes.graph.convolutions import Convolutions
from irongrad.passes.graph.rematerialise import Rematerialise
from irongrad.passes.registry import parse_passes, without
from irongrad.runtime.errors import UserError

DEFAULT_LEVEL = 2

# 0: the captured graph. 1: clean-up. 2: every pass that measurably pays off. 3: also passes that cost compile time.
LEVELS = {
    0: "",
    1: "fold,simplify,cse",
    2: "fold,simplify,cse,table-products,convolutions{least_gain=3.5},layout,cse,dce,row-blocks,cse,dce,"
    "multi-tensor,gradient-norm,half-products,recompute-dequantised,dce",
    3: "fold,simplify,cse,table-products,convolutions,layout,cse,dce,row-blocks,cse,dce,"
    "multi-tensor,gradient-norm,half-products,interleave,recompute-dequantised,dce",
}


def passes_at(level: int, route: str = "linalg") -> tuple[Pass, ...]:
    """The passes of an optimisation level, in order.

    IREE 3.13.0 converts a StableHLO convolution to channels-last with a transpose before and after it. The transposes
    cost several times as much as the convolution (docs/builds.md), so on the StableHLO route every convolution is
    rewritten as a product.

    Raises:
        UserError: the level does not exist.
    """
    if level not in LEVELS:
        raise UserError(f"there is no optimisation level {level}; the levels are {', '.join(map(str, LEVELS))}")
    passes = parse_passes(LEVELS[level])
    if route != "stablehlo":
        return passes
    return tuple(replace(p, direct=False, windowed=False) if isinstance(p, Convolutions) else p for p in passes)


def chosen_passes(
    level: int = DEFAULT_LEVEL,
    passes: str | None = None,
    disabled: Sequence[str] = (),
    max_memory: str = "",
    route: str = "linalg",
) -> tuple[Pass, ...]:
    """The passes that a caller asks for, in order.

    Args:
        level: the optimisation level.
        passes: exactly these passes instead of the level's, in the syntax of `parse_passes`.
        disabled: names of passes to leave out.
        max_memory: the memory budget, such as `512MiB` or `50%`; empty for none. `rematerialise` enforces it, as the
            last pass.
        route: how PyTorch's operators become linalg: `linalg` (directly) or `stablehlo`.

    Raises:
        UserError: a level or pass does not exist, the budget is not a size, or the pass that enforces it is disabled.
    """
    if max_memory and Rematerialise.name in disabled:
        raise UserError(
            f"max_memory is met by the pass {Rematerialise.name}, which is disabled: leave out one of the two"
        )
    chosen = without(passes_at(level, route) if passes is None else parse_passes(passes), disabled)
    return (*chosen, Rematerialise(max_memory)) if max_memory else chosen

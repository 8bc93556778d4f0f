"""Which passes run at which `--opt-level`."""

from __future__ import annotations

from irongrad.passes.base import Pass
from irongrad.passes.registry import parse_passes
from irongrad.runtime.errors import UserError

DEFAULT_LEVEL = 2

# 0: what was captured. 1: clean-up. 2: all that is measured to pay. 3: also what costs compile time.
LEVELS = {
    0: "",
    1: "fold,simplify,cse",
    2: "fold,simplify,cse,convolutions,layout,cse,dce,multi-tensor,gradient-norm,half-products,dce",
    3: "fold,simplify,cse,convolutions,layout,cse,dce,multi-tensor,gradient-norm,half-products,interleave,dce",
}


def passes_at(level: int, route: str = "linalg") -> tuple[Pass, ...]:
    """The passes of an optimisation level, in order.

    IREE 3.13.0 takes a StableHLO convolution to channels-last with a transpose before and behind it, which costs
    several times what the convolution does (docs/builds.md), so on that route none is left one.

    Raises:
        UserError: there is no such level.
    """
    if level not in LEVELS:
        raise UserError(f"there is no optimisation level {level}; the levels are {', '.join(map(str, LEVELS))}")
    text = LEVELS[level]
    return parse_passes(text.replace("convolutions", "convolutions{direct=false}") if route == "stablehlo" else text)

"""What the forms of a convolution cost on one core of a CPU with AVX-512, in nanoseconds.

Measured with IREE 3.13.0 on a core of a Zen 4 that reaches 95 GFLOP/s in large products of matrices, over the four
stages of ResNet-18 for CIFAR at batch 8, with stride 1 and 2, and of the first with groups and dilation; only the
ratios matter. Of the convolutions of that ResNet-18 they say 293 ms; its whole step takes 310.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from irongrad.passes.graph.convolutions.problem import Kind, Problem

FLOP = 0.0105  # of a product of matrices
DIRECT_FLOP = 0.0125  # of a convolution lowered by IREE, which vectorises along the width of the output
DIRECT_STRIDED = 4.5  # how much slower that is where outputs that lie side by side meet inputs that do not
DIRECT_ROW = 45.0  # the same where the output is one row, as in one dimension: IREE does not vectorise that
DIRECT_VECTOR = 8  # how many outputs of a row it computes at once
DIRECT_WEIGHT_FLOP = 0.0125  # of the plain gradient of a weight
TRANSFORMED = 1.1  # a number that Winograd's transforms write, their reading and the packing for a product included
TRANSFORMED_FILTER = 2.2  # the same of the filters and of their gradients, whose reading or writing jumps
TRANSFORMED_WEIGHT = 0.5  # the same of images in the gradient of a weight
TRANSFORMS = 300_000.0  # what the transforms of small images cost beside all that: ten kernels, and their short loops
GATHERED = 1.2  # a number that is copied to where a product reads it
GATHERED_APART = 2.5  # the same with the places of the kernel innermost
SCATTERED = 1.5  # a number of a product that is added up somewhere
DIRECT_DILATED = 40.0  # as DIRECT_STRIDED, where the places of the kernel lie apart
DIRECT_GROUPED_FLOP: dict[Kind, float] = {"forward": 0.5, "input": 0.5, "weight": 0.07}
DIRECT_DEPTHWISE_FLOP: dict[Kind, float] = {"forward": 0.26, "input": 0.26, "weight": 4.0}
DEPTHWISE: dict[Kind, float] = {"forward": 0.7, "input": 1.1, "weight": 0.32}  # a multiplication and an addition
DISPATCH = 5_000.0  # a call of one kernel
_TILE = 16  # data tiling pads the sides of every product of matrices to multiples of it


def direct(problem: Problem) -> float:
    """As IREE lowers it; the plain gradient of a weight is a product for each row of the kernel."""
    window = problem.window
    outputs = window.sizes if problem.kind == "input" else window.out
    flops = 2 * problem.positions(outputs) * math.prod(problem.channels) * math.prod(window.kernel) / problem.groups
    if problem.groups > 1:
        per_flop = DIRECT_DEPTHWISE_FLOP if problem.is_depthwise else DIRECT_GROUPED_FLOP
        return flops * per_flop[problem.kind] + 2 * DISPATCH
    if problem.kind == "weight":
        gathered = problem.positions(window.out) * problem.channels[0] * math.prod(window.kernel)
        return flops * DIRECT_WEIGHT_FLOP + gathered * GATHERED + 4 * window.kernel[0] * DISPATCH
    slower = DIRECT_STRIDED if problem.kind == "forward" and max(window.stride) > 1 else 1.0
    slower = DIRECT_DILATED if max(window.dilation) > 1 else slower
    slower = DIRECT_ROW if outputs[0] == 1 else slower
    return flops * DIRECT_FLOP * slower * max(1.0, DIRECT_VECTOR / outputs[1]) + 2 * DISPATCH


def winograd(problem: Problem) -> float:
    """The 16 products, and what the transforms write: at every place, and the result."""
    inner, outer = problem.channels
    out = problem.window.sizes if problem.kind == "input" else problem.window.out
    tiles = problem.positions([(size + 1) // 2 for size in out])
    of_all = 16 * _product((tiles, inner, outer)) + 16 * inner * outer * TRANSFORMED_FILTER + TRANSFORMS
    if problem.kind == "weight":
        return of_all + 16 * tiles * (inner + outer) * TRANSFORMED_WEIGHT
    read, written = (outer, inner) if problem.kind == "input" else (inner, outer)
    return of_all + (16 * tiles * read + 4 * tiles * written) * TRANSFORMED


def gathered(problem: Problem) -> float:
    """One product, and the copies of its operands."""
    positions, places, (inner, outer) = _sides(problem)
    copied = (positions * inner if places > 1 else 0) + inner * outer
    return _product((positions, places * inner, outer)) + places * copied * GATHERED + (places + 3) * DISPATCH


def gathered_apart(problem: Problem) -> float:
    """The same for the gradient of a weight."""
    positions, places, (inner, outer) = _sides(problem)
    copied = positions * places * inner * (GATHERED_APART if places > 1 else 0.0)
    return _product((outer, positions, places * inner)) + copied + (places + 3) * DISPATCH


def by_row(problem: Problem) -> float:
    """The gradient of a weight as a product for each row of the kernel."""
    positions, places, (inner, outer) = _sides(problem)
    rows = len(problem.window.taps_along(0))
    copied = (positions * inner if places > 1 else 0) + inner * outer
    products = rows * _product((outer, positions, places // rows * inner))
    return products + places * copied * GATHERED / 2 + (places + 2 * rows + 2) * DISPATCH


def scattered(problem: Problem) -> float:
    """One product, and a sum of what it writes."""
    positions, places, (inner, outer) = _sides(problem)
    moved = positions * inner * (SCATTERED if places > 1 else 0.0) + inner * outer * GATHERED
    phases = math.prod(problem.window.stride)
    return _product((positions, outer, places * inner)) + places * moved + (phases + 3) * DISPATCH


def depthwise(problem: Problem) -> float:
    """A multiplication and an addition at every place."""
    positions, places, (inner, _) = _sides(problem)
    return positions * places * inner * DEPTHWISE[problem.kind] + (places + 2) * DISPATCH


def _sides(problem: Problem) -> tuple[int, int, tuple[int, int]]:
    return problem.positions(problem.window.out), len(problem.window.taps()), problem.channels


def _product(sides: Sequence[int]) -> float:
    return 2 * FLOP * math.prod(-(-side // _TILE) * _TILE for side in sides)

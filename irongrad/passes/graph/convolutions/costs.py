"""The cost of each convolution form on one core of a CPU with AVX-512, in nanoseconds.

Measured with IREE 3.13.0 on one core of a Zen 4 that reaches 95 GFLOP/s in large matrix products. The convolutions are
those of the four stages of ResNet-18 for CIFAR at batch 8, with stride 1 and 2. Those of the first stage were also
measured with groups and dilation. Only the ratios matter.

The costs of `direct` are from a Zen 5, relative to products by kernels of ours (`passes/module/matmul_kernels`): 75
convolutions and gradients of 30 layers, of 1 to 512 channels, 1x1 to 9x9 kernels and batches of 1 to 64. The forms that
the table chooses there take 1.03 of the fastest forms' time at the geometric mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from irongrad.memory_model.product_tiles import BACKWARDS
from irongrad.passes.graph.convolutions.problem import Halves, Kind, Problem

FLOP = 0.0105  # one operation of a matrix product
HALF_FLOP = {Halves.TILES: 0.0035, Halves.VECTORS: 0.006}  # the same of bfloat16, and of copying its operands
HALF_WINDOWED_FLOP = {Halves.TILES: 0.0012, Halves.VECTORS: 0.006}  # the same of windows that kernels of ours read
DIRECT_FLOP = 0.03  # one operation of a convolution as IREE lowers it, vectorised along the output's width
DIRECT_OUTPUT = 8.0  # one output of it, where its operations are few
DIRECT_FEW = 4.0  # slowdown of `direct` if there are fewer output channels than it computes at once
DIRECT_STRIDED = 4.0  # slowdown of `direct` if adjacent outputs read inputs that are not adjacent
DIRECT_ROW = 12.0  # slowdown if the output or the kernel is one row, as in 1-D: IREE does not vectorise it
DIRECT_VECTOR = 8  # outputs of a row that `direct` computes at once
DIRECT_WEIGHT_FLOP = 0.0125  # one operation of the direct weight gradient
TRANSFORMED = 1.1  # one element that a Winograd transform writes, including its reads and the packing for a product
TRANSFORMED_FILTER = 2.2  # the same for filters and their gradients, whose reads or writes are strided
TRANSFORMED_WEIGHT = 0.5  # the same for images in a weight gradient
TRANSFORMS = 300_000.0  # fixed cost of the transforms: ten kernels, and short loops for small images
GATHERED = 1.2  # one element copied to where a product reads it
GATHERED_APART = 2.5  # the same with the kernel taps innermost
SCATTERED = 1.5  # one element of a product that is added to the result
DIRECT_DILATED = 40.0  # as DIRECT_STRIDED, for a dilated kernel
DIRECT_GROUPED_FLOP: dict[Kind, float] = {"forward": 0.5, "input": 0.5, "weight": 1.5}
DIRECT_DEPTHWISE_FLOP: dict[Kind, float] = {"forward": 0.26, "input": 0.26, "weight": 4.0}
DEPTHWISE: dict[Kind, float] = {"forward": 0.7, "input": 1.1, "weight": 0.32}  # one multiplication and one addition
FILTERED = 0.03  # one multiplication and one addition in a kernel of ours
PADDED = 0.6  # one element of an image that is copied to where it is padded
FLIPPED = 2.6  # one element of a weight that is flipped, and copied to where a product reads it
HALF_MOVED = 0.6  # the time that moving numbers of bfloat16 takes, of that of float32
VECTOR = 16  # the numbers of a vector
DISPATCH = 5_000.0  # one kernel launch
_TILE = 16  # data tiling pads every dimension of a matrix product to a multiple of this


def direct(problem: Problem) -> float:
    """Return the cost of `direct`; its weight gradient is one product for each row of the kernel."""
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
    slower = DIRECT_ROW if 1 in (outputs[0], *window.kernel) else slower
    written = problem.channels[0 if problem.kind == "input" else 1]
    slower *= DIRECT_FEW if written < DIRECT_VECTOR else 1.0
    of_outputs = problem.positions(outputs) * written * DIRECT_OUTPUT
    return flops * DIRECT_FLOP * slower * max(1.0, DIRECT_VECTOR / outputs[1]) + of_outputs + 2 * DISPATCH


def winograd(problem: Problem) -> float:
    """Return the cost of `winograd`: 16 products, and the elements that its transforms write."""
    inner, outer = problem.channels
    out = problem.window.sizes if problem.kind == "input" else problem.window.out
    tiles = problem.positions([(size + 1) // 2 for size in out])
    of_all = 16 * _product((tiles, inner, outer)) + 16 * inner * outer * TRANSFORMED_FILTER + TRANSFORMS
    if problem.kind == "weight":
        return of_all + 16 * tiles * (inner + outer) * TRANSFORMED_WEIGHT
    read, written = (outer, inner) if problem.kind == "input" else (inner, outer)
    return of_all + (16 * tiles * read + 4 * tiles * written) * TRANSFORMED


def gathered(problem: Problem) -> float:
    """Return the cost of `gathered`: one product, and the copies of its operands."""
    positions, taps, (inner, outer) = _sides(problem)
    copied = (positions * inner if taps > 1 else 0) + inner * outer
    return _product((positions, taps * inner, outer), problem.halves) + taps * copied * GATHERED + (taps + 3) * DISPATCH


def gathered_apart(problem: Problem) -> float:
    """Return the cost of `gathered` for a weight gradient."""
    positions, taps, (inner, outer) = _sides(problem)
    copied = positions * taps * inner * (GATHERED_APART if taps > 1 else 0.0)
    return _product((outer, positions, taps * inner), problem.halves) + copied + (taps + 3) * DISPATCH


def by_row(problem: Problem) -> float:
    """Return the cost of `by-row`: a weight gradient as one product for each row of the kernel."""
    positions, taps, (inner, outer) = _sides(problem)
    rows = len(problem.window.taps_along(0))
    copied = (positions * inner if taps > 1 else 0) + inner * outer
    products = rows * _product((outer, positions, taps // rows * inner), problem.halves)
    return products + taps * copied * GATHERED / 2 + (taps + 2 * rows + 2) * DISPATCH


def scattered(problem: Problem) -> float:
    """Return the cost of `scattered`: one product, and the sum of its elements into the result.

    Each element of the result reads one of the product for each tap of its phase of the stride, or a zero. A kernel
    without padding that is as high as the image has an output of one row, and these are mostly zeros.
    """
    positions, taps, (inner, outer) = _sides(problem)
    phases = math.prod(problem.window.stride)
    summed = max(positions, problem.positions(problem.window.sizes) / phases)
    moved = summed * inner * (SCATTERED if taps > 1 else 0.0) + inner * outer * GATHERED
    return _product((positions, outer, taps * inner), problem.halves) + taps * moved + (phases + 3) * DISPATCH


def windowed(problem: Problem) -> float:
    """Return the cost of `windowed`: a product of each group, and the copies of the padded image and of the weight.

    A kernel computes whole vectors of columns. If the columns of a weight gradient are no whole vectors, the kernel
    reads a copy of the output's gradient, which is filled up with zeros. The gradient of the input is computed for each
    phase of the stride. If it reads few channels, the flipped weight is copied once more.
    """
    window, (inner, outer) = problem.window, problem.channels
    is_input = problem.kind == "input"
    phases = math.prod(window.stride) if is_input else 1
    taps, groups = math.prod(window.kernel), problem.groups
    read, columns = (outer, inner // groups) if is_input else (inner, outer // groups)
    whole = -(-columns // VECTOR) * VECTOR / columns
    positions = problem.positions(window.sizes) / phases if is_input else problem.positions(window.out)
    products = positions * taps * inner * outer / groups
    image = problem.positions(window.out if is_input else window.sizes) * read
    flips = is_input and read // groups < BACKWARDS
    moved = image * PADDED + taps * inner * outer / groups * (FLIPPED if flips else GATHERED)
    if problem.kind == "weight" and whole > 1:
        moved += positions * outer * whole * GATHERED
    halves = problem.halves
    flop, narrower = (HALF_WINDOWED_FLOP[halves], HALF_MOVED) if halves else (FLOP, 1.0)
    return 2 * products * whole * flop + narrower * moved + (phases + 3) * DISPATCH


def depthwise(problem: Problem) -> float:
    """Return the cost of `depthwise`: one multiplication and one addition for each tap and position."""
    positions, taps, (inner, _) = _sides(problem)
    return positions * taps * inner * DEPTHWISE[problem.kind] + (taps + 2) * DISPATCH


def filtered(problem: Problem) -> float:
    """Return the cost of `filtered`: kernels of ours for depthwise convolutions, and the copy that repeats channels."""
    positions, taps, (inner, outer) = _sides(problem)
    repeated = problem.positions(problem.window.sizes) * outer * GATHERED if outer > inner else 0
    return positions * (taps * FILTERED + 1) * outer + repeated + 2 * DISPATCH


def _sides(problem: Problem) -> tuple[int, int, tuple[int, int]]:
    return problem.positions(problem.window.out), len(problem.window.taps()), problem.channels


def _product(sides: Sequence[int], halves: Halves | None = None) -> float:
    return 2 * (HALF_FLOP[halves] if halves else FLOP) * math.prod(-(-side // _TILE) * _TILE for side in sides)

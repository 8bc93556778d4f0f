"""The form of every convolution and of its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from irongrad.passes.base import Context, PassResult, value_of
from irongrad.passes.inline import inline
from irongrad.passes.rewrite import call, replace
from irongrad.passes.tap_products import Window, tap_products, tap_weight_gradients
from irongrad.passes.winograd import winograd, winograd_weight_gradient

aten = torch.ops.aten


@dataclass(frozen=True)
class Convolutions:
    """Write convolutions, and the gradients of their inputs and weights, in the form that is fastest.

    Before:
        y = convolution(x, w, ...)                                # x [N, C, H, W]
    After, for a 1x1 kernel:
        y = (x.permute(0, 2, 3, 1).flatten(0, 2) @ w.t()).reshape(N, H, W, O).permute(0, 3, 1, 2)

    Forms: `winograd` for 3x3 kernels with stride 1; `taps`, a product of matrices for each place of the kernel that
    meets an input; and `direct`, the operator as it is. The fastest by `Costs` is chosen. All but `direct` are
    channels-last inside: the pass `layout` takes the transposes between them away.

    Left alone: groups, transposed convolutions, other than two dimensions, and numbers of less than 32 bits, as
    Winograd's sums need more of them.

    Attributes:
        winograd: whether that form may be chosen.
    """

    name: ClassVar[str] = "convolutions"

    winograd: bool = True

    def run(self, graph: GraphModule, context: Context) -> PassResult:
        """Run the pass on one graph."""
        stats: dict[str, int] = {}
        for node in list(graph.graph.nodes):
            problem = _problem(node)
            if problem is None:
                continue
            form = problem.form(self.winograd)
            stats[form] = stats.get(form, 0) + 1
            if form != "direct":
                _rewrite(node, problem, form)
        return PassResult(any(form != "direct" for form in stats), stats)


@dataclass(frozen=True)
class Costs:
    """What the forms cost on one core of a CPU with AVX-512, in nanoseconds.

    Measured with IREE 3.13.0 on a core of a Zen 4 at 100 GFLOP/s in large products; only the ratios matter.

    Attributes:
        flop: of a product of matrices.
        direct: of a convolution lowered by IREE, which vectorises along the width of the output.
        vector: how many outputs of a row it computes at once.
        element: an element that an elementwise loop writes, or a packing of a product's operand.
        gathered: an element that is copied to where it belongs in a row.
        dispatch: a call of one kernel.
    """

    flop: float = 0.010
    direct: float = 0.0125
    vector: int = 8
    element: float = 0.45
    gathered: float = 1.5
    dispatch: float = 10_000.0


_TILE = 16  # data tiling pads the sides of every product of matrices to multiples of it
COSTS = Costs()


@dataclass(frozen=True)
class _Problem:
    """A convolution, or the gradient of its weight.

    Attributes:
        kind: `forward`, `adjoint` (a convolution with a weight that is flipped, and its channels swapped), or `weight`.
        images: the nodes of the input, or of the output's gradient and the input.
        weight: the weight, as it was before it was flipped.
        bias: the bias, if any.
        window: how it moves.
        channels: how many numbers there are of each position of the input and of the output.
    """

    kind: str
    images: tuple[Node, ...]
    weight: Node
    bias: Node | None
    window: Window
    channels: tuple[int, int]

    def form(self, with_winograd: bool) -> str:
        """The fastest form."""
        costs = {"taps": self._taps(), "direct": self._direct()}
        if with_winograd and self.window.kernel == (3, 3) and {*self.window.stride, *self.window.dilation} == {1}:
            costs["winograd"] = self._winograd()
        return min(costs, key=costs.__getitem__)

    def _positions(self, sizes: Sequence[int]) -> int:
        batch: int = value_of(self.images[0]).shape[0]
        return batch * math.prod(sizes)

    def _taps(self) -> float:
        taps, positions = len(self.window.taps()), self._positions(self.window.out)
        packed = positions * self.channels[0] + math.prod(self.channels)
        gathered = positions * self.channels[0] * COSTS.gathered if taps > 1 else 0.0
        product = _product((positions, taps * self.channels[0], self.channels[1]))
        return product + taps * (packed * COSTS.element + gathered) + (taps + 1) * COSTS.dispatch

    def _winograd(self) -> float:
        tiles = self._positions([(size + 1) // 2 for size in self.window.out])
        sides = (tiles, *self.channels)
        # Each transform writes half of its result on the way; operands of the products are packed.
        written = tiles * (self.channels[0] * (8 + 16 + 16) + self.channels[1] * (16 + 8 + 4))
        weights = math.prod(self.channels) * (9 + 12 + 16 + 16)
        return 16 * _product(sides) + (written + weights) * COSTS.element + 10 * COSTS.dispatch

    def _direct(self) -> float:
        """IREE's own gradient of a weight adds one product at a time."""
        if self.kind == "weight":
            return math.inf
        flops = 2 * self._positions(self.window.out) * math.prod(self.channels) * math.prod(self.window.kernel)
        padded = self._positions(self.window.sizes) * self.channels[0]
        slower = max(1.0, COSTS.vector / self.window.out[1])
        return flops * COSTS.direct * slower + padded * COSTS.element + 2 * COSTS.dispatch


def _product(sides: Sequence[int]) -> float:
    return 2 * COSTS.flop * math.prod(-(-side // _TILE) * _TILE for side in sides)


def _problem(node: Node) -> _Problem | None:
    args: tuple[Any, ...] = node.args
    bias: Node | None = None
    if node.target is aten.convolution.default:
        images, weight, bias, moves = (args[0],), args[1], args[2], args[3:9]
        kind, out = "forward", node
        if (source := _source_of_turned(weight)) is not None:
            kind, weight = "adjoint", source
    elif node.target is aten.convolution_backward.default and list(args[10]) == [False, True, False]:
        images, weight, moves = args[:2], args[2], args[4:10]
        kind, out = "weight", args[0]
    else:
        return None
    stride, padding, dilation, transposed, _, groups = moves
    source, padding = _unpadded(images[-1], _pair(padding))
    images = (*images[:-1], source)
    value, kernel = value_of(source), value_of(weight).shape
    if value.ndim != 4 or transposed or groups != 1 or value.dtype not in (torch.float32, torch.float64):
        return None
    sizes = tuple(value.shape[2:]), tuple(value_of(out).shape[2:]), tuple(kernel[2:])
    window = Window(*sizes, _pair(stride), padding, _pair(dilation))
    if not window.taps():
        return None
    channels = (value.shape[1], kernel[1] if kind == "adjoint" else kernel[0])
    return _Problem(kind, images, weight, bias, window, channels)


def _pair(value: Sequence[int]) -> tuple[int, ...]:
    return tuple(value) * (2 // len(value))


def _unpadded(image: Node, padding: tuple[int, ...]) -> tuple[Node, tuple[int, ...]]:
    """What `image` is padded from with zeros, and the padding before it that is left to the convolution."""
    args: tuple[Any, ...] = image.args
    if image.target is not aten.constant_pad_nd.default or len(args[1]) != 4 or min(args[1]) < 0 or any(args[2:]):
        return image, padding
    (left, _, top, _), (of_rows, of_columns) = args[1], padding
    return args[0], (of_rows + top, of_columns + left)


def _source_of_turned(weight: Node) -> Node | None:
    """What `weight` is with its places flipped and its channels swapped."""
    if weight.target is not aten.flip.default or weight.args[1] != [2, 3]:
        return None
    (swapped,) = weight.all_input_nodes
    if swapped.target in (aten.permute.default, aten.transpose.int) and swapped.args[1:] in (([1, 0, 2, 3],), (0, 1)):
        return swapped.all_input_nodes[0]
    return None


@dataclass(frozen=True)
class _Form:
    """A form as a function of tensors; equal for equal problems."""

    form: str
    kind: str
    window: Window

    def __call__(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        adjoint = self.kind == "adjoint"
        if self.kind == "weight" and self.form == "winograd":
            return winograd_weight_gradient(first, second, padding=self.window.padding)
        if self.kind == "weight":
            return tap_weight_gradients(first, second, window=self.window)
        if self.form == "winograd":
            return winograd(first, second, self.window.padding, self.window.out, adjoint=adjoint)
        return tap_products(first, second, window=self.window, adjoint=adjoint)


def _rewrite(node: Node, problem: _Problem, form: str) -> None:
    operands = problem.images if problem.kind == "weight" else (*problem.images, problem.weight)
    result = inline(_Form(form, problem.kind, problem.window), operands, node)
    if problem.bias is not None:
        with node.graph.inserting_before(node):
            bias = call(node.graph, aten.view.default, problem.bias, [-1, 1, 1], like=node)
            result = call(node.graph, aten.add.Tensor, result, bias, like=node)
    if problem.kind == "weight":
        _replace_second(node, result)
    else:
        replace(node, result)


def _replace_second(node: Node, new: Node) -> None:
    for user in list(node.users):
        assert user.args[1] == 1
        replace(user, new)
    node.graph.erase_node(node)


PASS = Convolutions

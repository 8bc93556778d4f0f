"""The values that are in memory between kernels: the model equals IREE's allocation to the byte, rule by rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import functionalize
from torch.nn import functional as F

from irongrad.graph.cleanup import merge_common_subexpressions
from irongrad.operators.legalize.retrace import interpret, retrace
from irongrad.operators.random import Draws
from irongrad.passes.graph.convolutions.problem import Window
from irongrad.passes.graph.convolutions.products import met
from irongrad.passes.stack_by_position import stack_by_position

X, W = torch.randn(64, 32), torch.randn(32, 32)
SQUARE = torch.randn(64, 64)
IMAGES = torch.randn(32, 32, 4, 4)
SCORES, HEADS = torch.randn(8, 4, 32, 32), torch.randn(32, 32, 4)


def _multi_use(x, z, w):
    """The first kernel that reads both values also computes both."""
    a, b = x * 2, z * 3
    return [(a * b) @ w, b @ w, a @ w]


def _broadcast(x, w):
    """A reduction fuses with its only reader, which is as large as the reduced value."""
    y = (x @ w).exp()
    return [y.sum(-1, keepdim=True) * y.sin()]


def _softmax_backward(g, p):
    """Elementwise code that reads a product with other dimensions does not fuse into a reduction's kernel."""
    s = torch.bmm(g, (g + 1).transpose(1, 2)).view(8, 4, 32, 32)
    return [p * (s - (s * p).sum(-1, keepdim=True))]


def _two_readers(x, w):
    y = x @ w
    return [(y * 2 @ w) * y]


def _bias_and_two_readers(x, w, bias):
    """The elementwise code between the product and its readers becomes one operation with several results."""
    y = x @ w + bias
    return [(y * 2 @ w) * y]


def _packed_alike(x, w):
    y = x.exp()
    return [y @ w, y @ (w * 2), y.sum()]


def _cut_up(x, w):
    """A value of which several slices are read is written to memory; it does not fuse into the kernel that reads it."""
    whole = x.exp() * 2
    return [(whole[:32] + whole[32:]) @ w]


def _cut_once(x, w):
    """A value of which one slice is read fuses into its reader."""
    return [((x.exp() * 2)[:32] + 1) @ w]


def _rows_and_columns(x, w):
    """As `_cut_up`, but the value has as many elements as the code that reads its slices."""
    rows = stack_by_position([x.sin(), x.exp()], 0)
    return [stack_by_position([rows[1] + rows[0], rows[1] - rows[0]], 1).flatten(0, 1) @ w]


def _places(x, w):
    """The middle tap of a window reads the image itself, which stays in memory; a corner tap reads a padded copy."""
    window = Window((4, 4), (4, 4), (3, 3), (1, 1), (1, 1), (1, 1))
    image = (x @ w).exp().view(4, 4, 4, 32).permute(0, 3, 1, 2)
    places = met(image, window)
    corner, middle = (places[tap].flatten(0, 2) for tap in ((0, 0), (1, 1)))
    return [middle @ ((corner.t() @ x) @ w).sin() @ w + corner]


def _packed_both_ways(x, kernels):
    """A transpose that cannot fuse with a packing is written once for both: weights as columns and as rows."""
    weights = (kernels * 2).permute(0, 2, 3, 1).flatten(1)
    return [(x @ weights).sin() @ weights.t()]


def _heads(x, y):
    heads = (x * 2).permute(0, 2, 1, 3).flatten(0, 1)
    return [torch.bmm(torch.bmm(heads, y).sin(), heads)]


def _heads_one_way(x, y):
    heads = (x * 2).permute(0, 2, 1, 3).flatten(0, 1)
    return [torch.bmm(y, heads).sin() @ torch.bmm(y + 1, heads)]


def _matrices_both_ways(x, y):
    matrices = (x * 2).permute(0, 1, 3, 2).flatten(0, 1)
    return [torch.bmm(torch.bmm(matrices, y).sin(), matrices)]


def _padded_result(x, w):
    y = (x @ w).sin()
    return [F.pad(y, (1, 1, 1, 1)), y @ w]


CASES: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "elementwise code that several operations read": (_multi_use, [X, X, W]),
    "a product that one operation reads": (lambda x, w: (x @ w).exp() @ w, [X, W]),
    "a product that two operations read": (_two_readers, [X, W]),
    "a product with a bias that two operations read": (_bias_and_two_readers, [X, W, torch.randn(32)]),
    "a reduction that one operation reads": (_broadcast, [X, W]),
    "a reduction that two operations read": (lambda x: (lambda m: [x - m, x * m])(x.sum(1, keepdim=True)), [X]),
    "a normalisation": (lambda x, w: F.layer_norm(x @ w, [32]), [X, W]),
    "a softmax": (lambda x, w: torch.softmax((x @ w) * 3, -1), [X, W]),
    "a softmax's backward": (_softmax_backward, [HEADS, SCORES]),
    "dimensions that are merged before a reduction": (lambda x: x.exp().view(32, 32, 16).sum(-1), [IMAGES]),
    "dimensions that are divided before a reduction": (lambda x: x.exp().view(32, 2, 16, 4, 4).sum(1), [IMAGES]),
    "a wider cast that a product reads": (lambda x, w: (x.sin().bfloat16().float() @ w).exp() @ w, [X, W]),
    "a value that several contractions pack alike": (_packed_alike, [X, W]),
    "a value of which several slices are read": (_cut_up, [X, W]),
    "a value of which one slice is read": (_cut_once, [X, W]),
    "slices that are as much as the whole": (_rows_and_columns, [X, W]),
    "places of a kernel": (_places, [X, W]),
    "a transpose of a batch that one product reads": (lambda x, w: torch.bmm(x.permute(1, 0, 2), w), [
        torch.randn(64, 4, 8), torch.randn(4, 8, 32)]),
    "a transpose that products pack in two ways": (_packed_both_ways, [
        torch.randn(64, 32), torch.randn(32, 16, 3, 3)]),
    "heads that products pack in two ways": (_heads, [torch.randn(2, 32, 4, 16), torch.randn(8, 16, 32)]),
    "heads that products pack in one way": (_heads_one_way, [torch.randn(2, 32, 4, 16), torch.randn(8, 16, 32)]),
    "transposed matrices that products pack in two ways": (_matrices_both_ways, [
        torch.randn(2, 4, 16, 32), torch.randn(8, 16, 32)]),
    "zeros around what is a result": (_padded_result, [X, W]),
}  # fmt: skip


def _columns(x):
    x = x.exp()
    return torch.cat([x[:, 0:8], x[:, 1:9], x[:, 2:10].sin()], 1) @ x[:24]


def _made_anew(w, *parts):
    whole = torch.stack([p.exp() for p in parts])
    return [whole.reshape(-1, 64).t() @ w, whole.view(4, 2, 16, 64).sum(2).view(8, 64).sum(0)]


JOINS: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "columns side by side": (_columns, [torch.randn(64, 16)]),
    "elementwise parts": (lambda x: torch.stack([x * 2, x + 3, x.exp()]).sin(), [X]),
    "one that is made anew for a reshape of another dimension": (_made_anew, [
        torch.randn(128, 32), *[torch.randn(32, 64)] * 4]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES | JOINS)
def test_predicted_memory_between_kernels_equals_irees_allocation(
    name: str, predicted_and_allocated: Callable[..., tuple[int, int]]
) -> None:
    function, examples = (CASES | JOINS)[name]
    predicted, allocated = predicted_and_allocated(function, *examples)
    assert predicted == allocated


def _in_order(order: str) -> Callable[..., list[torch.Tensor]]:
    def function(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        made: dict[str, torch.Tensor] = {}
        for name in order:
            made[name] = {"a": lambda: (x + 1) @ w, "b": lambda: (w + 2) @ w, "c": lambda: (w + 3) @ x}[name]()
        return [torch.stack([made["a"], made["b"], made["c"]]).sin()]

    return function


@pytest.mark.parametrize("order", ["abc", "bac", "acb", "cab", "bca"])
def test_parts_of_a_concatenation_are_written_in_place_in_the_order_of_their_kernels(
    order: str, predicted_and_allocated: Callable[..., tuple[int, int]]
) -> None:
    predicted, allocated = predicted_and_allocated(_in_order(order), SQUARE, SQUARE)
    assert predicted == allocated


def test_the_padded_input_of_a_convolution_is_made_once(
    predicted_and_allocated: Callable[..., tuple[int, int]],
) -> None:
    def padded(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        x = x.tanh()
        return [F.conv2d(x, w, padding=1), F.conv2d(x, w.flip(2), padding=1), x.sum((2, 3))]

    small = torch.randn(4, 32, 3, 3)  # of a larger one a kernel of ours reads a channels-last copy
    predicted, allocated = predicted_and_allocated(padded, IMAGES, small)
    assert predicted == allocated


def test_a_generator_of_random_numbers_is_several_kernels(
    predicted_and_allocated: Callable[..., tuple[int, int]],
) -> None:
    def dropped(x: torch.Tensor, w: torch.Tensor, seed: torch.Tensor, draws: torch.Tensor) -> list[torch.Tensor]:
        with Draws(seed, draws):
            for _ in range(3):
                x = F.dropout(torch.tanh(x @ w), 0.1)
            return [x.square().sum()]

    examples = [X, W, torch.tensor(7), torch.tensor(0)]
    drawn = retrace(dropped, examples, decompose=False)
    graph = retrace(functionalize(lambda *v: list(interpret(drawn, v))), examples)
    merge_common_subexpressions(graph)
    predicted, allocated = predicted_and_allocated(lambda *v: list(interpret(graph, v)), *examples)
    assert predicted == pytest.approx(allocated, rel=0.065)

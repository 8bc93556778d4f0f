"""Products that share an operand."""

from __future__ import annotations

import pytest
import torch

from irongrad.passes.horizontal import Horizontal


def random(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape)


def test_projections_of_one_input_are_one_product(apply):
    def fn(x, a, b, c):
        return x @ a.t(), (x @ b).relu(), x @ c

    done = apply(Horizontal(), fn, random(5, 4), random(3, 4), random(4, 7), random(4, 2))
    assert done.stats == {"merged": 3}
    assert done.operators["aten.mm.default"] == 1


def test_gradients_of_their_weights_are_one_product(apply):
    def fn(x, g, h):
        return g.t() @ x, h.t() @ x

    done = apply(Horizontal(), fn, random(5, 4), random(5, 3), random(5, 6))
    assert done.stats == {"merged": 2}
    assert done.operators["aten.mm.default"] == 1
    (joined,) = [n for n in done.after.graph.nodes if n.target is torch.ops.aten.cat.default]
    assert joined.args[1] == 1  # the gradients are put together before they are transposed


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, a: x @ (x @ a).relu(),  # one is made of the other
        lambda x, a: x @ a + a @ x,  # on different sides
        lambda x, a: (x @ a, x.relu() @ a.relu()),  # of different matrices
    ],
)
def test_others_stay(apply, fn):
    assert not apply(Horizontal(), fn, random(4, 4), random(4, 4)).changed


def test_those_that_do_not_depend_on_each_other_are_found_among_others(apply):
    def fn(x, a, b):
        first = x @ a
        return x @ first, x @ b

    done = apply(Horizontal(), fn, random(4, 4), random(4, 4), random(4, 3))
    assert done.stats == {"merged": 2}
    assert done.operators["aten.mm.default"] == 2

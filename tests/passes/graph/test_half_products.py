"""The pass half-products: products read half-precision matrices directly, widened to float32."""

from __future__ import annotations

import pytest
import torch

from irongrad.passes.graph.half_products import HalfProducts


def halves(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape).to(torch.bfloat16)


def products(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [n for n in graph.graph.nodes if str(n.target) in ("aten.mm.default", "aten.bmm.default")]


def widened(node: torch.fx.Node) -> bool:
    source = node.args[0] if str(node.target) == "prims.convert_element_type.default" else None
    return isinstance(source, torch.fx.Node) and source.meta["val"].dtype == torch.bfloat16


def attention_scores(q, k):
    return torch.bmm(q.float() * 0.3, k.float().permute(0, 2, 1) * 0.3)


def weight_gradient(grad, x):
    wide = grad.float()
    return wide.permute(1, 0) @ x.float(), wide.sum(0)


def pieces(x, y):
    return x.float().view(6, 4) @ y.float().unsqueeze(0).expand(3, 4, 5).clone()[0]


@pytest.mark.parametrize(
    ("fn", "shapes"), [(attention_scores, [(2, 3, 4), (2, 5, 4)]), (weight_gradient, [(6, 3), (6, 5)])]
)
def test_operands_are_widened_last(apply, fn, shapes):
    done = apply(HalfProducts(), fn, *(halves(*s) for s in shapes), target="cuda")
    assert done.stats == {"products": 1}
    (product,) = products(done.after)
    assert all(widened(n) for n in product.all_input_nodes)
    assert [n for n in products(done.before) if all(widened(i) for i in n.all_input_nodes)] == []


def test_the_scale_of_both_operands_is_applied_to_the_result(apply):
    done = apply(HalfProducts(), attention_scores, halves(2, 3, 4), halves(2, 5, 4), target="cuda")
    (scale,) = (n for n in done.after.graph.nodes if str(n.target) == "aten.mul.Scalar")
    assert scale.args[0] in products(done.after)
    assert scale.args[1] == pytest.approx(0.09)


def test_only_the_half_precision_operand_is_widened(apply):
    done = apply(
        HalfProducts(), lambda p, v: p.exp() @ v.float().permute(1, 0), torch.randn(3, 4), halves(5, 4), target="cuda"
    )
    assert [widened(n) for n in products(done.after)[0].all_input_nodes] == [False, True]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: x.float() @ y.float(),  # widened last already
        lambda x, y: (x.float() + 1).permute(0, 1) @ y.float(),  # a sum on the way
        lambda x, y: x.float().sum(0) * y.float(),  # no product
    ],
)
def test_others_stay(apply, fn):
    assert not apply(HalfProducts(), fn, halves(4, 4), halves(4, 4)).changed


def test_products_in_float64_are_left_alone(apply):
    assert not apply(
        HalfProducts(), lambda x, y: (x.double() * 0.5).t() @ y.double(), halves(4, 3), halves(4, 5)
    ).changed


def test_nothing_is_done_for_a_cpu(apply):
    assert not apply(HalfProducts(), weight_gradient, halves(6, 3), halves(6, 5)).changed

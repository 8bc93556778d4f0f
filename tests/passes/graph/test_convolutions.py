"""The pass convolutions: each form computes the convolution, and the pass chooses the right one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from irongrad.memory_model import product_tiles
from irongrad.passes import DEFAULT_LEVEL, passes_at, run_passes
from irongrad.passes.base import Context
from irongrad.passes.graph.convolutions import Convolutions
from irongrad.passes.graph.convolutions.forms import FORMS, forms_of
from irongrad.passes.graph.convolutions.problem import Problem, Window
from irongrad.targets import Ability

aten = torch.ops.aten


def with_gradients(x, weight, bias, grad, stride=1, padding=0, dilation=1, groups=1):
    """A convolution, and the gradients of its input and weight."""
    moves = ([stride] * 2, [padding] * 2, [dilation] * 2)
    back = aten.convolution_backward(grad, x, weight, None, *moves, False, [0, 0], groups, [True, True, False])
    return F.conv2d(x, weight, bias, stride, padding, dilation, groups), *back[:2]


def operands(sizes=(8, 8), channels=(16, 32), kernel=3, batch=2, **geometry):
    torch.manual_seed(0)
    x = torch.randn(batch, channels[0], *sizes)
    weight = torch.randn(channels[1], channels[0] // geometry.get("groups", 1), kernel, kernel)
    return x, weight, torch.randn(channels[1]), torch.randn_like(F.conv2d(x, weight, **geometry))


def check(apply, item=None, **problem):
    geometry = {k: v for k, v in problem.items() if k in ("stride", "padding", "dilation", "groups")}
    return apply(item or Convolutions(), lambda *t: with_gradients(*t, **geometry), *operands(**problem))


(OF_DEPTHWISE,) = [f for f in FORMS if (f.name, f.kind) == ("depthwise", "input")]


@settings(max_examples=150, deadline=None)
@given(
    form=st.sampled_from(FORMS),
    batch=st.integers(1, 3),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dilation=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
@example(form=OF_DEPTHWISE, batch=1, sizes=(1, 1), kernel=(1, 2), stride=(1, 2), padding=(0, 1), dilation=(1, 1))
def test_every_form_of_every_problem(form, batch, sizes, kernel, stride, padding, dilation):
    if form.name == "winograd":
        batch, sizes, kernel, stride, dilation = 64, (sizes[0] + 2, sizes[1] + 2), (3, 3), (1, 1), (1, 1)
    groups, channels = (4, (4, 4)) if form.name == "depthwise" else (1, (3, 4))
    if form.name == "filtered":
        groups, channels = 4, (4, 4 * batch)
    if form.name.endswith("by-group"):
        groups, channels = 2, (6, 4)
    dims = zip(sizes, kernel, stride, padding, dilation, strict=True)
    out = tuple((size + 2 * pad - dil * (k - 1) - 1) // step + 1 for size, k, step, pad, dil in dims)
    assume(min(out) >= 1)
    window = Window(sizes, out, kernel, stride, padding, dilation)
    problem = Problem(form.kind, batch, channels, groups, window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product_tiles, "SMALLEST", 1)  # there are kernels for convolutions of any size
        assume(window.taps() and form in forms_of(problem))
    x = torch.randn(batch, channels[0], *sizes, dtype=torch.float64)
    weight = torch.randn(channels[1], channels[0] // groups, *kernel, dtype=torch.float64)
    grad = torch.randn(batch, channels[1], *out, dtype=torch.float64)
    moves = (stride, padding, dilation, False, [0, 0], groups)
    result, given_ = {
        "forward": lambda: (aten.convolution(x, weight, None, *moves), (x, weight)),
        "input": lambda: (
            aten.convolution_backward(grad, x, weight, None, *moves, [True, False, False])[0],
            (grad, weight),
        ),
        "weight": lambda: (
            aten.convolution_backward(grad, x, weight, None, *moves, [False, True, False])[1],
            (grad, x),
        ),
    }[form.kind]()
    assert tuple(map(tuple, problem.shapes())) == tuple(tuple(t.shape) for t in given_)
    torch.testing.assert_close(form.build(*given_, problem), result)


@pytest.mark.parametrize(("sizes", "padding"), [((16, 16), 1), ((15, 17), 0), ((18, 12), 2)])
def test_kernels_of_three_by_three_become_winograds(apply, sizes, padding):
    done = check(apply, sizes=sizes, channels=(128, 128), batch=32, padding=padding)
    assert done.stats == {"winograd": 3}
    assert done.operators["aten.bmm.default"] == 6
    assert not done.operators["aten.mm.default"]
    assert not done.operators["aten.convolution.default"]


def rounded(x, weight, bias, grad, **geometry):
    """As `with_gradients`, of operands that are rounded to bfloat16."""
    x, weight, grad = (t.bfloat16().float() for t in (x, weight, grad))
    return with_gradients(x, weight, bias, grad, **geometry)


def multiplied(graph):
    """The dtypes of what the products of a graph multiply, before they are widened."""
    products = [n for n in graph.graph.nodes if n.target in (aten.mm.default, aten.bmm.default)]
    operands = [o for product in products for o in product.all_input_nodes]
    assert all(o.meta["val"].dtype is torch.float32 for o in operands)
    widened = torch.ops.prims.convert_element_type.default
    return {(o.args[0] if o.target is widened else o).meta["val"].dtype for o in operands}


@pytest.mark.parametrize("geometry", [{"padding": 1}, {"padding": 1, "stride": 2}])
def test_bfloat16_is_moved_as_such_to_fast_products(apply, geometry):
    given = operands((8, 8), (256, 256), batch=8, **geometry)
    done = apply(Convolutions(), lambda *t: rounded(*t, **geometry), *given, abilities=frozenset({Ability.HALVES}))
    assert not done.stats.get("winograd")
    assert not done.operators["aten.convolution.default"]
    assert multiplied(done.after) == {torch.bfloat16}


def test_bfloat16_is_convolved_as_float32_without_fast_products(apply):
    given = operands((8, 8), (256, 256), batch=32, padding=1)
    done = apply(Convolutions(), lambda *t: rounded(*t, padding=1), *given)
    assert done.stats == {"winograd": 3}


def test_a_one_by_one_kernel_is_one_product(apply):
    done = check(apply, kernel=1, channels=(64, 64), batch=8)
    assert done.operators["aten.mm.default"] == 3
    assert not done.operators["aten.constant_pad_nd.default"]
    assert not done.operators["aten.convolution.default"]


def test_strides_of_a_one_by_one_kernel_skip_inputs(apply):
    done = check(apply, kernel=1, stride=2, channels=(64, 64), batch=16)
    assert done.operators["aten.mm.default"] == 3
    assert not done.operators["aten.convolution.default"]


def test_taps_that_meet_only_padding_are_left_out(apply):
    done = check(apply, sizes=(1, 1), channels=(64, 64), batch=16, padding=1)
    assert done.operators["aten.mm.default"] == 3
    assert not done.operators["aten.convolution.default"]


@pytest.mark.parametrize(
    "problem",
    [
        {"sizes": (1, 1), "stride": 3, "padding": 2},
        {"sizes": (1, 3), "stride": 5, "padding": 2},
        {"sizes": (2, 1), "stride": 7, "padding": 1},
    ],
)
def test_a_kernel_that_meets_only_padding_has_gradients_of_zero(apply, problem):
    done = check(apply, kernel=1, **problem)
    assert not done.operators["aten.convolution_backward.default"]


def test_strides_gather_before_a_product_and_scatter_after_it(apply):
    done = check(apply, sizes=(16, 16), channels=(64, 64), stride=2, padding=1)
    assert set(done.stats) == {"gathered", "scattered", "by-row"}
    assert not done.operators["aten.convolution.default"]


@pytest.mark.parametrize("geometry", [{"padding": 1}, {"padding": 1, "stride": 2}, {"padding": 2, "dilation": 2}])
def test_depthwise_convolutions_stay_convolutions_where_there_are_kernels_for_them(apply, geometry):
    given = operands(channels=(16, 16), groups=16, **geometry)
    fast = frozenset({Ability.CONVOLUTIONS})
    done = apply(Convolutions(), lambda *t: with_gradients(*t, groups=16, **geometry), *given, abilities=fast)
    assert done.stats == {"filtered": 3}
    assert done.operators["aten.convolution.default"] == 3


def test_several_outputs_of_each_channel_are_depthwise_where_there_are_kernels(apply):
    given = operands(batch=2, channels=(16, 48), groups=16, padding=1, stride=2)
    fast = frozenset({Ability.CONVOLUTIONS})
    done = apply(Convolutions(), lambda *t: with_gradients(*t, groups=16, padding=1, stride=2), *given, abilities=fast)
    assert done.stats == {"filtered": 3}


def test_depthwise_convolutions_are_elementwise(apply):
    done = check(apply, sizes=(16, 16), channels=(16, 16), groups=16, padding=1)
    assert done.stats == {"depthwise": 3}
    assert not done.operators["aten.mm.default"]
    assert not done.operators["aten.convolution.default"]


def test_groups_are_products_of_their_own(apply):
    done = check(apply, sizes=(16, 16), channels=(32, 64), groups=4, padding=1)
    assert done.stats == {"gathered-by-group": 1, "scattered-by-group": 1, "by-row-by-group": 1}
    assert not done.operators["aten.convolution.default"]


def test_dilation_is_products(apply):
    done = check(apply, sizes=(16, 16), channels=(32, 64), dilation=2, padding=2)
    assert not done.operators["aten.convolution.default"]


def test_without_winograd(apply):
    done = check(apply, Convolutions(winograd=False), batch=32, channels=(128, 128), padding=1)
    assert "winograd" not in done.stats


def test_transposed_convolutions_take_part(apply):
    done = apply(
        Convolutions(),
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1),
        torch.randn(4, 32, 8, 8),
        torch.randn(32, 16, 3, 3),
        torch.randn(16),
    )
    assert done.stats == {"scattered": 1}


def test_a_convolution_may_read_another(apply):
    def chain(x, w):
        return F.conv2d(F.conv2d(x, w, padding=1), w, padding=1)

    done = apply(Convolutions(), chain, torch.randn(8, 64, 16, 16), torch.randn(64, 64, 3, 3))
    assert done.stats == {"winograd": 2}


def test_three_dimensions_take_part(apply):
    done = apply(
        Convolutions(),
        lambda x, w: F.conv3d(x, w, padding=1, stride=2),
        torch.randn(2, 16, 12, 12, 12),
        torch.randn(32, 16, 3, 3, 3),
    )
    assert done.stats == {"gathered": 1}


def test_the_transformed_weight_is_the_same_for_both_directions(apply):
    """The gradient of the input needs no flipped copy of the weight."""
    done = check(apply, channels=(128, 128), batch=32, padding=1)
    assert not done.operators["aten.flip.default"]


def with_gradients_1d(x, weight, bias, grad, stride=1, padding=0, dilation=1, groups=1):
    back = aten.convolution_backward(
        grad, x, weight, None, [stride], [padding], [dilation], False, [0], groups, [True, True, False]
    )
    return F.conv1d(x, weight, bias, stride, padding, dilation, groups), *back[:2]


@pytest.mark.parametrize(
    ("geometry", "forms"),
    [
        ({"padding": 1}, {"gathered", "scattered", "by-row"}),
        ({"padding": 2, "stride": 2}, {"gathered", "scattered", "by-row"}),
        ({"padding": 4, "dilation": 4}, {"gathered", "scattered", "by-row"}),
        ({"groups": 2}, {"gathered-by-group", "scattered-by-group", "by-row-by-group"}),
        ({"groups": 64, "padding": 1}, {"depthwise"}),
    ],
)
def test_one_dimension_takes_part(apply, geometry, forms):
    torch.manual_seed(0)
    x, weight = torch.randn(16, 64, 61), torch.randn(64, 64 // geometry.get("groups", 1), 3)
    operands = x, weight, torch.randn(64), torch.randn_like(F.conv1d(x, weight, **geometry))
    done = apply(Convolutions(), lambda *t: with_gradients_1d(*t, **geometry), *operands)
    assert set(done.stats) == forms
    assert not done.operators["aten.convolution.default"]
    assert not done.operators["aten.convolution_backward.default"]


@pytest.mark.parametrize("padded", [(3, 0), (0, 2), (1, 1)])
def test_padding_of_one_dimension_becomes_part_of_its_convolution(apply, padded):
    done = apply(
        Convolutions(),
        lambda x, w: F.conv1d(F.pad(x, padded), w, padding=1),
        torch.randn(16, 64, 61),
        torch.randn(64, 64, 3),
    )
    assert done.stats == {"gathered": 1}
    pads = done.after.graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
    assert sum(bool(pad.users) for pad in pads) == 1


def test_transposed_convolutions_of_one_dimension_take_part(apply):
    done = apply(
        Convolutions(),
        lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2, padding=1, output_padding=1),
        torch.randn(8, 64, 32),
        torch.randn(64, 32, 4),
        torch.randn(32),
    )
    assert done.stats == {"scattered": 1}


def test_halves_are_left_alone(step_of):
    x, weight = operands()[:2]
    graph = step_of(lambda x, w: F.conv2d(x.double().half(), w.half(), padding=1), x, weight).functions["call"].graph
    before = str(graph.graph)
    assert not Convolutions().run(graph, Context("call")).changed
    assert str(graph.graph) == before


def test_without_the_pass_backwards_are_written_plainly(step_of):
    step = step_of(lambda *t: with_gradients(*t, padding=1, stride=2), *operands(padding=1, stride=2))
    nodes = run_passes(step, []).functions["call"].graph.graph.nodes
    assert not any(n.target is aten.convolution_backward.default for n in nodes)


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(1, 5),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    padding=st.integers(0, 3),
    dilation=st.integers(1, 3),
)
def test_taps_that_are_left_out_meet_nothing(size, kernel, stride, padding, dilation):
    out = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    if out < 1:
        return
    window = Window((size,), (out,), (kernel,), (stride,), (padding,), (dilation,))
    met = {
        tap
        for tap in range(kernel)
        if any(0 <= position * stride - padding + tap * dilation < size for position in range(out))
    }
    assert met <= {tap for (tap,) in window.taps()}


def test_no_convolution_stays_on_the_route_over_stablehlo(apply):
    assert check(apply, Convolutions(), batch=2, channels=(2, 3), padding=1).operators["aten.convolution.default"]
    done = check(apply, Convolutions(direct=False), batch=2, channels=(2, 3), padding=1)
    assert not done.operators["aten.convolution.default"]
    (chosen,) = (p for p in passes_at(DEFAULT_LEVEL, "stablehlo") if isinstance(p, Convolutions))
    assert [chosen.direct, chosen.windowed] == [False, False]
    assert replace(chosen, direct=True, windowed=True) in passes_at(DEFAULT_LEVEL)
    assert Convolutions(least_gain=3.5) in passes_at(DEFAULT_LEVEL)
    assert Convolutions() in passes_at(3)


@pytest.mark.parametrize(
    ("size", "channels", "least", "form"),
    [(32, 64, 0.0, "winograd"), (32, 64, 3.5, "winograd"), (16, 128, 0.0, "winograd"), (16, 128, 3.5, "by-row")],
)
def test_winograd_is_for_gradients_of_weights_that_gain_enough(step_of, size, channels, least, form):
    """The sizes of the first and the second stage of ResNet-18 for CIFAR, at batch 8."""

    def fn(grad, x, w):
        window = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
        return aten.convolution_backward.default(grad, x, w, None, *window, [False, True, False])[1]

    image = torch.empty(8, channels, size, size)
    graph = step_of(fn, image, image, torch.empty(channels, channels, 3, 3), decompose=False).functions["call"].graph
    assert Convolutions(least_gain=least).run(graph, Context("call")).stats == {form: 1}


@pytest.mark.parametrize("read", [0, 1])
def test_a_gradient_that_nothing_reads_is_not_computed(apply, read):
    """The mask wants it: it is of a parameter that another step trains."""
    result = apply(Convolutions(), lambda *t: with_gradients(*t)[1 + read], *operands())
    assert result.changed
    assert not result.operators[aten.convolution_backward.default]

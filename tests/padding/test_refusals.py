"""Operators and sizes that cannot be padded exactly are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import irongrad as ig
from irongrad.padding import Call, Padded
from irongrad.padding.registry import NoRule, aten, has_users_rules, rule_of
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.differentiate.differentiate import differentiate
from irongrad.runtime.errors import CaptureError, UnsupportedOpError
from irongrad.sizes.limits import spelled
from irongrad.step.train_step import TrainStep


class _Model(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale)


def _step(function: Callable[..., Tensor], dims: dict[int, str] | None = None, **options: Any) -> TrainStep:
    model = _Model(function)
    dynamic = {"x": dims or {0: "B", 1: "T"}}
    names = set(dynamic["x"].values())
    settings = {"dynamic": dynamic, "buckets": [dict.fromkeys(names, 8)], **options}
    return TrainStep(
        model, lambda h: h.square().mean(), torch.optim.SGD([model.scale]), {"x": torch.randn(3, 5, 4)}, **settings
    )


def _kthvalue(h: Tensor) -> Tensor:
    return h.kthvalue(2, 1)[0]  # the second along T


def test_an_operator_without_a_rule_is_named_with_its_line_and_dimensions():
    with pytest.raises(UnsupportedOpError) as caught:
        differentiate(capture(_step(_kthvalue)))
    text = str(caught.value)
    assert "test_refusals.py:" in text.splitlines()[0]
    assert "h.kthvalue(2, 1)[0]" in text.splitlines()[0]
    assert "aten.kthvalue.default, on sizes (B, T, 4), has no padding rule" in text
    assert "along 'B', 'T': leave 'B', 'T' out of dynamic= and buckets=" in text
    assert "irongrad.register_padding_rule" in text


def test_an_operator_without_a_rule_is_accepted_on_unpadded_values():
    differentiate(capture(_step(lambda h: h * torch.arange(8.0).kthvalue(2)[0])))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda h: F.max_pool1d(h.mT, 2, ceil_mode=True), "ceil_mode=True"),
        (lambda h: h.flatten(0, 1).cumsum(0), "padding lies between true elements"),
        (lambda h: F.embedding(h.argmax(-1), h[0, 0].outer(h[0, 0]), scale_grad_by_freq=True), "scale_grad_by_freq"),
        (lambda h: h.roll(1), "without dims"),
        (lambda h: torch.randperm(h.shape[0]) * h.sum(), "draws an order or a choice"),
    ],
)
def test_arguments_without_a_rule_are_refused_with_the_reason(function: Callable[..., Tensor], reason: str):
    with pytest.raises(UnsupportedOpError, match=reason):
        differentiate(capture(_step(function)))


def test_a_registered_rule_is_used(monkeypatch: pytest.MonkeyPatch):
    @torch.library.custom_op("irongrad_tests::row_sums", mutates_args=())
    def row_sums(x: Tensor) -> Tensor:
        return x.sum((1, 2))

    row_sums.register_fake(lambda x: x.new_empty(x.shape[0]))
    row_sums.register_autograd(
        lambda ctx, g: g.view(-1, 1, 1).expand(ctx.shape).clone(),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "shape", inputs[0].shape),
    )
    operator = torch.ops.irongrad_tests.row_sums.default
    monkeypatch.setattr("irongrad.operators.decompositions.registry._USER", {})
    ig.register_decomposition(operator)(lambda x: x.sum((1, 2)))
    with pytest.raises(UnsupportedOpError, match=r"irongrad_tests.row_sums.default, on sizes \(B, T, 4\)"):
        differentiate(capture(_step(lambda h: row_sums(h))))

    monkeypatch.setattr("irongrad.padding.registry._USER", {})

    @ig.register_padding_rule(operator)
    def rule(call: Call) -> Padded:
        x = call["x"]
        return Padded(call.run(x=call.padding.fill(x, 0)), x.layout[:1])

    assert rule_of(operator) is rule
    assert has_users_rules()  # the cache skips a step with such rules
    differentiate(capture(_step(lambda h: row_sums(h))))


def test_a_dimension_that_the_model_fixes_is_named():
    with pytest.raises(CaptureError, match="the size of 'T' is in dynamic, but the model or the loss works for that"):
        capture(_step(lambda h: h * torch.ones(5, 1)))


def test_dimensions_that_must_be_equal_are_named():
    x = torch.randn(4, 4, 4)
    model = _Model(lambda h: h + h.transpose(0, 1))
    step = TrainStep(
        model,
        lambda h: h.square().mean(),
        torch.optim.SGD([model.scale]),
        {"x": x},
        dynamic={"x": {0: "B", 1: "T"}},
        buckets={"B": [4], "T": [4]},
    )
    with pytest.raises(CaptureError, match="dimensions 'B' and 'T' have to be equal"):
        differentiate(capture(step))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dynamic": {"z": {0: "B"}}}, "dynamic names 'z'"),
        ({"dynamic": {"x": {3: "B"}}, "buckets": {"B": [4]}}, "dimension 3 of a tensor with 3"),
        ({"dynamic": {"x": {0: "a batch"}}, "buckets": {"a batch": [4]}}, "an identifier"),
        ({"dynamic": {"x": {0: "B", 1: "B"}}, "buckets": {"B": [8]}}, "'B' is 3 in input 'x' and 5"),
        ({"dynamic": {}}, "buckets need the dimensions"),
        ({"buckets": {"S": [4]}}, r"bucket \{'S': 4\} is not a positive size for one or more of \['B', 'T'\]"),
        ({"buckets": [{"B": 4}, {"B": 4, "T": 8}]}, "name different dimensions"),
        ({"buckets": [{}]}, "is not a positive size"),
        ({"buckets": {"B": [4], "T": [0]}}, "is not a positive size"),
        ({"buckets": {"B": [4], "T": [4]}}, r"have sizes \{'B': 3, 'T': 5\}, which no bucket of"),
        ({"accumulate": 3}, "leave accumulate at 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], reason: str):
    with pytest.raises(CaptureError, match=reason):
        _step(lambda h: h, **options)


def test_an_example_with_a_dimension_of_size_one_is_refused():
    model = _Model(lambda h: h)
    with pytest.raises(CaptureError, match="dimension 'B' is 1 in the example input 'x'"):
        TrainStep(
            model,
            lambda h: h.sum(),
            torch.optim.SGD([model.scale]),
            {"x": torch.randn(1, 4)},
            dynamic={"x": {0: "B"}},
            buckets={"B": [4]},
        )


def test_a_missing_rule_is_not_reported_as_an_unsupported_operator():
    assert not issubclass(NoRule, UnsupportedOpError)
    assert rule_of(aten.kthvalue.default) is None


@pytest.mark.parametrize(
    ("function", "least"),
    [
        (lambda h: h, 1),
        (lambda h: h[:, :2], 2),
        (lambda h: h[:, 2], 3),
        (lambda h: h.topk(3, 1)[0], 3),
        (lambda h: F.max_pool1d(h.mT, 2), 2),
        (lambda h: h.unfold(1, 4, 1), 4),
        (lambda h: h[:, 1:].mean(1), 2),
        (lambda h: h.mean(1) if h.shape[1] > 1 else h[:, 0] * 3, 2),
        (lambda h: F.instance_norm(h.mT), 2),
    ],
)
def test_the_smallest_size_that_a_step_takes_is_found(function: Callable[..., Tensor], least: int):
    assert differentiate(capture(_step(function))).bucket_limits.smallest == {"B": 1, "T": least}


def test_a_bucket_that_holds_no_input_is_refused():
    with pytest.raises(CaptureError, match=r"bucket \{'B': 4, 'T': 2\} holds no input: T must be at least 3"):
        differentiate(capture(_step(lambda h: h[:, 2], buckets={"B": [4], "T": [2, 8]})))


def test_a_step_that_takes_only_some_sizes_is_refused():
    with pytest.raises(CaptureError, match="this model or loss needs"):
        differentiate(capture(_step(lambda h: h[:, :4].sum() if h.shape[1] % 2 else h.sum())))


def test_a_branch_on_one_size_is_refused_but_a_minimal_size_becomes_a_limit():
    with pytest.raises(CaptureError, match="this model or loss needs B != 4, which not all sizes .* Say so in constr"):
        differentiate(capture(_step(lambda h: h * 2 if h.shape[0] == 4 else h)))
    limits = differentiate(capture(_step(lambda h: F.batch_norm(h.mT, None, None, training=True)))).bucket_limits
    assert [spelled(c) for c in limits.conditions] == ["B*T != 1"]

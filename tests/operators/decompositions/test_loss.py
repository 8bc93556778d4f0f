"""Losses and their backward, against PyTorch's own operators."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch.nn import functional

import irongrad as ig
from irongrad.operators.decompositions import decomposition_table

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2


def check(operator: torch._ops.OpOverload, *arguments: object) -> tuple[torch.Tensor, ...]:
    """Compare the decomposition with the operator, and return the operator's results."""
    expected = operator(*arguments)
    torch.testing.assert_close(decomposition_table()[operator](*arguments), expected, equal_nan=True)
    return expected if isinstance(expected, tuple) else (expected,)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize(("p", "weighted"), list(itertools.product([1, 2], [False, True])))
def test_multi_margin_loss_matches_aten(p: int, weighted: bool, reduction: int) -> None:
    weight = normal(5).abs() if weighted else None
    for x, target in ((normal(4, 5), torch.tensor([0, 4, 2, 2])), (normal(5), torch.tensor(3))):
        (loss,) = check(aten.multi_margin_loss.default, x, target, p, 0.7, weight, reduction)
        check(aten.multi_margin_loss_backward.default, normal(*loss.shape), x, target, p, 0.7, weight, reduction)


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
def test_multilabel_margin_loss_matches_aten(reduction: int) -> None:
    lists = torch.tensor([[0, 4, 2, -1, 3], [-1, 0, 0, 0, 0], [1, 1, -1, -1, -1], [4, 3, 2, 1, 0]])
    for x, target in ((normal(4, 5), lists), (normal(5), lists[0]), (normal(), torch.tensor(0))):
        loss, is_target = check(aten.multilabel_margin_loss_forward.default, x, target, reduction)
        grad = normal(*loss.shape)
        check(aten.multilabel_margin_loss_backward.default, grad, x, target, reduction, is_target)


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
def test_soft_margin_loss_matches_aten(reduction: int) -> None:
    x, target = 9 * normal(3, 4), normal(4, 3).T.sign()
    (loss,) = check(aten.soft_margin_loss.default, x, target, reduction)
    check(aten.soft_margin_loss_backward.default, normal(*loss.shape), x, target, reduction)


@pytest.mark.parametrize("ignored", [-100, 2])
@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("weighted", [False, True])
def test_negative_log_likelihood_and_its_backward_match_aten(weighted: bool, reduction: int, ignored: int) -> None:
    weight = normal(5).abs() if weighted else None
    target = torch.tensor([0, 4, 2, 2, ignored, 3])
    images = target.view(2, 1, 3).expand(2, 2, 3).contiguous()
    cases = [("nll_loss", normal(6, 5), target), ("nll_loss", normal(5), torch.tensor(4))]
    for name, x, classes in [*cases, ("nll_loss2d", normal(2, 5, 2, 3), images)]:
        loss, total = check(getattr(aten, f"{name}_forward").default, x, classes, weight, reduction, ignored)
        backward = getattr(aten, f"{name}_backward").default
        check(backward, normal(*loss.shape), x, classes, weight, reduction, ignored, total)


CTC = {
    "padded targets": (torch.randint(1, 6, (4, 5)), [9, 8, 7, 9], [3, 2, 5, 4]),
    "targets in a row": (torch.randint(1, 6, (12,)), [9, 8, 7, 9], [3, 2, 4, 3]),
    "a repeated label": (torch.tensor([[1, 1, 2]] * 4), [9, 9, 4, 9], [3, 2, 3, 1]),
    "impossible, empty and without time": (torch.randint(1, 6, (4, 5)), [9, 3, 0, 9], [3, 5, 2, 0]),
}


@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("name", CTC)
def test_ctc_loss_and_its_backward_match_aten(name: str, tensors: bool, zero_infinity: bool) -> None:
    targets, inputs, outputs = CTC[name]
    lengths: Sequence[Sequence[int] | torch.Tensor] = (inputs, outputs)
    if tensors:
        lengths = (torch.tensor(inputs), torch.tensor(outputs))
    overload = "Tensor" if tensors else "default"
    forward, backward = getattr(aten._ctc_loss, overload), getattr(aten._ctc_loss_backward, overload)
    log_probs = normal(9, 4, 6).log_softmax(-1)
    expected, its_alpha = forward(log_probs, targets, *lengths, 0, zero_infinity)
    found, alpha = decomposition_table()[forward](log_probs, targets, *lengths, 0, zero_infinity)
    torch.testing.assert_close(found, expected)
    rest = (0, zero_infinity)
    grads = [
        step(normal(4), log_probs, targets, *lengths, loss, paths, *rest)
        for step, loss, paths in ((decomposition_table()[backward], found, alpha), (backward, expected, its_alpha))
    ]
    torch.testing.assert_close(*grads, equal_nan=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_chunked_linear_cross_entropy_matches_cross_entropy(reduction: str) -> None:
    """Compare the operator, which eager runs in chunks, with the cross entropy of the whole scores."""
    x, weight, target = normal(8, 3), normal(4, 3), torch.tensor([0, 3, 1, -100, 2, 2, 1, 0])
    forward = torch.ops.torch_nn._linear_cross_entropy_batch_chunked.default
    each = torch.ops.torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default
    x.requires_grad_()
    expected = functional.cross_entropy(x @ weight.T, target, reduction=reduction)
    policy = ("compact", torch.float64)
    if reduction == "none":
        found = decomposition_table()[each](x, weight, target, None, None, -100, 4, *policy)
        torch.testing.assert_close(found, expected)
        return
    arguments = (x, weight, target, None, None, reduction, -100, 0.0, 4, *policy, True, True, True, False)
    loss, grad, *_ = decomposition_table()[forward](*arguments)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grad, *torch.autograd.grad(expected, x))


def test_compiled_losses_match_eager() -> None:
    """Losses that need special handling in capture, or with parts that IREE would otherwise compile wrongly."""

    def losses(x: torch.Tensor, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        variance = y.square()
        first = functional.gaussian_nll_loss(x, y, variance) + functional.multi_margin_loss(x, target)
        return first + functional.soft_margin_loss(x, y.detach().sign()) + functional.gelu(x, approximate="tanh").sum()

    x, y = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0))
    ig.compile_function(losses, (x, y, torch.tensor([0, 4, 2, 2, 1, 3])), gradients=True)

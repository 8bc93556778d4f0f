"""Rounding noise in the last bits of the values that eager PyTorch computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from irongrad.passes.graph.convolutions.problem import Window
from irongrad.passes.graph.convolutions.winograd import winograd_input_gradient, winograd_weight_gradient
from irongrad.pipeline.oracle.rounding_noise import RoundingNoise
from irongrad.runtime.tolerance import NOISE_ULPS, SAME_DTYPE

EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize("shape", [(), (7,), (3, 50, 1000), (2, 1 << 18), (0, 4)])
def test_noise_is_in_the_last_places_of_every_element(shape: tuple[int, ...]) -> None:
    """For tensors of every size and memory layout."""
    tensor = torch.ones(shape)
    for start in (tensor, tensor.transpose(0, -1) if shape else tensor):
        with RoundingNoise(0):
            noisy = start * 1.0
        off = (noisy - 1) / EPS
        assert float(off.abs().max() if off.numel() else 0) <= NOISE_ULPS
        assert (off != 0).double().mean() > 0.8 or off.numel() < 2


@pytest.mark.parametrize("hides", [-1e5, -1e9, -1e30, -torch.inf])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_hides_scores_is_equal_for_all(hides: float, kind: torch.dtype) -> None:
    """A row of which all is hidden has equal weights, and the others have noise."""
    scores = torch.randn(3, 5, dtype=kind)
    seen = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 0]], dtype=torch.bool)
    least = max(hides, torch.finfo(kind).min)
    with RoundingNoise(0):
        masked = (scores * 1.0).masked_fill(~seen, least)
        scaled = torch.where(seen, scores, least) * 0.5
        both = [s.transpose(0, 1).softmax(0) for s in (masked, scaled)]
    assert torch.all(masked[~seen].isfinite())
    assert (masked[seen] != scores[seen]).any()
    for weights in both:
        torch.testing.assert_close(weights[:, 1].double(), torch.full((5,), 0.2).double(), rtol=0.02, atol=0)
        assert torch.equal(weights.T != 0, seen | torch.tensor([[False], [True], [False]]))


def test_large_sums_have_noise_of_their_own() -> None:
    with RoundingNoise(0):
        sums = (torch.full((50, 1), 1e6) @ torch.ones(1, 20)).sum(1)
    assert len(sums.unique()) > 10


def test_a_large_number_has_the_same_noise_in_all_that_works_on_single_elements() -> None:
    number = torch.full((100,), 1e6)
    with RoundingNoise(0):
        product, moved = number * 1.0, torch.cat([number, number])
    assert len(torch.cat([product, moved]).unique()) == 1
    assert product[0] != number[0]


@pytest.mark.parametrize(
    "normalised",
    [
        lambda x: torch.nn.functional.batch_norm(x, torch.zeros(3), torch.ones(3), training=True),
        lambda x: torch.nn.functional.layer_norm(x, x.shape),
        lambda x: torch.nn.functional.group_norm(x, 1),
    ],
)
def test_a_normalisation_of_equal_values_has_the_noise_of_its_mean(
    normalised: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """It is zero but for the rounding of a mean, which is the same for all values and does not cancel in later sums."""
    x = torch.full((4, 3, 10), 0.3)
    means = []
    for seed in range(6):
        with RoundingNoise(seed):
            noisy = normalised(x)
        means.append(abs(float(noisy[:, 0].double().mean())))
    assert 0.1 * EPS < max(means) * 1e-5**0.5 < NOISE_ULPS * EPS


def _gradients(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    every = torch.ops.aten.convolution_backward.default(
        grad, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
    )
    return every[0], every[1]


def test_noise_is_as_large_as_winograds_errors_where_only_few_terms_are_not_zero() -> None:
    """Adam makes a whole step of an error in a gradient that is zero, as after `relu` and `max_pool2d`."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, 16, 8, 8).relu(), torch.randn(16, 16, 3, 3)
    grad = torch.randn(4, 16, 8, 8) * (torch.rand(4, 16, 8, 8) < 0.01)
    window = Window((8, 8), (8, 8), (3, 3), (1, 1), (1, 1), (1, 1))
    exact = _gradients(*(t.double() for t in (x, weight, grad)))
    ours = winograd_input_gradient(grad, weight, window), winograd_weight_gradient(grad, x, window)
    noisy = []
    for seed in range(6):
        with RoundingNoise(seed):
            noisy.append(_gradients(x, weight, grad))
    errors = [[result[place][exact[place] == 0].abs().max() for place in range(2)] for result in (ours, *noisy)]
    assert max(errors[0]) > 0
    assert all(own <= SAME_DTYPE * max(others) for own, *others in zip(*errors, strict=True))


@pytest.mark.parametrize(("size", "stride"), [(5, 1), (3, 2)])
def test_other_convolutions_of_zeros_have_no_noise(size: int, stride: int) -> None:
    x = torch.zeros(1, 1, 9, 9)
    x[..., 0, 0] = 1
    with RoundingNoise(0):
        result = torch.nn.functional.conv2d(x, torch.ones(1, 1, size, size), stride=stride)
    assert int((result != 0).sum()) == 1


def test_an_infinite_image_stays_as_it_is() -> None:
    x = torch.ones(1, 1, 9, 9)
    x[..., 0, 0] = torch.inf
    with RoundingNoise(0):
        result = torch.nn.functional.conv2d(x, torch.ones(1, 1, 3, 3))
    assert int(result.isinf().sum()) == 1
    assert not result.isnan().any()


def test_noise_leaves_exact_results_alone() -> None:
    count, values = torch.tensor(3.0), torch.arange(1000.0)
    with RoundingNoise(0):
        count.add_(1)
        moved = values.view(10, 100).t().clone()
        mask = torch.bernoulli(torch.full((1000,), 0.5))
    assert float(count) == 4.0
    assert torch.equal(moved, values.view(10, 100).t())
    assert set(mask.tolist()) == {0.0, 1.0}


def test_rows_that_are_looked_up_in_half_precision_have_no_noise() -> None:
    """What reads them has its own, so a table stored in bfloat16 does not make float32 results vague."""
    table, rows = torch.rand(8, 16).bfloat16(), torch.arange(8)
    with RoundingNoise(0):
        found = [table[rows], torch.nn.functional.embedding(rows, table), table.index_select(0, rows)]
        wide = table[rows].float()
    assert all(torch.equal(each, table) for each in found)
    assert 0 < (wide / table.float() - 1).abs().max() <= 2 * NOISE_ULPS * EPS


def test_equal_elements_are_chosen_at_random_and_others_as_without_noise():
    x = torch.tensor([[3.0, 1.0, 2.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    chosen = set()
    for seed in range(8):
        with RoundingNoise(seed):
            values, indices = x.topk(2)
        assert indices[0].tolist() == [0, 2]
        torch.testing.assert_close(values, x.gather(1, indices))
        chosen.add(tuple(indices[1].tolist()))
    assert len(chosen) > 1


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # of PyTorch's own, in the first jvp
def test_a_forward_mode_derivative_has_noise() -> None:
    """PyTorch computes shapes for it on tensors without memory."""
    x, tangent = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    layer = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh())
    exact = torch.func.jvp(layer, (x,), (tangent,))
    with RoundingNoise(0):
        noisy = torch.func.jvp(layer, (x,), (tangent,))
    for without, with_noise in zip(exact, noisy, strict=True):
        assert not torch.equal(without, with_noise)
        torch.testing.assert_close(without, with_noise, rtol=1e-4, atol=1e-6)

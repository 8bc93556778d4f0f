"""The generator matches its authors' test vectors, and draws match their distributions; seeds are fixed."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from irongrad.operators.random import Draws
from irongrad.operators.random.philox import philox, philox_eagerly

COUNT = 100_000

# Random123's known answers for philox4x32-10: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    found = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(map(int, found)) == words


def drawn(function: Callable[[], torch.Tensor], seed: int = 0, draws: int = 0) -> torch.Tensor:
    with Draws(seed, draws):
        return function()


def empty(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(COUNT, dtype=dtype)


# A draw, its mean and its variance.
MOMENTS = {
    "rand": (lambda: torch.rand(COUNT), 0.5, 1 / 12),
    "rand_float16": (lambda: torch.rand(COUNT, dtype=torch.float16), 0.5, 1 / 12),
    "rand_like": (lambda: torch.rand_like(empty()), 0.5, 1 / 12),
    "randn": (lambda: torch.randn(COUNT), 0.0, 1.0),
    "randint": (lambda: torch.randint(3, 10, (COUNT,)), 6.0, 4.0),
    "bernoulli": (lambda: torch.bernoulli(torch.full((COUNT,), 0.3)), 0.3, 0.21),
    "uniform_": (lambda: empty().uniform_(-1, 3), 1.0, 16 / 12),
    "normal_": (lambda: empty().normal_(2, 3), 2.0, 9.0),
    "normal": (lambda: torch.normal(torch.full((COUNT,), 2.0), 3.0), 2.0, 9.0),
    "exponential_": (lambda: empty().exponential_(2.0), 0.5, 0.25),
    "geometric_": (lambda: empty().geometric_(0.2), 5.0, 20.0),
    "log_normal_": (lambda: empty().log_normal_(0, 0.5), math.exp(0.125), (math.exp(0.25) - 1) * math.exp(0.25)),
    "gumbel": (lambda: -empty().exponential_().log(), 0.57721566, math.pi**2 / 6),
    "random_": (lambda: empty(torch.int64).random_() / 2.0**63, 0.5, 1 / 12),
    "dropout": (lambda: functional.dropout(torch.ones(COUNT), 0.2), 1.0, 0.25),
    "alpha_dropout": (lambda: functional.alpha_dropout(torch.randn(COUNT), 0.2, training=True), 0.0, 1.0),
    "feature_dropout": (lambda: functional.dropout2d(torch.ones(COUNT // 20, 20, 1, 1), 0.2), 1.0, 0.25),
    "rrelu": (lambda: functional.rrelu(-torch.ones(COUNT), training=True), -11 / 48, (5 / 24) ** 2 / 12),
    "multinomial": (lambda: torch.multinomial(torch.tensor([1.0, 0.0, 2, 1]), COUNT, True), 1.75, 1.1875),
    "multinomial_once": (lambda: torch.multinomial(torch.tensor([[1.0, 0, 2, 1]] * COUNT), 1), 1.75, 1.1875),
    "randperm": (lambda: torch.randperm(COUNT) / COUNT, 0.5, 1 / 12),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_draws_have_the_right_mean_and_variance(name: str) -> None:
    function, mean, variance = MOMENTS[name]
    values = drawn(function).double()
    assert abs(values.mean() - mean) < 5 * math.sqrt(variance / COUNT)
    assert abs(values.var() / variance - 1) < 0.05


def test_cauchy_draws_have_the_right_quartiles() -> None:
    quartiles = torch.quantile(drawn(lambda: empty().cauchy_(1.0, 2.0)), torch.tensor([0.25, 0.5, 0.75]))
    assert torch.allclose(quartiles, torch.tensor([-1.0, 1.0, 3.0]), atol=0.05)


def test_categories_without_weight_are_never_drawn() -> None:
    weights = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0])
    assert set(drawn(lambda: torch.multinomial(weights, COUNT, True)).tolist()) == {1, 3}
    assert sorted(drawn(lambda: torch.multinomial(weights, 2)).tolist()) == [1, 3]


@pytest.mark.parametrize("name", ["elements", "calls", "draws", "seeds"])
def test_neighbouring_draws_are_independent(name: str) -> None:
    """Neighbours along every axis of the counter and the key are independent: 16 x 16 bins of pairs."""
    size = 4096
    sequences = {
        "elements": lambda: drawn(lambda: torch.rand(2 * size)),
        "calls": lambda: drawn(lambda: torch.stack([torch.rand(4) for _ in range(size // 2)]).T.flatten()),
        "draws": lambda: torch.stack([drawn(lambda: torch.rand(4), 0, i) for i in range(size // 2)]).T.flatten(),
        "seeds": lambda: torch.stack([drawn(lambda: torch.rand(4), i) for i in range(size // 2)]).T.flatten(),
    }
    bins = (sequences[name]() * 16).long().reshape(-1, 2)
    counts = torch.bincount(bins[:, 0] * 16 + bins[:, 1], minlength=256).double()
    expected = len(bins) / 256
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert 180 < statistic < 340  # 255 degrees of freedom: a mean of 255, a standard deviation of 23


def test_a_permutation_contains_every_index_once() -> None:
    assert sorted(drawn(lambda: torch.randperm(1000)).tolist()) == list(range(1000))


def test_logarithms_of_exponential_draws_are_finite() -> None:
    values = drawn(lambda: torch.empty(1 << 20).exponential_())
    assert float(values.min()) > 0
    assert bool(values.log().isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_uniform_draws_are_below_one(dtype: torch.dtype) -> None:
    assert float(drawn(lambda: torch.rand(1 << 20, dtype=dtype)).max()) < 1


def test_every_dtype_draws_the_same_numbers() -> None:
    x = torch.randn(500)
    for function in (
        lambda t: functional.dropout(t, 0.3) != 0,
        lambda t: torch.rand_like(t).double(),
        lambda t: torch.empty_like(t).geometric_(0.1).double(),
    ):
        assert torch.equal(drawn(lambda f=function: f(x)), drawn(lambda f=function: f(x.double())))


def test_seed_draw_and_call_all_change_the_numbers() -> None:
    first = drawn(lambda: torch.rand(8))
    assert torch.equal(first, drawn(lambda: torch.rand(8)))
    others = [
        drawn(lambda: torch.rand(8), 1),
        drawn(lambda: torch.rand(8), 0, 1),
        drawn(lambda: torch.rand(8), 1 << 32),
    ]
    others += [drawn(lambda: [torch.rand(8), torch.rand(8)][1]), drawn(lambda: torch.rand(8), 0, 1 << 32)]
    assert not any(bool((first == other).any()) for other in others)


def test_an_empty_draw_does_not_change_later_draws() -> None:
    after = drawn(lambda: [torch.rand(0, 3), functional.dropout(torch.ones(3), 0.0), torch.rand(8)][2])
    assert torch.equal(after, drawn(lambda: torch.rand(8)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_checkpoint_runs_again_draws_the_same(reentrant: bool) -> None:
    x = torch.randn(200, requires_grad=True)
    with Draws(0, 0):
        first = checkpoint(lambda t: functional.dropout(t.exp(), 0.5), x, use_reentrant=reentrant)
        second = checkpoint(lambda t: functional.dropout(t, 0.5), first, use_reentrant=reentrant)
        (gradient,) = torch.autograd.grad(second.sum(), x) if not reentrant else (_backward(second, x),)
    assert torch.equal(gradient, second)


def _backward(output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    output.sum().backward()
    assert x.grad is not None
    return x.grad


def test_pytorchs_own_generator_is_untouched() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    drawn(lambda: torch.rand(8))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("training", [True, False])
def test_the_gradient_of_rrelu_is_the_drawn_slope(training: bool) -> None:
    from irongrad.operators.decompositions.random import _rrelu_backward

    x, grad = torch.randn(50, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
    noise = torch.where(x > 0, 1.0, torch.rand(50, dtype=torch.float64))
    arguments = (grad, x, noise, 0.1, 0.4, training, False)
    assert torch.equal(_rrelu_backward(*arguments), torch.ops.aten.rrelu_with_noise_backward.default(*arguments))


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 3 << 13)])
def test_known_numbers_have_the_words_of_the_operators(shape: tuple[int, ...]) -> None:
    places = torch.arange(math.prod(shape)).reshape(shape) + 2**31
    counter, key = (2**32 - 1, 7, 2**31), (2**32 - 3, 5)
    expected = philox((places, *map(torch.tensor, counter)), (torch.tensor(key[0]), torch.tensor(key[1])))
    for words, same in zip(philox_eagerly(places, counter, key), expected, strict=True):
        assert torch.equal(words, same)

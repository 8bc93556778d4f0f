"""PyTorch's random operators, each as a function of a source of random words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from irongrad.operators.random import distributions
from irongrad.operators.random.philox import Words

aten = torch.ops.aten


class Source(Protocol):
    """A source of random words."""

    def words(self, shape: Sequence[int]) -> Words:
        """Return four random words for every element of `shape`; each call returns different words."""


Sampler = Callable[..., Any]
S = TypeVar("S", bound=Sampler)

# A sampler takes a source and the operator's arguments. For an in-place operator it returns the first argument's new
# value.
SAMPLERS: dict[torch._ops.OpOverload, Sampler] = {}
IN_PLACE: dict[torch._ops.OpOverload, Sampler] = {}


def _samples(*operators: torch._ops.OpOverload, in_place: Sequence[torch._ops.OpOverload] = ()) -> Callable[[S], S]:
    def register(function: S) -> S:
        SAMPLERS.update(dict.fromkeys(operators, function))
        IN_PLACE.update(dict.fromkeys(in_place, function))
        return function

    return register


def _float(dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None else torch.get_default_dtype()


@_samples(aten.rand.default, aten.rand.generator)
def _rand(source: Source, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: object) -> torch.Tensor:
    return distributions.uniform(source.words(size)[0], _float(dtype))


@_samples(aten.rand_like.default, aten.rand_like.generator)
def _rand_like(source: Source, x: torch.Tensor, *, dtype: torch.dtype | None = None, **_: object) -> torch.Tensor:
    return _rand(source, x.shape, dtype=dtype or x.dtype)


@_samples(aten.randn.default, aten.randn.generator)
def _randn(source: Source, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: object) -> torch.Tensor:
    return distributions.normal(source.words(size), _float(dtype))


@_samples(aten.randn_like.default, aten.randn_like.generator)
def _randn_like(source: Source, x: torch.Tensor, *, dtype: torch.dtype | None = None, **_: object) -> torch.Tensor:
    return _randn(source, x.shape, dtype=dtype or x.dtype)


@_samples(aten.randint.low, aten.randint.low_generator)
def _randint_low(
    source: Source, low: int, high: int, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: object
) -> torch.Tensor:
    return distributions.integers(source.words(size), low, high).to(dtype or torch.int64)


@_samples(aten.randint.default, aten.randint.generator)
def _randint(source: Source, high: int, size: Sequence[int], **options: Any) -> torch.Tensor:
    return _randint_low(source, 0, high, size, **options)


@_samples(aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype)
def _randint_like_low(
    source: Source, x: torch.Tensor, low: int, high: int, *, dtype: torch.dtype | None = None, **_: object
) -> torch.Tensor:
    return _randint_low(source, low, high, x.shape, dtype=dtype or x.dtype)


@_samples(aten.randint_like.default, aten.randint_like.generator)
def _randint_like(source: Source, x: torch.Tensor, high: int, **options: Any) -> torch.Tensor:
    return _randint_like_low(source, x, 0, high, **options)


@_samples(aten.random.default, in_place=[aten.random_.default])
def _random(source: Source, x: torch.Tensor) -> torch.Tensor:
    """Integers from 0 to the largest that the dtype represents without gaps: 2^24 for floats wider than 16 bits."""
    return _random_from(source, x, 0, None)


@_samples(aten.random.to, in_place=[aten.random_.to])
def _random_to(source: Source, x: torch.Tensor, to: int) -> torch.Tensor:
    return _random_from(source, x, 0, to)


@_samples(getattr(aten.random, "from"), in_place=[getattr(aten.random_, "from")])
def _random_from(source: Source, x: torch.Tensor, low: int, to: int | None) -> torch.Tensor:
    high = _exclusive_bound(x.dtype) if to is None else to
    return distributions.integers(source.words(x.shape), low, high).to(x.dtype)


def _exclusive_bound(dtype: torch.dtype) -> int:
    """The exclusive bound below which a dtype represents all integers; 2^63 - 1 for int64, which must hold it."""
    if dtype == torch.bool:
        return 2
    if not dtype.is_floating_point:
        return int(min(torch.iinfo(dtype).max, (1 << 63) - 2)) + 1
    return {torch.float16: 1 << 11, torch.bfloat16: 1 << 8}.get(dtype, 1 << 24) + 1


@_samples(aten.randperm.default, aten.randperm.generator)
def _randperm(source: Source, n: int, *, dtype: torch.dtype | None = None, **_: object) -> torch.Tensor:
    """Sort one random word per element; equal words, one pair in 2^32, keep their order."""
    return aten.sort.stable(source.words([n])[0], stable=True)[1].to(dtype or torch.int64)


@_samples(aten.bernoulli.default)
def _bernoulli(source: Source, probability: torch.Tensor) -> torch.Tensor:
    return _bernoulli_of(source, probability, probability)


@_samples(aten.bernoulli.p, aten.bernoulli.Tensor, in_place=[aten.bernoulli_.float, aten.bernoulli_.Tensor])
def _bernoulli_of(source: Source, x: torch.Tensor, p: torch.Tensor | float = 0.5) -> torch.Tensor:
    return distributions.below(source.words(x.shape)[0], p).to(x.dtype)


@_samples(aten.uniform.default, in_place=[aten.uniform_.default])
def _uniform(source: Source, x: torch.Tensor, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    return distributions.uniform(source.words(x.shape)[0], x.dtype) * (high - low) + low


@_samples(aten.normal_functional.default, in_place=[aten.normal_.default])
def _normal_like(source: Source, x: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    return distributions.normal(source.words(x.shape), x.dtype) * std + mean


@_samples(aten.normal.Tensor_float, aten.normal.Tensor_Tensor)
def _normal(source: Source, mean: torch.Tensor, std: torch.Tensor | float = 1.0) -> torch.Tensor:
    shape = torch.broadcast_shapes(mean.shape, std.shape if isinstance(std, torch.Tensor) else ())
    return distributions.normal(source.words(shape), mean.dtype) * std + mean


@_samples(aten.normal.float_Tensor)
def _normal_of_deviation(source: Source, mean: float, std: torch.Tensor) -> torch.Tensor:
    return distributions.normal(source.words(std.shape), std.dtype) * std + mean


@_samples(aten.normal.float_float)
def _normal_of_size(source: Source, mean: float, std: float, size: Sequence[int], **options: Any) -> torch.Tensor:
    return _randn(source, size, **options) * std + mean


@_samples(aten.log_normal.default, in_place=[aten.log_normal_.default])
def _log_normal(source: Source, x: torch.Tensor, mean: float = 1.0, std: float = 2.0) -> torch.Tensor:
    exponent = distributions.normal(source.words(x.shape), distributions.wide(x.dtype)) * std + mean
    return exponent.exp().to(x.dtype)


@_samples(aten.exponential.default, in_place=[aten.exponential_.default])
def _exponential(source: Source, x: torch.Tensor, rate: float = 1.0) -> torch.Tensor:
    return (distributions.exponential(source.words(x.shape)[0], x.dtype) / rate).to(x.dtype)


@_samples(aten.cauchy.default, in_place=[aten.cauchy_.default])
def _cauchy(source: Source, x: torch.Tensor, median: float = 0.0, scale: float = 1.0) -> torch.Tensor:
    return (distributions.cauchy(source.words(x.shape)[0], x.dtype) * scale + median).to(x.dtype)


@_samples(aten.geometric.default, in_place=[aten.geometric_.default])
def _geometric(source: Source, x: torch.Tensor, p: float) -> torch.Tensor:
    return distributions.geometric(source.words(x.shape)[0], p).to(x.dtype)


@_samples(aten.multinomial.default)
def _multinomial(source: Source, weights: torch.Tensor, count: int, replacement: bool = False) -> torch.Tensor:
    """Draw categories by their weights in the last dimension.

    With replacement, the sampler inverts the distribution function. Without replacement, each category gets an
    exponential arrival time whose rate is its weight, and the `count` earliest categories are drawn (P. S. Efraimidis
    and P. G. Spirakis, Inf. Process. Lett. 97, 2006).
    """
    weights = weights.to(distributions.wide(weights.dtype))
    if not replacement:
        clocks = distributions.exponential(source.words(weights.shape)[0], weights.dtype)
        return aten.topk.default(weights / clocks, count)[1]
    total = weights.cumsum(-1).unsqueeze(-2)  # [..., 1, categories]
    drawn = source.words([*weights.shape[:-1], count])[0]
    aim = distributions.uniform(drawn, weights.dtype).unsqueeze(-1) * total[..., -1:]
    return (total <= aim).to(torch.int64).sum(-1)


@_samples(aten.native_dropout.default)
def _dropout(source: Source, x: torch.Tensor, p: float, train: bool | None = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw nothing in the cases in which eager's dropout, a composite operator, draws nothing."""
    if train is False or p == 0.0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1.0:
        return x * 0.0, torch.zeros_like(x, dtype=torch.bool)
    kept = distributions.below(source.words(x.shape)[0], 1.0 - p)
    return x * kept * (1.0 / (1.0 - p)), kept


@_samples(aten.rrelu_with_noise_functional.default)
def _rrelu(
    source: Source, x: torch.Tensor, noise: torch.Tensor, lower: float = 1 / 8, upper: float = 1 / 3, *training: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Use a random slope for each element that is not positive, recorded in `noise`; in evaluation the mean slope."""
    if not (training and training[0]):
        return torch.where(x > 0, x, x * ((lower + upper) / 2)), noise.clone()
    slope = torch.where(x > 0, 1.0, _uniform(source, x, lower, upper))
    return x * slope, slope


@_samples(aten.rrelu_with_noise.default)
def _rrelu_recording(source: Source, x: torch.Tensor, noise: torch.Tensor, *options: Any) -> torch.Tensor:
    result, recorded = _rrelu(source, x, noise, *options)
    noise.copy_(recorded)
    return result


IN_PLACE[aten.rrelu_with_noise_.default] = _rrelu_recording

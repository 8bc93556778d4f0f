"""Decide near ties both ways: which side of a threshold a value is on, and which of several values is the largest.

A derivative jumps there. With a million activations, some are closer to zero than the rounding errors of a network, so
that code which adds in another order decides otherwise, and rightly. The noise of a few runs seldom finds them. So runs
with noise decide them on purpose: the first run one way, the second the other way, and further ones at random.

A value that is exactly at a threshold stays there, as in eager: padding, and units that are off for all inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

aten = torch.ops.aten

_STRETCH = 1 << 16

# How near is near, in last-place units of the mean magnitude. In networks of ten to fifty layers the errors of float32
# are 4 to 16 such units.
_NEAR = 32.0

# Operators that compare a value with thresholds, each with the place of the value, and the thresholds.
_THRESHOLDS: dict[torch._ops.OpOverload, tuple[int, Callable[[tuple[Any, ...]], tuple[float, ...]]]] = {
    aten.relu.default: (0, lambda args: (0.0,)),
    aten.sgn.default: (0, lambda args: (0.0,)),
    aten.sign.default: (0, lambda args: (0.0,)),
    aten.leaky_relu_backward.default: (1, lambda args: (0.0,)),
    aten.hardtanh_backward.default: (1, lambda args: (args[2], args[3])),
    aten.hardswish_backward.default: (1, lambda args: (-3.0, 3.0)),
    aten.hardsigmoid_backward.default: (1, lambda args: (-3.0, 3.0)),
}
_IN_PLACE = {aten.relu_.default: aten.relu.default}

# Operators that return the largest values and their places, each with the number of dimensions in which a place counts.
_LARGEST = {
    aten.max_pool2d_with_indices.default: 2,
    aten.adaptive_max_pool2d.default: 2,
    aten.max_pool3d_with_indices.default: 3,
    aten.adaptive_max_pool3d.default: 3,
}


def compares(operator: torch._ops.OpOverload) -> bool:
    """Whether `operator` compares values with thresholds, or with each other."""
    return operator in _THRESHOLDS or operator in _IN_PLACE or operator in _LARGEST


@dataclass(frozen=True)
class NearTies:
    """How a run decides near ties.

    Attributes:
        seed: the seed of the run.
    """

    seed: int

    def decides(self, operator: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
        """Whether `operator`, which compares values, compares float32 here."""
        place = _THRESHOLDS.get(_IN_PLACE.get(operator, operator), (0,))[0]
        return bool(args[place].dtype == torch.float32 and args[place].numel() > 0)

    def decided(self, operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `operator` returns if near ties are decided as in this run."""
        if operator in _LARGEST:
            return self._largest(operator, args, kwargs)
        place, thresholds = _THRESHOLDS[_IN_PLACE.get(operator, operator)]
        value = args[place]
        moved = self._moved(value, thresholds(args))
        if operator in _IN_PLACE:
            return operator(value.copy_(moved), *args[1:], **kwargs)
        return operator(*args[:place], moved, *args[place + 1 :], **kwargs)

    def _moved(self, value: torch.Tensor, thresholds: tuple[float, ...]) -> torch.Tensor:
        """`value`, of which those near a threshold are moved to one side of it, as far as they were from it."""
        unit = _unit(value)
        for threshold in thresholds:
            away = value - threshold
            bound = torch.clamp(unit, min=_NEAR * torch.finfo(value.dtype).eps * abs(threshold))
            near = (away != 0) & (away.abs() < bound)
            value = torch.where(near, threshold + self._sides(away), value)
        return value

    def _sides(self, away: torch.Tensor) -> torch.Tensor:
        if self.seed > 1:
            return away * tiled(self._units, away.shape).sign()
        return away.abs() if self.seed == 0 else -away.abs()

    def _largest(self, operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first and the second run add opposite numbers, so that one of them decides each near tie otherwise."""
        value, rank = args[0], _LARGEST[operator]
        noise = tiled(self._units, value.shape)
        signed = _unit(value) * (-1 if self.seed == 1 else 1)
        _, indices = operator(value + noise * signed, *args[1:], **kwargs)
        flat = value.flatten(-rank).gather(-1, indices.flatten(-rank))
        return flat.view(indices.shape), indices

    @cached_property
    def _units(self) -> torch.Tensor:
        """Numbers from -1 to 1, the same in the first and the second run; no mode sees how they are drawn."""
        generator = torch.Generator().manual_seed(max(self.seed, 1))
        with torch._C._DisableTorchDispatch():
            return torch.rand(_STRETCH, generator=generator) * 2 - 1


def tiled(units: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of `shape` that repeats `units`."""
    size = math.prod(shape)
    return units.repeat(-(-size // len(units)))[:size].view(list(shape))


def _unit(value: torch.Tensor) -> torch.Tensor:
    """How near is near, for a tensor; zero if a value is not finite."""
    return (value.abs().mean() * (_NEAR * torch.finfo(value.dtype).eps)).nan_to_num(0.0, 0.0, 0.0)

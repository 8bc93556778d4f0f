"""Hyperparameters of torch.optim parameter groups as named run-time inputs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# If one of these is zero, the optimizer has no such state, so the graph is specialised on the zero. Any other zero
# (a weight decay of 0, say) only removes a term, so that hyperparameter stays an input.
STRUCTURAL_AT_ZERO = frozenset({"momentum"})


@dataclass(frozen=True)
class Hyper:
    """One floating-point hyperparameter of one parameter group.

    Attributes:
        name: the name of its input, such as `lr`, `beta1`, or `lr_1` for group 1 of several.
        key: its key in the group, such as `lr` or `betas`.
        index: its position in the group's tuple; None for a plain number.
        group: the group's position among all groups of all optimizers.
        default: its value in the user's optimizer.
    """

    name: str
    key: str
    index: int | None
    group: int
    default: float

    @property
    def structural(self) -> bool:
        """Whether the graph is specialised on the value zero of this hyperparameter."""
        return self.default == 0.0 and self.key in STRUCTURAL_AT_ZERO


def groups_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
    """Return all parameter groups of all optimizers, in order, each with its optimizer."""
    return [(o, g) for o in optimizers for g in o.param_groups]


def hyperparameters(optimizers: Sequence[torch.optim.Optimizer]) -> list[Hyper]:
    """List the float hyperparameters of every group; an integer counts if the optimizer declares a float."""
    groups = groups_of(optimizers)
    found: list[Hyper] = []
    for number, (optimizer, group) in enumerate(groups):
        suffix = f"_{number}" if len(groups) > 1 else ""
        for key, value in group.items():
            if key not in optimizer.defaults:
                continue  # the parameters, and entries that a learning-rate scheduler adds
            if isinstance(value, (tuple, list)):
                found += [
                    Hyper(f"{_singular(key)}{i + 1}{suffix}", key, i, number, float(v))
                    for i, v in enumerate(value)
                    if isinstance(v, (int, float)) and any(isinstance(w, float) for w in value)
                ]
            elif _is_float(optimizer, key, value):
                found.append(Hyper(f"{key}{suffix}", key, None, number, float(value)))
    return found


def hypers(optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> dict[str, float]:
    """Return the present hyperparameters of an optimizer, as the entry points take them.

    A scheduler of PyTorch changes the numbers of an eager optimizer. `session.train_step(**batch, **hypers(optimizer))`
    trains with them. Numbers that are compiled in may be passed on as long as they have not changed.

    Args:
        optimizer: the optimizer that was compiled, or all of them in the same order; or others with the same groups.
    """
    optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
    return {hyper.name: hyper.default for hyper in hyperparameters(optimizers)}


def with_values(
    group: dict[str, object], hypers: Sequence[Hyper], value: Callable[[Hyper], object]
) -> dict[str, object]:
    """Return a copy of `group` whose hyperparameters are replaced by `value(hyper)`."""
    changed = dict(group)
    for hyper in hypers:
        if hyper.index is None:
            changed[hyper.key] = value(hyper)
        else:
            items = list(changed[hyper.key])  # type: ignore[call-overload]
            items[hyper.index] = value(hyper)
            changed[hyper.key] = tuple(items)
    return changed


def _singular(key: str) -> str:
    return key[:-1] if key.endswith("s") and key != "eps" else key


def _is_float(optimizer: torch.optim.Optimizer, key: str, value: object) -> bool:
    if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        return False  # an infinite limit is a constant
    if isinstance(value, float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return True
    parameter = inspect.signature(type(optimizer)).parameters.get(key)
    declared = parameter is not None and (isinstance(parameter.default, float) or "float" in str(parameter.annotation))
    return isinstance(value, int) and declared

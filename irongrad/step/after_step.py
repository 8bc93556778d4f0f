"""Changes of the state after the update: target networks, moving averages, weight clipping."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from irongrad.diagnostics.source_lines import where
from irongrad.runtime.errors import CaptureError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class AfterStep:
    """A function that changes the state after an update, without gradients.

    Attributes:
        function: takes the step's model, or nothing if it has no parameter without a default.
        every: runs after each update whose number this divides; the first update has the number 1.
    """

    function: Callable[..., object]
    every: int = 1

    @property
    def numbers(self) -> dict[str, float]:
        """The parameters whose defaults are floats: run-time inputs of the compiled step, as hyperparameters are."""
        defaults = {name: p.default for name, p in _parameters(self.function).items()}
        return {name: default for name, default in defaults.items() if isinstance(default, float)}

    def run(
        self, model: nn.Module, numbers: Mapping[str, Any], beside: Iterable[nn.Module] = (), *, traced: bool = False
    ) -> None:
        """Call the function on the model, with other values for its numbers.

        A buffer of the model, or of a module beside it, may get another tensor: `m.average = 0.9 * m.average + …`. Its
        own tensor gets the value.

        Args:
            model: the model.
            numbers: the values by name.
            beside: the modules beside the model.
            traced: whether a trace records the call; its tensors have no memory to compare.

        Raises:
            CaptureError: a buffer gets a tensor that is another's, too, and would follow each change of that.
        """
        given = {name: numbers[name] for name in self.numbers if name in numbers}
        modules = [m for root in (model, *beside) for m in root.modules()]
        held = [(m._buffers, dict(m._buffers)) for m in modules]
        with torch.no_grad():
            self.function(*([model] if _takes_model(self.function) else []), **given)
            assigned = [change for buffers, before in held for change in _assigned(buffers, before)]
            if assigned and not traced:
                self._refuse_shared(assigned, modules)
            values = [new.clone() for _, _, _, new in assigned]  # buffers may have been exchanged
            for (buffers, name, old, _), value in zip(assigned, values, strict=True):
                old.copy_(value)
                buffers[name] = old

    def _refuse_shared(self, assigned: Sequence[_Assigned], modules: Sequence[nn.Module]) -> None:
        names: dict[int, set[str]] = {}
        for module in modules:
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and tensor.layout is torch.strided:
                    names.setdefault(tensor.untyped_storage()._cdata, set()).add(name)
        for _, name, _, new in assigned:
            if others := names[new.untyped_storage()._cdata] - {name}:
                raise CaptureError(
                    f"{where(self.function)}: after_step assigns to the buffer {name!r} the memory of "
                    f"{min(others)!r}, and it would follow each change of that. Assign a copy: .clone()"
                )

    def is_due(self, update: int) -> bool:
        """Whether it runs after the update of this number, counted from 1."""
        return update % self.every == 0


# A module's buffers, a name among them, the tensor before, and the tensor that was assigned.
_Assigned: TypeAlias = tuple[dict[str, torch.Tensor | None], str, torch.Tensor, torch.Tensor]


def _assigned(
    buffers: dict[str, torch.Tensor | None], before: Mapping[str, torch.Tensor | None]
) -> Iterator[_Assigned]:
    """The buffers that were assigned tensors of the same shape and dtype."""
    for name, old in before.items():
        new = buffers.get(name)
        if new is old or new is None or old is None or (new.shape, new.dtype) != (old.shape, old.dtype):
            continue
        yield buffers, name, old, new


def every(updates: int, function: Callable[..., object]) -> AfterStep:
    """Run `function` after every so many updates: `TrainStep(..., after_step=ig.every(500, update_target))`.

    Raises:
        CaptureError: `updates` is no positive integer.
    """
    if isinstance(updates, bool) or not isinstance(updates, int) or updates < 1:
        raise CaptureError(f"every({updates!r}, …): the number of updates must be a positive integer")
    return AfterStep(function, updates)


@dataclass(frozen=True)
class AfterSteps:
    """What runs after an update, in order, and the modules that it brings along.

    Attributes:
        steps: the functions.
        modules: each `AveragedModel` among them, by the name under which its tensors are state.
    """

    steps: tuple[AfterStep, ...] = ()
    modules: Mapping[str, nn.Module] = field(default_factory=dict)


def after_steps_of(given: Any, held: Sequence[nn.Module]) -> AfterSteps:
    """The functions that a user gave to run after the update: one or several, or an `AveragedModel`.

    Args:
        given: what the user gave; None for nothing.
        held: the modules whose state is part of the step already.

    Raises:
        CaptureError: one is neither; or it takes something else than the model.
    """
    known = {id(m) for module in held for m in module.modules()}
    steps: list[AfterStep] = []
    modules: dict[str, nn.Module] = {}
    for one in given if isinstance(given, (list, tuple)) else [given] if given is not None else []:
        after = one if isinstance(one, AfterStep) else AfterStep(one)
        if isinstance(after.function, AveragedModel):
            if id(after.function) not in known:
                modules[f"averaged{len(modules) or ''}"] = after.function
            after = AfterStep(after.function.update_parameters, after.every)
        _check(after)
        steps.append(after)
    names = [name for after in steps for name in after.numbers]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise CaptureError(f"two functions of after_step have the number {twice[0]!r}; rename one")
    return AfterSteps(tuple(steps), modules)


def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function written in C has none
        return {}


def _takes_model(function: Callable[..., object]) -> bool:
    """Whether the first parameter takes the model: it has no default."""
    parameters = list(_parameters(function).values())
    return bool(parameters) and parameters[0].kind in _POSITIONAL and parameters[0].default is inspect.Parameter.empty


def _check(after: AfterStep) -> None:
    if isinstance(getattr(after.function, "__self__", after.function), LRScheduler):
        raise CaptureError(
            "after_step is a scheduler, whose rates are inputs of the step: call scheduler.step() outside, and "
            "session.train_step(..., **ig.hypers(optimizer))"
        )
    if not callable(after.function) or isinstance(after.function, nn.Module):
        raise CaptureError(
            f"after_step is a {type(after.function).__name__}; it must be a function of the model, such as "
            "update_target(model, tau=0.005), an AveragedModel, or several of these"
        )
    needed = [p.name for p in _parameters(after.function).values() if p.default is p.empty and p.kind in _POSITIONAL]
    if len(needed) > 1:
        raise CaptureError(
            f"{where(after.function)}: after_step is called with the model alone, and this function needs "
            f"{', '.join(needed)}. Give the others defaults; those that are floats become inputs of the step"
        )

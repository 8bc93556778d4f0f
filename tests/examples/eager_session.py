"""The entry points of a session, run by eager PyTorch: a script that trains with one trains with the other, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import irongrad as ig
from irongrad.graph.eager_control_flow import eager_control_flow
from irongrad.operators.random import Draws
from irongrad.pipeline.capture.modes import in_evaluation, mode
from irongrad.pipeline.capture.step_modules import EntryModule, ReportingModule, name_of
from irongrad.step.hyperparameters import groups_of, hyperparameters, with_values
from irongrad.step.steps import named_steps


class EagerSession:
    """Trains the user's own objects as the user's loop would, on the random numbers that an artifact draws."""

    def __init__(self, step: ig.TrainStep) -> None:
        self._step, self._module = step, ReportingModule(step)
        self._draws = self._updates = 0
        self._first = {name: leaf.clone() for name, leaf in step.carried[0].leaves.items()}

    def train_step(self, **arguments: Any) -> Any:
        step = self._step
        self._set_hypers(arguments)
        for optimizer in step.optimizers:
            optimizer.zero_grad()
        with self._drawing(), mode(self._module.model, training=True):
            loss, values = self._module.named(*self._inputs(arguments))
            loss.backward()
        if step.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(step.trained, step.clip_grad_norm)
        for optimizer in step.optimizers:
            optimizer.step()
        self._updates += 1
        for after in step.after:
            if after.is_due(self._updates):
                after.run(step.model, arguments)
        numbers = {name: value.item() for name, value in values.items()}
        return (loss.item(), numbers) if numbers else loss.item()

    def eval_step(self, **arguments: Any) -> Any:
        with torch.no_grad(), self._drawing(), in_evaluation(self._step):
            loss, values = self._module.named(*self._inputs(arguments))
        numbers = {name: value.item() for name, value in values.items()}
        return (loss.item(), numbers) if numbers else loss.item()

    def call(self, name: str, /, **arguments: Any) -> Any:
        entry = self._step.own_entries[name]
        inputs = {n: torch.as_tensor(arguments[n], dtype=t.dtype) for n, t in entry.inputs.items()}
        probe = EntryModule(self._module, name, entry)
        with torch.no_grad(), self._drawing(), in_evaluation(self._step):
            found = {n: t.numpy().copy() for n, t in probe.named(*inputs.values()).items()}
        return found if len(found) > 1 else next(iter(found.values()))

    def reset_carry(self) -> None:
        for name, leaf in self._step.carried[0].leaves.items():
            leaf.copy_(self._first[name])

    def state(self) -> dict[str, np.ndarray]:
        tensors = [*self._module.named_parameters(), *self._module.named_buffers()]
        return {name_of(path): tensor.detach().numpy().copy() for path, tensor in tensors}

    def _inputs(self, arguments: dict[str, Any]) -> list[torch.Tensor]:
        return [torch.as_tensor(arguments[name], dtype=t.dtype) for name, t in self._step.inputs.items()]

    def _set_hypers(self, arguments: dict[str, Any]) -> None:
        given = [h for h in hyperparameters(self._step.optimizers) if h.name in arguments]
        for number, (_, group) in enumerate(groups_of(self._step.optimizers)):
            chosen = [h for h in given if h.group == number]
            group.update(with_values(group, chosen, lambda h: arguments[h.name]))

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """While open, draw what the artifact's next call that draws will draw."""
        with eager_control_flow(), Draws(self._step.seed, self._draws) as draws:
            yield
        self._draws += draws.used


class EagerSteps:
    """As `EagerSession`, for several steps over one state, which draw from one stream of random numbers."""

    def __init__(self, steps: ig.Steps) -> None:
        self._sessions = {name: EagerSession(step) for name, step in named_steps(steps).items()}
        self._steps = steps.steps
        self._draws = 0

    def train_step(self, step: str, **arguments: Any) -> Any:
        return self._of(step, lambda session: session.train_step(**arguments))

    def call(self, name: str, /, **arguments: Any) -> Any:
        (step,) = (n for n, one in self._steps.items() if name in one.own_entries)
        return self._of(step, lambda session: session.call(name, **arguments))

    def state(self) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for name, step in self._steps.items():
            tensors = [*step.model.named_parameters(), *step.model.named_buffers()]
            found |= {f"{name}.{path}": tensor.detach().numpy().copy() for path, tensor in tensors}
        return found

    def _of(self, step: str, run: Callable[[EagerSession], Any]) -> Any:
        session = self._sessions[step]
        session._draws = self._draws
        result = run(session)
        self._draws = session._draws
        return result

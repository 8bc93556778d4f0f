"""The entry points of a session, run by eager PyTorch: a script that trains with one trains with the other, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import irongrad as ig
from irongrad.graph.eager_control_flow import eager_control_flow
from irongrad.operators.random import Draws
from irongrad.pipeline.capture.modes import in_evaluation, mode
from irongrad.pipeline.capture.output_names import flatten_outputs
from irongrad.pipeline.capture.step_modules import ReportingModule, name_of
from irongrad.step.hyperparameters import groups_of, hyperparameters, with_values


class EagerSession:
    """Trains the user's own objects as the user's loop would, on the random numbers that an artifact draws."""

    def __init__(self, step: ig.TrainStep) -> None:
        self._step, self._module = step, ReportingModule(step)
        self._draws = self._updates = 0

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
        with torch.no_grad(), self._drawing(), in_evaluation(self._step):
            found = {n: t.numpy() for n, t in flatten_outputs(entry.run(inputs)).items()}
        return found if len(found) > 1 else next(iter(found.values()))

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

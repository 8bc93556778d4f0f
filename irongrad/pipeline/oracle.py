"""The float64 oracle: eager PyTorch runs of the user's own step, and how far a float32 run may be from it.

A compiled float32 result is right when its error against eager float64 is within a small factor of the error of
eager float32 itself. One float32 run is one sample of rounding; where the step is badly conditioned (a gradient
that is zero but for rounding, an Adam update of it, a ReLU at its corner) others would differ from it as much as
from the truth. So several are run, each with other rounding (`RoundingNoise`).
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils._python_dispatch import TorchDispatchMode

from irongrad.pipeline.capture import CapturedStep, PredictModule, StepModule, mode
from irongrad.pipeline.differentiate import name_of
from irongrad.pipeline.graphs import StepGraph
from irongrad.runtime.golden import Golden, key_of
from irongrad.runtime.manifest import STEPS, Role
from irongrad.step import TrainStep

FACTOR = 4.0  # how much worse than eager float32 a compiled float32 result may be
FLOOR_ULPS = 16.0  # what is allowed in any case, in last-place units of the largest element
NOISY_RUNS = 3
NOISE_ULPS = 2.0  # a sum in another order rounds more often than the one operator that eager has for it

_Values = dict[str, np.ndarray]


@dataclass(frozen=True)
class Run:
    """What one eager run gave: every loss, gradient, state tensor and prediction, by golden key, as float64."""

    values: _Values


def golden_of(captured: CapturedStep, graph: StepGraph, steps: int) -> Golden:
    """Run the oracle and the float32 runs, and return expected values with allowed errors."""
    step = captured.step
    try:
        exact, oracle = run_eager(captured, graph, torch.float64, steps, seed=None), "float64"
    except RuntimeError:
        # A model with float32 constants in its code cannot run in float64; its own float32 run stands in.
        exact, oracle = run_eager(captured, graph, torch.float32, steps, seed=None), "float32"
    samples = [run_eager(captured, graph, torch.float32, steps, seed) for seed in (None, *range(NOISY_RUNS))]
    allowed = {key: _allowed(value, [s.values[key] for s in samples]) for key, value in exact.values.items()}
    inputs = {n: t.detach().cpu().contiguous().numpy() for n, t in step.inputs.items()}
    return Golden(steps, oracle, inputs, exact.values, allowed)


def _allowed(exact: np.ndarray, samples: list[np.ndarray]) -> float:
    with np.errstate(invalid="ignore"):
        spread = max((float(np.max(np.abs(s - exact), initial=0.0)) for s in samples), default=0.0)
        scale = float(np.max(np.abs(exact), initial=0.0))
    return FACTOR * spread + FLOOR_ULPS * float(np.finfo(np.float32).eps) * scale


def run_eager(captured: CapturedStep, graph: StepGraph, dtype: torch.dtype, steps: int, seed: int | None) -> Run:
    """Train `steps` steps eagerly in `dtype`, on copies; with a seed, under `RoundingNoise`."""
    twin = twin_of(captured.step, dtype)
    module = StepModule(twin)
    inputs = {n: t.to(dtype) if t.is_floating_point() else t.clone() for n, t in twin.inputs.items()}
    values: _Values = {}
    noise = RoundingNoise(seed) if seed is not None else nullcontext()
    with noise:
        _record_inference(captured, module, inputs, values)
    with noise, mode(module.model, training=True):
        for number in range(steps):
            for optimizer in twin.optimizers:
                optimizer.zero_grad(set_to_none=True)
            loss = module(*(t.clone() for t in inputs.values()))
            loss.backward()
            values[key_of("loss", number)] = _array(loss)
            gradients = {name_of(n): p.grad for n, p in module.named_parameters()}
            for name in graph.gradients:
                values[key_of("gradient", number, name)] = _array(gradients[name])
            _clip(twin)
            for optimizer in twin.optimizers:
                optimizer.step()
            for name, tensor in eager_state(module, twin, graph, number + 1).items():
                values[key_of("state", number + 1, name)] = _array(tensor)
    return Run(values)


def twin_of(step: TrainStep, dtype: torch.dtype) -> TrainStep:
    """A deep copy of the step whose floating-point parameters, buffers and optimizer state have `dtype`."""
    model, loss, optimizers = copy.deepcopy((step.model, step.loss, list(step.optimizers)))
    model.to(dtype)
    if isinstance(loss, nn.Module):
        loss.to(dtype)
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim:
                    state[key] = value.to(dtype)
        for group in optimizer.param_groups:
            if isinstance(optimizer, torch.optim.Adafactor) and group["eps"][0] is None:
                # None means the epsilon of the parameters' dtype, which is float32 in the compiled step.
                group["eps"] = (torch.finfo(torch.float32).eps, group["eps"][1])
    return TrainStep(model, loss, optimizers, step.inputs, step.model_inputs, step.clip_grad_norm, step.clip_grad_value)


def eager_state(module: StepModule, step: TrainStep, graph: StepGraph, steps: int) -> dict[str, torch.Tensor]:
    """The state of an eager step under the compiled state's names."""
    parameters = {name_of(n): p for n, p in module.named_parameters()}
    tensors: dict[str, torch.Tensor] = {**parameters, **{name_of(n): b for n, b in module.named_buffers()}}
    states = {id(p): s for o in step.optimizers for p, s in o.state.items()}
    result: dict[str, torch.Tensor] = {}
    for tensor in graph.state:
        if tensor.role is Role.OPTIMIZER:
            _, key, name = tensor.name.split("/", 2)
            result[tensor.name] = states[id(parameters[name])][key]
        elif tensor.name == STEPS:
            result[STEPS] = tensor.initial + steps
        else:
            result[tensor.name] = tensors.get(tensor.name, tensor.initial)
    return result


class RoundingNoise(TorchDispatchMode):
    """Multiply every computed floating-point value by 1 + u, |u| up to two units in the last place of float32.

    Monte Carlo arithmetic (D. S. Parker, "Monte Carlo Arithmetic", UCLA CSD-970002, 1997): the spread of such runs
    shows how far rounding alone may move each result.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.is_mutable and result is not None and _is_scalar(result):
            return result  # a step count is no rounded value
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                unit = torch.rand(tensor.shape, generator=self._generator, dtype=torch.float32) * 2 - 1
                tensor.mul_(1 + unit.to(tensor.dtype) * NOISE_ULPS * torch.finfo(torch.float32).eps)
        return result


def _is_scalar(result: object) -> bool:
    return isinstance(result, torch.Tensor) and result.ndim == 0


def _clip(step: TrainStep) -> None:
    held = [p for o in step.optimizers for g in o.param_groups for p in g["params"]]
    if step.clip_grad_value is not None:
        clip_grad_value_(held, step.clip_grad_value)
    if step.clip_grad_norm is not None:
        clip_grad_norm_(held, step.clip_grad_norm)


def _record_inference(
    captured: CapturedStep, module: StepModule, inputs: dict[str, torch.Tensor], values: _Values
) -> None:
    with torch.no_grad(), mode(module.model, training=False):
        values[key_of("eval", 0)] = _array(module(*(t.clone() for t in inputs.values())))
        if captured.predict is not None:
            probe = PredictModule(module, captured.predict_inputs)
            outputs = probe.named(*(inputs[n].clone() for n in captured.predict_inputs))
            for name in captured.output_names:
                values[key_of("predict", 0, name)] = _array(outputs[name])


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().to(torch.float64).numpy().copy()

"""Run the user's own step in eager PyTorch, and record every value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from irongrad.graph.eager_control_flow import eager_control_flow
from irongrad.graph.step_graph import StepGraph
from irongrad.operators.decompositions.registry import BeforeAutograd
from irongrad.pipeline.capture.capture import CapturedStep
from irongrad.pipeline.capture.modes import mode, without_fast_path
from irongrad.pipeline.capture.recurrent_layers import eager_lstm
from irongrad.pipeline.capture.step_modules import (
    PiecesModule,
    ReportingModule,
    StepModule,
    name_of,
)
from irongrad.pipeline.oracle.eager_float64 import eager_float64
from irongrad.pipeline.oracle.eager_inference import Recorder, draws_of, record_inference
from irongrad.pipeline.oracle.eager_loss_scale import EagerScaler, Skips
from irongrad.pipeline.oracle.rounding_noise import RoundingNoise, noise_errors_suppressed
from irongrad.pipeline.oracle.substitutes import Substitutes
from irongrad.runtime.golden import key_of
from irongrad.runtime.manifest import DRAWS, STEPS, Role
from irongrad.step.borrow import borrowed
from irongrad.step.hyperparameters import groups_of, hyperparameters, with_values
from irongrad.step.loss_scale import loss_scale_of
from irongrad.step.optimizer_slots import foreign_values
from irongrad.step.train_step import TrainStep, micro_batches

# The elements of a state of which one copy in float64 takes half a gigabyte.
HUGE = 64_000_000


def is_huge(graph: StepGraph) -> bool:
    """Whether the state is so large that its runs take longer than iree-compile, and its copies fill the memory."""
    return elements_of(graph) > HUGE


def elements_of(graph: StepGraph) -> int:
    """The number of elements in the state of a step."""
    return sum(int(t.initial.numel()) for t in graph.state)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite, in one pass over a real tensor: `isfinite` makes a tensor first."""
    if not tensor.numel() or tensor.is_complex():
        return bool(tensor.isfinite().all())
    return all(map(math.isfinite, map(float, tensor.detach().aminmax())))


@dataclass(frozen=True)
class Variant:
    """How a run differs from the user's own training.

    Attributes:
        hypers: hyperparameters by name.
        hyper_steps: the numbers of the steps with these hyperparameters; None for all.
        zero_steps: the numbers of the steps whose gradients are all zero; they have no forward and no loss.
        gradient: the only value of the gradients of all other steps, which then have no forward and no loss either;
            None for the user's own gradients.
        later: inputs that replace the example's after the first step; evaluation is run at both.
    """

    hypers: Mapping[str, float] = field(default_factory=dict)
    hyper_steps: frozenset[int] | None = None
    zero_steps: frozenset[int] = frozenset()
    gradient: float | None = None
    later: Mapping[str, torch.Tensor] = field(default_factory=dict)


PLAIN = Variant()


@dataclass(frozen=True)
class First:
    """Where a run begins, if training has begun before it.

    Attributes:
        step: the number of training steps before.
        calls: the number of calls before that drew random numbers.
        scaler: the loss scale as it is since then; None for that at the beginning.
    """

    step: int = 0
    calls: int = 0
    scaler: EagerScaler | None = None


@contextmanager
def half_of_the_threads() -> Iterator[None]:
    """While open, PyTorch uses half of its threads, and leaves the other cores to processes such as iree-compile.

    OpenMP threads spin while they wait for each other. If another process occupies the core of one thread, all threads
    wait. A run on two cores then took three to seven times the CPU time of a run on one core.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@eager_control_flow()
@eager_lstm()
@without_fast_path()
def run_eager(
    captured: CapturedStep,
    graph: StepGraph,
    dtype: torch.dtype | None,
    steps: int,
    seed: int | None,
    record: Recorder,
    skips: Skips | None = None,
    variant: Variant = PLAIN,
    *,
    infers: bool = True,
    is_alone: bool = False,
    note: Callable[[Exception], object] = bool,
) -> Skips:
    """Train the user's own objects for `steps` steps, pass every value to `record`, and put the objects back.

    Args:
        captured: the captured step.
        graph: has the names of the values.
        dtype: the dtype of floating-point parameters and inputs; None keeps the step's own.
        steps: the number of training steps.
        seed: the seed of `RoundingNoise`; None for no noise.
        record: receives the values.
        skips: the updates to skip; None skips those whose gradients overflow under a dynamic loss scale.
        variant: how the run differs from the user's own training.
        infers: whether evaluation, prediction and the user's entries are run too, before training.
        is_alone: whether no compiler runs beside it any more, so that it may take all cores.
        note: gets an error of the noise that ends evaluation.

    Returns:
        The updates that were skipped.
    """
    noise = RoundingNoise(seed) if seed is not None else nullcontext()
    wide = eager_float64 if dtype is torch.float64 else nullcontext
    cores = nullcontext() if is_alone or is_huge(graph) else half_of_the_threads()
    with cores, borrowed(captured.step, dtype), Substitutes():
        given = (captured.step.examples, *([{**captured.step.examples, **variant.later}] if variant.later else []))
        examples = [{n: _cast(t, dtype).clone() for n, t in tensors.items()} for tensors in given]
        for number, tensors in enumerate(examples if infers else ()):
            with wide(), noise_errors_suppressed(seed, note):  # training has tolerances, too, where evaluation has none
                record_inference(captured, graph, tensors, noise, record, number)
        inputs = [{n: tensors[n] for n in captured.step.inputs} for tensors in examples]
        return train(captured.step, graph, inputs, steps, noise, wide, record, skips, variant)


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor


def train(
    step: TrainStep,
    graph: StepGraph,
    inputs: Sequence[dict[str, torch.Tensor]],
    steps: int,
    noise: AbstractContextManager[object],
    wide: Callable[[], AbstractContextManager[object]],
    record: Recorder,
    skips: Skips | None,
    variant: Variant,
    first: First | None = None,
) -> Skips:
    """Train as a user would write it: zero_grad, forward, loss, backward, clip, step.

    `inputs` are those of the first step and of each one after it; the last are those of all others. `wide` is open
    around the user's code, but not around the loss scale, which is float32 in every run.
    """
    first = first or First()
    module = PiecesModule(step) if step.between else ReportingModule(step)
    scaler = first.scaler or EagerScaler(loss_scale_of(step), step.optimizers, skips)
    batches = [micro_batches(tensors, step.accumulate) for tensors in inputs]
    groups = [group for _, group in groups_of(step.optimizers)]
    # Only the step's hyperparameters: what else a group holds, such as a counter or a sum, is the optimizer's state. So
    # is a learning rate that the optimizer itself changes.
    free = [h for h in hyperparameters(step.optimizers) if h.name in graph.hypers]
    defaults = [(groups[h.group], h.key, groups[h.group][h.key]) for h in free]
    for number in range(first.step, first.step + steps):
        for group, key, value in defaults:
            group[key] = value
        if variant.hyper_steps is None or number in variant.hyper_steps:
            _set_hypers(step, variant.hypers)
        for optimizer in step.optimizers:
            optimizer.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        beside: list[dict[str, torch.Tensor]] = []
        parts = batches[min(number, len(batches) - 1)]
        filled = 0.0 if number in variant.zero_steps else variant.gradient
        for call, part in enumerate(parts if filled is None else (), first.calls + (number - first.step) * len(parts)):
            with draws_of(graph, call), noise, mode(module.model, training=True), BeforeAutograd(eager=True):
                with wide():
                    loss, values = _forward(module, [t.clone() for t in part.values()], number, record)
                scaled = scaler.scaled(loss / len(parts) if len(parts) > 1 else loss)
                with wide():
                    scaled.backward()
            losses.append(loss.detach())
            beside.append(values)
        _fill_gradients(module, graph, filled or 0.0)
        _record_losses(losses, beside, number, record)
        for name, gradient in _gradients(module, graph).items():
            record(key_of("gradient", number, name), gradient)
        with noise, wide() if step.scaler is None else nullcontext():
            scaler.unscale()
            _clip(step)
            scaler.step()
            for after in step.after:
                if after.is_due(int(graph.tensor(STEPS).initial) + number + 1):
                    after.run(step.model, {}, step.modules.values())
        for name, tensor in (eager_state(module, step, graph, number + 1) | scaler.state()).items():
            record(key_of("state", number + 1, name), tensor.detach())
    return scaler.skips


def _record_losses(
    losses: Sequence[torch.Tensor], beside: Sequence[dict[str, torch.Tensor]], step: int, record: Recorder
) -> None:
    """Record the mean loss of the micro-batches, and the means of the values beside it; a step at rest has none."""
    if losses:
        record(key_of("loss", step), torch.stack([*losses]).mean())
        for name in beside[0]:
            record(key_of("value", step, name), _mean([values[name] for values in beside]))


def _set_hypers(step: TrainStep, values: Mapping[str, float]) -> None:
    """Give the optimizers other hyperparameters; the names are those of the compiled step's inputs."""
    chosen = [h for h in hyperparameters(step.optimizers) if h.name in values]
    for number, (_, group) in enumerate(groups_of(step.optimizers)):
        group.update(with_values(group, [h for h in chosen if h.group == number], lambda h: values[h.name]))


def _forward(
    module: ReportingModule, values: list[torch.Tensor], step: int, record: Recorder
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss and the values beside it; for a step in pieces, record the model's outputs."""
    loss, named = module.named(*values)
    if not isinstance(module, PiecesModule):
        return loss, {name: tensor.clone() for name, tensor in named.items()}  # one may be a parameter, which changes
    for name, tensor in named.items():
        record(key_of("forward", step, name), tensor)
    return loss, {}


def _mean(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(values).mean() if len(values) > 1 else values[0]


def _fill_gradients(module: StepModule, graph: StepGraph, value: float) -> None:
    """Give gradients of one value to parameters that have none: all in a step that has no forward.

    In another step they are zero, and belong to parameters that only an untaken branch uses, as with torch.cond.
    """
    for path, parameter in module.named_parameters():
        if parameter.grad is None and name_of(path) in graph.gradients:
            parameter.grad = torch.full_like(parameter, value)


def _gradients(module: StepModule, graph: StepGraph) -> dict[str, torch.Tensor]:
    """The gradients of a step; empty if no entry point returns gradients."""
    if "accumulate" not in graph.functions:
        return {}
    found = {name_of(n): p.grad for n, p in module.named_parameters()}
    return {name: found[name] for name in graph.gradients}


def eager_state(module: StepModule, step: TrainStep, graph: StepGraph, steps: int) -> dict[str, torch.Tensor]:
    """Return the state after `steps` eager steps, under the names of the compiled state."""
    parameters = {name_of(n): p for n, p in module.named_parameters()}
    tensors: dict[str, torch.Tensor] = {**parameters, **{name_of(n): b for n, b in module.named_buffers()}}
    states = {id(p): s for o in step.optimizers for p, s in o.state.items()}
    foreign = foreign_values(step.optimizers, {id(p): n for n, p in parameters.items()})
    result: dict[str, torch.Tensor] = {}
    for tensor in graph.state:
        if tensor.name in foreign:
            result[tensor.name] = foreign[tensor.name]
        elif tensor.role is Role.OPTIMIZER:
            _, key, name = tensor.name.split("/", 2)
            # An optimizer has no state yet if every step so far was skipped.
            result[tensor.name] = states.get(id(parameters.get(name)), {}).get(key, tensor.initial)
        elif tensor.name == STEPS:
            result[tensor.name] = tensor.initial + steps
        elif tensor.name == DRAWS:
            result[tensor.name] = tensor.initial + steps * (graph.accumulate if graph.trains_at_random else 0)
        else:
            result[tensor.name] = tensors.get(tensor.name, tensor.initial)
    return result


def _clip(step: TrainStep) -> None:
    if step.clip_grad_value is not None:
        clip_grad_value_(step.trained, step.clip_grad_value)
    if step.clip_grad_norm is not None:
        clip_grad_norm_(step.trained, step.clip_grad_norm)

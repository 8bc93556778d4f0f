"""A run of the user's own step in eager PyTorch, value by value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from irongrad.graph.eager_control_flow import eager_control_flow
from irongrad.graph.step_graph import StepGraph
from irongrad.operators.decompositions.registry import BeforeAutograd
from irongrad.operators.random import Draws
from irongrad.pipeline.capture.capture import CapturedStep, PiecesModule, PredictModule, StepModule, mode, name_of
from irongrad.pipeline.capture.recurrent_layers import eager_lstm
from irongrad.pipeline.oracle.eager_loss_scale import EagerScaler, Skips
from irongrad.pipeline.oracle.rounding_noise import RoundingNoise
from irongrad.pipeline.oracle.step_copies import twin_of
from irongrad.runtime.golden import key_of
from irongrad.runtime.manifest import DRAWS, STEPS, Role
from irongrad.step.loss_scale import loss_scale_of
from irongrad.step.train_step import TrainStep, micro_batches

# Takes a loss, gradient, state tensor or prediction of an eager run, by its golden key. Nothing writes to it any more.
Recorder = Callable[[str, torch.Tensor], None]


@contextmanager
def half_of_the_threads() -> Iterator[None]:
    """Leave the other half of the cores to what else runs, such as iree-compile beside the first runs.

    OpenMP's threads spin while they wait for each other. Where one waits for a core that another process has, all do,
    and a run on two cores was seen to take three to seven times the CPU time that it takes on one.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@half_of_the_threads()
@eager_control_flow()
@eager_lstm()
def run_eager(
    captured: CapturedStep,
    graph: StepGraph,
    dtype: torch.dtype | None,
    steps: int,
    seed: int | None,
    record: Recorder,
    skips: Skips | None = None,
) -> Skips:
    """Train `steps` steps eagerly on copies, and hand every value to `record`.

    Args:
        captured: the step.
        graph: names the values.
        dtype: of the floating-point parameters and inputs; None for the step's own.
        steps: how many.
        seed: of `RoundingNoise`; None for none.
        record: takes the values.
        skips: the updates to skip; None for those whose gradients overflow under a dynamic loss scale.

    Returns:
        Which updates were skipped.
    """
    twin = twin_of(captured.step, dtype)
    module = PiecesModule(twin) if twin.between else StepModule(twin)
    scaler = EagerScaler(loss_scale_of(captured.step), twin.optimizers, skips)
    inputs = {n: t.to(dtype) if dtype and t.is_floating_point() else t.clone() for n, t in twin.inputs.items()}
    noise = RoundingNoise(seed) if seed is not None else nullcontext()
    _record_inference(captured, twin, graph, inputs, noise, record)
    parts = micro_batches(inputs, twin.accumulate)
    for number in range(steps):
        for optimizer in twin.optimizers:
            optimizer.zero_grad(set_to_none=True)
        losses = []
        for call, part in enumerate(parts, number * len(parts)):
            with _draws(graph, call), noise, mode(module.model, training=True), BeforeAutograd(eager=True):
                loss = _forward(module, [t.clone() for t in part.values()], number, record)
                scaler.scaled(loss / len(parts) if len(parts) > 1 else loss).backward()
            losses.append(loss.detach())
        _fill_gradients(module, graph)
        record(key_of("loss", number), torch.stack(losses).mean())
        for name, gradient in _gradients(module, graph).items():
            record(key_of("gradient", number, name), gradient.clone())
        with noise:
            scaler.unscale()
            _clip(twin)
            scaler.step()
        for name, tensor in (eager_state(module, twin, graph, number + 1) | scaler.state()).items():
            record(key_of("state", number + 1, name), tensor if number + 1 == steps else tensor.clone())
    return scaler.skips


def _forward(module: StepModule, values: list[torch.Tensor], step: int, record: Recorder) -> torch.Tensor:
    """The loss; of a step in pieces, the model's outputs too are recorded."""
    if not isinstance(module, PiecesModule):
        loss: torch.Tensor = module(*values)
        return loss
    loss, outputs = module.named(*values)
    for name, tensor in outputs.items():
        record(key_of("forward", step, name), tensor.clone())  # it may be a parameter
    return loss


def _fill_gradients(module: StepModule, graph: StepGraph) -> None:
    """Zeros for parameters that only a branch uses which was not taken, as torch.cond's gradient has them."""
    for path, parameter in module.named_parameters():
        if parameter.grad is None and name_of(path) in graph.gradients:
            parameter.grad = torch.zeros_like(parameter)


def _gradients(module: StepModule, graph: StepGraph) -> dict[str, torch.Tensor]:
    """The gradients of a step, where an entry point gives any out."""
    if "accumulate" not in graph.functions:
        return {}
    found = {name_of(n): p.grad for n, p in module.named_parameters()}
    return {name: found[name] for name in graph.gradients}


def eager_state(module: StepModule, step: TrainStep, graph: StepGraph, steps: int) -> dict[str, torch.Tensor]:
    """The state of an eager step under the compiled state's names."""
    parameters = {name_of(n): p for n, p in module.named_parameters()}
    tensors: dict[str, torch.Tensor] = {**parameters, **{name_of(n): b for n, b in module.named_buffers()}}
    states = {id(p): s for o in step.optimizers for p, s in o.state.items()}
    result: dict[str, torch.Tensor] = {}
    for tensor in graph.state:
        if tensor.role is Role.OPTIMIZER:
            _, key, name = tensor.name.split("/", 2)
            # There is none yet where every step so far was skipped.
            result[tensor.name] = states.get(id(parameters[name]), {}).get(key, tensor.initial)
        elif tensor.name in (STEPS, DRAWS):
            result[tensor.name] = tensor.initial + steps * (graph.accumulate if tensor.name == DRAWS else 1)
        else:
            result[tensor.name] = tensors.get(tensor.name, tensor.initial)
    return result


def _clip(step: TrainStep) -> None:
    held = [p for o in step.optimizers for g in o.param_groups for p in g["params"]]
    if step.clip_grad_value is not None:
        clip_grad_value_(held, step.clip_grad_value)
    if step.clip_grad_norm is not None:
        clip_grad_norm_(held, step.clip_grad_norm)


def _draws(graph: StepGraph, number: int) -> AbstractContextManager[object]:
    """The random numbers of a compiled step after `number` others; nothing where it draws none."""
    return Draws(graph.seed, number) if graph.seed is not None else nullcontext()


def _record_inference(
    captured: CapturedStep,
    step: TrainStep,
    graph: StepGraph,
    inputs: dict[str, torch.Tensor],
    noise: AbstractContextManager[object],
    record: Recorder,
) -> None:
    """Each from the initial state, on a copy: a forward may write into buffers in evaluation mode too."""
    if captured.eval is not None:
        module = StepModule(twin_of(step, None))
        with torch.no_grad(), _draws(graph, 0), noise, mode(module.model, training=False):
            record(key_of("eval", 0), module(*(t.clone() for t in inputs.values())))
    if captured.predict is None:
        return
    module = StepModule(twin_of(step, None))
    probe = PredictModule(module, captured.predict_inputs)
    with torch.no_grad(), _draws(graph, 0), noise, mode(module.model, training=False):
        outputs = probe.named(*(inputs[n].clone() for n in captured.predict_inputs))
    for name in captured.output_names:
        record(key_of("predict", 0, name), outputs[name])

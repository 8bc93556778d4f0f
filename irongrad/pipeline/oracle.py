"""The float64 oracle: eager PyTorch runs of the user's own step, and how far a float32 run may be from it.

A compiled result is right when its error against eager float64 is within a small factor of the error of eager in
the step's own dtypes, float32 as a rule. One such run is one sample of rounding; where the step is badly
conditioned (a gradient that is zero but for rounding, an Adam update of it, a ReLU at its corner) others would
differ from it as much as from the truth. So several are run, each with other rounding (`RoundingNoise`).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from types import CellType, FunctionType

import numpy as np
import torch
from torch import nn
from torch._decomp import get_decompositions
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils._python_dispatch import TorchDispatchMode

from irongrad.decompositions.registry import BeforeAutograd
from irongrad.pipeline.capture import CapturedStep, PiecesModule, PredictModule, StepModule, mode
from irongrad.pipeline.dtypes import to_numpy
from irongrad.pipeline.eager_control_flow import eager_control_flow
from irongrad.pipeline.eager_float64 import eager_float64
from irongrad.pipeline.eager_scaling import EagerScaler, Skips
from irongrad.pipeline.graphs import StepGraph
from irongrad.pipeline.halves import HALVES
from irongrad.pipeline.recurrent_layers import eager_lstm
from irongrad.pipeline.scaling import loss_scale_of
from irongrad.pipeline.state_names import name_of
from irongrad.random import Draws, is_random
from irongrad.runtime.golden import Golden, key_of
from irongrad.runtime.manifest import DRAWS, STEPS, Role
from irongrad.runtime.memory import keep_freed_memory
from irongrad.runtime.verification import largest_error
from irongrad.step import TrainStep, micro_batches
from irongrad.tolerance import FACTOR as FACTOR
from irongrad.tolerance import FLOOR_ULPS as FLOOR_ULPS
from irongrad.tolerance import NOISE_ULPS, NOISE_ULPS_OF_HALVES, allowed_error
from irongrad.tolerance import NOISY_RUNS as NOISY_RUNS

NOISY_RUNS_OF_LARGE_STEPS = 3  # large: a state of more than LARGE elements, where a run takes seconds
LARGE = 1_000_000

_STRETCH = 1 << 17

# Operators that move values and round nothing, or have a floating-point mask as a result.
_MOVES = frozenset(
    {
        torch.ops.aten.clone.default,
        torch.ops.aten.copy_.default,
        torch.ops.aten.multilabel_margin_loss_forward.default,
    }
)


# Operators that subtract sums they make inside, in parts that round on their own. Where the difference is zero but for
# rounding, so is what noise on their results alone would add.
_FUSED = get_decompositions(
    [
        torch.ops.aten.native_batch_norm_backward,
        torch.ops.aten.native_group_norm_backward,
        torch.ops.aten.native_layer_norm_backward,
        torch.ops.aten._softmax_backward_data,
        torch.ops.aten._log_softmax_backward_data,
    ]
)


# Takes a loss, gradient, state tensor or prediction of an eager run, by its golden key.
Recorder = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True)
class Values:
    """Every value of one eager run.

    Attributes:
        arrays: by golden key, as float64.
    """

    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def record(self, key: str, tensor: torch.Tensor) -> None:
        """Keep a copy of `tensor`."""
        self.arrays[key] = tensor.detach().cpu().to(torch.float64, copy=True).numpy()


@dataclass(frozen=True)
class Spread:
    """How far runs in the step's own dtypes are from the exact values; nothing of the runs themselves is kept.

    Attributes:
        exact: the exact values.
        largest: the largest absolute difference of any run, by golden key.
        eps: the machine epsilon of the dtype in which each value is computed; 0 for integers and booleans.
    """

    exact: Values
    largest: dict[str, float] = field(default_factory=dict)
    eps: dict[str, float] = field(default_factory=dict)

    def record(self, key: str, tensor: torch.Tensor) -> None:
        """Compare `tensor` with its exact value."""
        error = largest_error(to_numpy(tensor), self.exact.arrays[key])
        self.largest[key] = max(self.largest.get(key, 0.0), error)
        self.eps[key] = float(torch.finfo(tensor.dtype).eps) if tensor.is_floating_point() else 0.0

    def widened_by(self, run: Callable[[int | None], object], elements: int = 0) -> Iterator[dict[str, float]]:
        """After each of the runs, what they allow so far of every value, once each was compared.

        Args:
            run: makes one run with the noise of a seed, or without where that is None, and records its values.
            elements: how many the step's state has, by which it is known to be large.
        """
        # Those with noise first: their errors are larger.
        for seed in (*range(NOISY_RUNS if elements <= LARGE else NOISY_RUNS_OF_LARGE_STEPS), None):
            with _as_far_as_noise_allows(seed):
                run(seed)
            if self.exact.arrays.keys() <= self.largest.keys():
                yield {key: self.allowed(key) for key in self.exact.arrays}

    def allowed(self, key: str) -> float:
        """The largest error of a compiled value that is right."""
        return allowed_error(self.exact.arrays[key], self.largest[key], self.eps[key])


def golden_runs(captured: CapturedStep, graph: StepGraph, steps: int) -> Iterator[Golden]:
    """Run the oracle; then, after each of the runs in the step's own dtypes, the values with what the runs allow."""
    keep_freed_memory()  # every run allocates what the run before has freed
    step = captured.step
    exact, oracle = Values(), "float64"
    # Values overflow in the step's own dtypes, so a run in these says which updates are skipped.
    skips = run_eager(captured, graph, None, steps, None, lambda key, tensor: None) if step.scaler else None
    try:
        with eager_float64():
            run_eager(captured, graph, torch.float64, steps, None, exact.record, skips)
    except RuntimeError:
        # A model with float32 constants in its code cannot run in float64; its own run stands in, without autocast.
        oracle = str(next(step.model.parameters()).dtype).removeprefix("torch.")
        plain = replace(captured, step=replace(step, precision="f32", loss_scale=step.scaler))
        run_eager(plain, graph, None, steps, None, exact.record, skips)
    inputs = {n: to_numpy(t) for n, t in step.inputs.items()}
    spread = Spread(exact)
    elements = sum(t.initial.numel() for t in graph.state)

    def run(seed: int | None) -> None:
        run_eager(captured, graph, None, steps, seed, spread.record)

    for allowed in spread.widened_by(run, elements):
        yield Golden(steps, oracle, inputs, exact.arrays, allowed)


@contextmanager
def _as_far_as_noise_allows(seed: int | None) -> Iterator[None]:
    """End a run with noise, one that has a seed, where an operator does not take what it makes of its arguments.

    Binary cross-entropy refuses a probability of 1 and a unit in the last place, a quantile the place behind the last.
    """
    with suppress(*(() if seed is None else (RuntimeError, IndexError, ValueError))):
        yield


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
        gradients = {name_of(n): p.grad for n, p in module.named_parameters()}
        for name in graph.gradients:
            record(key_of("gradient", number, name), gradients[name])
        with noise:
            scaler.unscale()
            _clip(twin)
            scaler.step()
        for name, tensor in (eager_state(module, twin, graph, number + 1) | scaler.state()).items():
            record(key_of("state", number + 1, name), tensor)
    return scaler.skips


def _forward(module: StepModule, values: list[torch.Tensor], step: int, record: Recorder) -> torch.Tensor:
    """The loss; of a step in pieces, the model's outputs too are recorded."""
    if not isinstance(module, PiecesModule):
        loss: torch.Tensor = module(*values)
        return loss
    loss, outputs = module.named(*values)
    for name, tensor in outputs.items():
        record(key_of("forward", step, name), tensor)
    return loss


def _fill_gradients(module: StepModule, graph: StepGraph) -> None:
    """Zeros for parameters that only a branch uses which was not taken, as torch.cond's gradient has them."""
    for path, parameter in module.named_parameters():
        if parameter.grad is None and name_of(path) in graph.gradients:
            parameter.grad = torch.zeros_like(parameter)


def twin_of(step: TrainStep, dtype: torch.dtype | None) -> TrainStep:
    """A deep copy of the step; its floating-point parameters, buffers and optimizer state have `dtype` unless None."""
    memo: dict[int, object] = {}
    model, optimizers = copy.deepcopy(step.model, memo), copy.deepcopy(list(step.optimizers), memo)
    loss = _rebound(step.loss, memo) if isinstance(step.loss, FunctionType) else copy.deepcopy(step.loss, memo)
    if dtype is not None:
        for optimizer in optimizers:
            _cast_optimizer(optimizer, dtype)
        model.to(dtype)
        if isinstance(loss, nn.Module):
            loss.to(dtype)
    return replace(step, model=model, loss=loss, optimizer=optimizers)


def _rebound(function: FunctionType, memo: dict[int, object]) -> FunctionType:
    """A copy of `function` that sees the copies in `memo` where it names the model itself (to penalise its weights)."""
    outside = {n: memo.get(id(v), v) for n, v in function.__globals__.items()}
    cells = tuple(CellType(memo.get(id(c.cell_contents), c.cell_contents)) for c in function.__closure__ or ())
    twin = FunctionType(function.__code__, outside, function.__name__, function.__defaults__, cells)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _cast_optimizer(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                state[key] = value.to(dtype)
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.Adafactor) and group["eps"][0] is None:
            # None means the epsilon of the parameters' dtype, which is that of the compiled step.
            group["eps"] = (torch.finfo(group["params"][0].dtype).eps, group["eps"][1])


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


class RoundingNoise(TorchDispatchMode):
    """Multiply every computed floating-point value by 1 + u, |u| up to `NOISE_ULPS` last-place units of its dtype.

    So noisy are the last bits of compiled code, which sums in another order; half-precision ones are less noisy
    (`NOISE_ULPS_OF_HALVES`). This is Monte Carlo arithmetic (D. S. Parker, "Monte Carlo Arithmetic", UCLA CSD-970002,
    1997): the spread of such runs shows how far rounding alone may move each result.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        # Drawing a number for every value would take longer than the run: each tensor takes a random stretch of these.
        self._units = torch.rand(2 * _STRETCH, generator=torch.Generator().manual_seed(seed)) * 2 - 1
        self._factors: dict[torch.dtype, torch.Tensor] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in _FUSED:
            with self:
                return _FUSED[func](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if _is_exact(func):
            return result
        with torch._C.DisableTorchFunction():  # each mode of functions would see every operator of the noise
            tensors = [result] if isinstance(result, torch.Tensor) else torch.utils._pytree.tree_leaves(result)
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not _is_count(func, result):
                    self._perturb(tensor)
        return result

    def _perturb(self, tensor: torch.Tensor) -> None:
        if tensor._is_zerotensor():
            return  # autograd's zero has no memory; torch 2.13 ends the process when it is written to
        start, size = self._random.randrange(_STRETCH), tensor.numel()
        factors = self._factors_of(tensor.dtype)
        if size <= _STRETCH:
            tensor.mul_(factors[start : start + size].view(tensor.shape))
            return
        flat, whole = tensor.reshape(-1), size - size % _STRETCH
        flat[:whole].view(-1, _STRETCH).mul_(factors[start : start + _STRETCH])
        flat[whole:].mul_(factors[start : start + size - whole])
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))

    def _factors_of(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._factors:
            wide = torch.promote_types(dtype, torch.float32)
            ulps = NOISE_ULPS_OF_HALVES if dtype in HALVES else NOISE_ULPS
            self._factors[dtype] = 1 + self._units.to(wide) * (ulps * torch.finfo(dtype).eps)
        return self._factors[dtype]


@cache
def _is_exact(operator: torch._ops.OpOverload) -> bool:
    """Whether it rounds nothing: a draw is exact too, as a mask is 0 or 1, and a uniform number below 1."""
    return is_random(operator) or operator.is_view or operator in _MOVES


def _is_count(operator: torch._ops.OpOverload, result: object) -> bool:
    """Whether the result is a number that is updated in place, as an optimizer counts its steps."""
    return isinstance(result, torch.Tensor) and result.ndim == 0 and operator._schema.is_mutable


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

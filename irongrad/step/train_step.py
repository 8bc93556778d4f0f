"""`TrainStep`, the compiler's input from the user."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from irongrad.diagnostics.source_lines import caller
from irongrad.diagnostics.stage_errors import refusals_name
from irongrad.runtime.errors import CaptureError
from irongrad.runtime.manifest import TICKET, of_entry
from irongrad.runtime.notebook_table import notebook_table
from irongrad.sizes.buckets import Bucket, combinations
from irongrad.sizes.constraints import conditions_of
from irongrad.step.after_step import AfterStep, after_steps_of
from irongrad.step.argument_checks import check_kinds, check_limits, check_modules, outside_inference
from irongrad.step.call import Call, call_between
from irongrad.step.carry import Carry, carry_of
from irongrad.step.entries import Entry, entries_of, examples_of
from irongrad.step.sam import SAM
from irongrad.step.varying_sizes import VaryingSizes, sizes_in

INFERENCE = ("eval", "predict")


# The values of `TrainStep.precision`, each with the dtype for autocast.
PRECISIONS = {"f32": None, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class TrainStep:
    """One training step of an ordinary PyTorch model.

    Args:
        model: any `nn.Module`. Tied weights, buffers and frozen parameters are kept as they are. If `model.training` is
            true, the training graph is captured in the modules' present modes, else after `model.train()`. Evaluation
            and prediction are always captured after `model.eval()`.
        loss: `loss(model_output, *targets) -> scalar tensor`, a function or an `nn.Module`. None if the model returns
            its own loss: a scalar tensor, or an output with the field or key `loss` (as Hugging Face's ModelOutput
            has). It may return numbers beside the loss, `(loss, {"accuracy": accuracy})`. The entry points return them
            too; the gradient is that of the loss alone.
        optimizer: a `torch.optim` optimizer over the model's parameters, or several over disjoint parts of them. State
            that it already holds is taken over.
        inputs: an example batch, name to tensor. Shapes and dtypes are compiled in. The values are used to verify the
            result, so they should be valid (class indices in range, and so on).
        model_inputs: names of the inputs of the model; the others go to the loss in the order of `inputs`. By default,
            those that `model.forward` names as parameters. If it names none of them, the first inputs are passed by
            position, as many as it has required positional parameters.
        loss_inputs: names of the inputs of the loss, in the order in which it takes them after the model's output. They
            may be inputs of the model too, such as the image that an autoencoder reconstructs. By default, all inputs
            that are not the model's, in the order of `inputs`.
        clip_grad_norm: the `max_norm` of `torch.nn.utils.clip_grad_norm_`, applied before the update.
        clip_grad_value: the `clip_value` of `torch.nn.utils.clip_grad_value_`, applied before the update.
        seed: the seed of the random numbers that the step draws, for dropout and the like; `Session.seed` changes it.
        precision: `f32`, `bf16` or `f16`. With the last two, the model and the loss run under `torch.autocast` of that
            dtype. Parameters, gradients and optimizer state stay as they are.
        loss_scale: the factor of the loss in the backward pass; the gradients are divided by it afterwards. A number is
            a fixed scale. A `torch.amp.GradScaler` is a dynamic one, with its options and its present scale: a step
            whose gradients overflow is skipped. None is a new GradScaler for `f16`, and no scaling otherwise.
        accumulate: the number of micro-batches into which a step cuts its batch, along the first dimension of every
            input. They run forward and backward one after the other, in the memory of one. The update uses the mean of
            their gradients, and the loss is the mean of their losses.
        dynamic: names of the dimensions whose sizes vary from call to call, for each input, by position. Dimensions of
            one name have one size in a call.
        buckets: the sizes that the step is compiled for, by dimension, such as `{"B": [4, 8], "T": ig.pow2(16, 512)}`
            for every combination of them; or a list of combinations. A call runs in the smallest bucket that its inputs
            fit into, with the results of the step without padding. A dimension without sizes here has any size in every
            bucket, and nothing is padded along it. Without buckets, that holds for all dynamic dimensions.
        bucket_fallback: `dynamic` adds a function of any size for calls that no bucket holds. Without it such calls are
            refused.
        constraints: conditions on the sizes of every call, such as `"T % 8 == 0"` or `"S <= 2 * T"`. They compare
            dimensions and whole numbers. Calls that violate them are refused. Without constraints, only the model's
            own conditions hold.
        after_step: a function of the model that changes the state after each update, without gradients, such as
            `update_target(model, tau=0.005)`. Its parameters with floats as defaults become inputs of the step, as
            hyperparameters are. `ig.every(k, function)` runs it after every k updates. Or a
            `torch.optim.swa_utils.AveragedModel`, whose tensors become state; or several of these, in order.
        modules: further modules whose tensors are state of the step, by name, such as a target network that the loss
            or `after_step` uses and the model does not hold.
        sam: sharpness-aware minimisation with the optimizer as its base: `ig.SAM(rho=0.05)`. A step then runs forward
            and backward twice.
        carry: values that go from call to call, such as a recurrent model's hidden state, by name, each with its value
            at the beginning: a tensor, or a tuple of tensors. They are passed on like inputs, and the loss function
            returns their new values beside the loss: `(loss, {"hidden": hidden})`. `eval_step` carries values of its
            own. `Session.reset_carry` puts both back to the beginning.
        entries: further entry points over the same state, by name: a function and its example inputs, such as
            `{"act": (model.act, {"obs": obs})}`. The function is a method of the model, or calls the model; see
            `irongrad.Entry`. It runs in evaluation mode, without gradients, and changes no state. `dynamic` names its
            inputs with the entry before a dot, such as `act.obs`.
        between: names of the inputs that Python computes between the model and the loss; see `irongrad.pieces`.

    Raises:
        CaptureError: an input is no tensor or has no usable name. An optimizer holds other parameters. The precision or
            the loss scale is invalid. The batch cannot be cut into `accumulate` parts.
    """

    model: nn.Module
    loss: Callable[..., torch.Tensor] | None
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    inputs: Mapping[str, torch.Tensor]
    model_inputs: Sequence[str] | None = None
    loss_inputs: Sequence[str] | None = None
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    seed: int = 0
    precision: str = "f32"
    loss_scale: float | torch.amp.GradScaler | None = None
    accumulate: int = 1
    dynamic: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    buckets: Mapping[str, Sequence[int]] | Sequence[Bucket] = ()
    bucket_fallback: str = ""
    constraints: Sequence[str] = ()
    between: Sequence[str] = ()
    after_step: AfterStep | Callable[..., object] | Sequence[AfterStep | Callable[..., object]] | None = None
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    sam: SAM | None = None
    carry: Mapping[str, Any] = field(default_factory=dict)
    entries: Mapping[str, Entry | tuple[Callable[..., object], Mapping[str, torch.Tensor]]] = field(
        default_factory=dict
    )
    _made_at: str = field(default="", repr=False, compare=False)  # a field, so that `replace` keeps it

    def __post_init__(self) -> None:
        object.__setattr__(self, "_made_at", self._made_at or caller())
        with refusals_name(self.made_at):
            self._check()

    def _check(self) -> None:
        check_kinds(self.model, self.loss, self.optimizer, self.inputs)
        object.__setattr__(self, "inputs", outside_inference(self.inputs))
        object.__setattr__(self, "entries", entries_of(self.entries))
        check_modules(self.modules, self.model)
        made = after_steps_of(self.after_step, [self.model, *self.modules.values()])
        object.__setattr__(self, "after_step", made.steps)
        object.__setattr__(self, "modules", {**self.modules, **made.modules})
        carried = carry_of(self.carry, self.inputs)
        object.__setattr__(self, "_carried", (carried, carry_of(self.carry, self.inputs)))
        for field_name in ("model_inputs", "loss_inputs"):
            for name in getattr(self, field_name) or ():
                if name not in self.inputs and name not in carried.structures:
                    raise CaptureError(f"{field_name} names {name!r}, which is not in inputs {list(self.inputs)}")
        if self.loss_inputs is not None and self.loss is None:
            raise CaptureError("loss_inputs names inputs of the loss, and the model computes its own loss")
        if not (isinstance(self.seed, int) and 0 <= self.seed < 2**63):
            raise CaptureError(f"seed is {self.seed!r}; it must be an integer from 0 to 2**63 - 1")
        if self.precision not in PRECISIONS:
            raise CaptureError(f"precision is {self.precision!r}; it must be one of {', '.join(PRECISIONS)}")
        call_of(self).check(self.model, self.loss)
        _check_optimizers(self)
        check_limits({name: getattr(self, name) for name in ("clip_grad_norm", "clip_grad_value")})
        _check_loss_scale(self)
        _check_accumulate(self)
        _check_dynamic(self)
        _check_between(self)
        _check_carry(self)
        _check_sam(self)

    @property
    def made_at(self) -> str:
        """The user's line that made the step; empty if there is none."""
        return self._made_at

    @property
    def bucket_list(self) -> tuple[Bucket, ...]:
        """Every bucket, the one with the fewest elements first; empty for a step of fixed sizes."""
        return combinations(self.buckets) if self.buckets else ()

    @property
    def conditions(self) -> tuple[Any, ...]:
        """The conditions of `constraints`, as relations of named dimensions."""
        return conditions_of(self.constraints, sizes_of(self, self.inputs))

    @property
    def carried(self) -> tuple[Carry, Carry]:
        """What is carried from call to call: in training, and in evaluation."""
        carried: tuple[Carry, Carry] = vars(self)["_carried"]
        return carried

    @property
    def after(self) -> tuple[AfterStep, ...]:
        """What runs after each update, in order."""
        given = self.after_step if isinstance(self.after_step, tuple) else ()
        return tuple(after for after in given if isinstance(after, AfterStep))

    @property
    def own_entries(self) -> dict[str, Entry]:
        """The further entry points, by name."""
        return {name: entry for name, entry in self.entries.items() if isinstance(entry, Entry)}

    @property
    def examples(self) -> dict[str, torch.Tensor]:
        """The example of every input: of the step by its name, and of an entry by the names of both."""
        return {**self.inputs, **examples_of(self.own_entries)}

    def with_examples(self, examples: Mapping[str, torch.Tensor]) -> TrainStep:
        """Return the step with other examples for some of its inputs, named as `examples` names them."""
        entries = {
            name: replace(entry, inputs={n: examples.get(of_entry(name, n), t) for n, t in entry.inputs.items()})
            for name, entry in self.own_entries.items()
        }
        return replace(self, inputs={n: examples.get(n, t) for n, t in self.inputs.items()}, entries=entries)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers, always as a tuple."""
        if isinstance(self.optimizer, Sequence):
            return tuple(self.optimizer)
        return (self.optimizer,)

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that the optimizers hold."""
        return [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]

    @property
    def scaler(self) -> float | torch.amp.GradScaler | None:
        """The loss scale that `loss_scale` and `precision` select; None for none."""
        if self.loss_scale is None:
            return torch.amp.GradScaler("cpu") if self.precision == "f16" else None
        if isinstance(self.loss_scale, torch.amp.GradScaler):
            return self.loss_scale if self.loss_scale.is_enabled() else None
        return float(self.loss_scale)

    def _repr_html_(self) -> str:
        """The step as a notebook shows it: what it trains, and on what."""
        parameters = sum(p.numel() for p in self.model.parameters())
        loss = "the model's own" if self.loss is None else getattr(self.loss, "__name__", type(self.loss).__name__)
        inputs = (f"{n}: {str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for n, t in self.inputs.items())
        rows = [
            ("model", f"{type(self.model).__name__}, {parameters:,} parameters"),
            ("trained", f"{sum(p.numel() for p in self.trained):,} parameters"),
            ("loss", loss),
            ("optimizer", ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)),
            ("inputs", ", ".join(inputs)),
            ("precision", self.precision),
            ("micro-batches", self.accumulate),
            ("buckets", len(self.bucket_list) or "none"),
        ]
        return notebook_table(f"TrainStep {self.made_at}".strip(), rows)

    def autocast(self) -> AbstractContextManager[object]:
        """Return a new context for running the model and the loss."""
        dtype = PRECISIONS[self.precision]
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def micro_batches(inputs: Mapping[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]]:
    """Cut `inputs` into `count` equal parts along their first dimension; scalars go to every part."""
    parts = {n: t.chunk(count) if t.ndim and count > 1 else (t,) * count for n, t in inputs.items()}
    return [{n: part[i] for n, part in parts.items()} for i in range(count)]


def call_of(step: TrainStep) -> Call:
    """Divide the inputs between model and loss, as `TrainStep.model_inputs` and `TrainStep.loss_inputs` say."""
    names = [*step.inputs, *step.carry]
    model_inputs = names if step.model_inputs is None and step.loss is None else step.model_inputs
    return call_between(step.model, names, model_inputs, step.loss_inputs)


def _check_optimizers(step: TrainStep) -> None:
    known = {id(p) for module in (step.model, *step.modules.values()) for p in module.parameters()}
    if isinstance(step.loss, nn.Module):
        known |= {id(p) for p in step.loss.parameters()}
    seen: set[int] = set()
    for optimizer in step.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in known:
                    raise CaptureError(
                        f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that is not "
                        "in the model (nor in the loss). Was the model copied, moved or loaded after the optimizer was "
                        "made? Build the optimizer last, from model.parameters(). If another module holds it, "
                        "name that: modules={'head': head}"
                    )
                if id(parameter) in seen:
                    raise CaptureError("two optimizers hold the same parameter; each may be updated by one only")
                seen.add(id(parameter))
    if not seen:
        raise CaptureError("the optimizer holds no parameters")


def _check_loss_scale(step: TrainStep) -> None:
    scale = step.loss_scale
    if isinstance(scale, int | float) and not (math.isfinite(scale) and scale > 0):
        raise CaptureError(f"loss_scale is {scale}; it must be a positive number or a torch.amp.GradScaler")
    if not isinstance(scale, int | float | torch.amp.GradScaler | None):
        raise CaptureError(f"loss_scale is a {type(scale).__name__}; it must be a number or a torch.amp.GradScaler")
    if isinstance(step.scaler, torch.amp.GradScaler) and any(p.dtype == torch.float16 for p in step.trained):
        raise CaptureError(
            "a GradScaler does not take float16 parameters: their gradients cannot be unscaled without overflow. Keep "
            "the model in float32, and set precision='f16'"
        )


def _check_accumulate(step: TrainStep) -> None:
    count = step.accumulate
    if not (isinstance(count, int) and count > 0):
        raise CaptureError(f"accumulate is {count!r}; it must be a positive integer")
    sizes = {n: t.shape[0] for n, t in step.inputs.items() if t.ndim}
    if count > 1 and (len(set(sizes.values())) != 1 or any(size % count for size in sizes.values())):
        given = ", ".join(f"{n}: {size}" for n, size in sizes.items()) or "none"
        raise CaptureError(
            f"accumulate is {count}, so every input is cut into {count} equal parts along its first dimension, and all "
            f"must have the same one, divisible by {count}; their sizes are {given}. Make what is not a part of the "
            "batch a buffer of the model"
        )


def _check_between(step: TrainStep) -> None:
    call = call_of(step)
    of_model = {*call.positional, *call.keyword}
    targets = [n for n in call.targets if n not in of_model] if step.loss is not None else []
    for name in step.between:
        if name not in targets:
            raise CaptureError(
                f"between names {name!r}, which is not an input of the loss alone. Python can compute these inputs: "
                f"{targets}"
            )
    if step.between and TICKET in step.inputs:
        raise CaptureError(f"the input {TICKET!r} has the name of an argument of finish_step; rename it")
    if step.between and (step.accumulate > 1 or step.dynamic):
        raise CaptureError(
            "a step in pieces has neither micro-batches nor sizes that vary: leave out accumulate and dynamic"
        )


def _check_carry(step: TrainStep) -> None:
    if not step.carry:
        return
    if step.loss is None:
        raise CaptureError("carry needs a loss function, which returns the new values beside the loss")
    if step.accumulate > 1 or step.dynamic or step.between:
        raise CaptureError(
            "a carried value has one size, and belongs to a whole batch: leave out accumulate, dynamic and between"
        )


def _check_sam(step: TrainStep) -> None:
    if step.sam is None:
        return
    if not isinstance(step.sam, SAM):
        raise CaptureError(f"sam is a {type(step.sam).__name__}; it must be an irongrad.SAM, such as ig.SAM(rho=0.05)")
    if step.accumulate > 1 or step.scaler is not None or step.between or step.carry:
        raise CaptureError(
            "SAM's two passes need the whole batch at once: leave out accumulate, loss_scale, between and carry"
        )


def sizes_of(step: TrainStep, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the sizes of the named dimensions of `step` in `inputs`."""
    return sizes_in(step.dynamic, inputs)


def _check_dynamic(step: TrainStep) -> None:
    sizes = VaryingSizes(step.dynamic, step.bucket_list, step.bucket_fallback, step.constraints)
    sizes.check(step.inputs, {name: entry.inputs for name, entry in step.own_entries.items()})
    if step.accumulate > 1 and any(step.dynamic.get(name) for name in step.inputs):
        raise CaptureError("a step with dynamic dimensions cannot cut its batch into parts: leave accumulate at 1")


def pieces(step: TrainStep, between: Sequence[str]) -> TrainStep:
    """Split `step` into two pieces, between which Python computes inputs of the loss from the model's outputs.

    The artifact has `forward` and `finish_step` instead of `train_step`. `forward` computes the model's outputs from
    its inputs, in training mode. `finish_step` computes the loss from the other inputs. Together they are one training
    step. `finish_step` goes back through the values of that forward, with its random numbers, and recomputes nothing.
    `Session.run_pieces` calls both, with a function in between.

    Args:
        step: the whole step. Its example inputs must include values for the inputs that Python computes.
        between: the names of those inputs.

    Returns:
        The step in two pieces.

    Raises:
        CaptureError: a name is not an input of the loss, or the step has dynamic sizes or micro-batches.
    """
    if not between:
        raise CaptureError("between is empty: name the inputs of the loss that Python computes")
    return replace(step, between=tuple(between))

"""The model and its loss as one module, in the forms that capture exports and that eager runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module

from irongrad.diagnostics import source_lines
from irongrad.pipeline.capture.output_names import flatten_outputs, loss_of
from irongrad.pipeline.capture.selected_rows import refuse_selected
from irongrad.runtime.errors import CaptureError
from irongrad.runtime.manifest import CARRIED
from irongrad.step.carry import Carry
from irongrad.step.entries import Entry
from irongrad.step.train_step import TrainStep, call_of

MODEL_PREFIX = "model."
BESIDE_PREFIX = "beside.of_"


class Carried(nn.Module):
    """Values that go from call to call, as buffers."""

    def __init__(self, carry: Carry) -> None:
        super().__init__()
        self._carry = (carry,)
        for name, tensor in carry.leaves.items():
            self.register_buffer(name, tensor)

    def values(self) -> dict[str, Any]:
        """The present values by name; copies, because autograd may keep what the update overwrites."""
        return self._carry[0].nested({name: buffer.clone() for name, buffer in self.named_buffers()})

    def update(self, values: Mapping[str, Any], place: str) -> None:
        """Replace the values.

        Raises:
            CaptureError: as `Carry.flat`.
        """
        new = self._carry[0].flat(values, place)
        with torch.no_grad():
            for name, buffer in self.named_buffers():
                buffer.copy_(new[name].detach())  # the cast of a value of bfloat16 would have a gradient


class StepModule(nn.Module):
    """The model and its loss as one module that takes positional inputs, in the order of `TrainStep.inputs`.

    Attributes:
        untrained: the paths of parameters that no optimizer updates.
    """

    def __init__(self, step: TrainStep) -> None:
        super().__init__()
        self.model = step.model
        self._loss = step.loss if not isinstance(step.loss, nn.Module) else None
        if isinstance(step.loss, nn.Module):
            self.loss = step.loss
        if step.modules:
            self.beside = _named_modules(step.modules)
        if step.carry:
            self.carried = _named_modules(dict(zip(("steps", "evaluation"), map(Carried, step.carried), strict=True)))
        self._inside = step.loss is None
        self._call = call_of(step)
        self._names = tuple(step.inputs)
        self.autocast = step.autocast
        if carrying := {name: Carried(entry.carried) for name, entry in step.own_entries.items() if entry.carry}:
            self.entries = _named_modules(carrying)
        self._sam = step.sam
        trained = set(map(id, step.trained))
        named = self.named_parameters(remove_duplicate=False)
        self.untrained = frozenset(path for path, p in named if id(p) not in trained)

    @property
    def _carry(self) -> Carried | None:
        """What the present mode carries."""
        if "carried" not in self._modules:
            return None
        held = self.carried["of_steps" if self.model.training else "of_evaluation"]
        assert isinstance(held, Carried)
        return held

    def arguments(self, values: Sequence[torch.Tensor]) -> dict[str, Any]:
        """The inputs and the carried values, by name."""
        carry = self._carry
        return dict(zip(self._names, values, strict=True)) | (carry.values() if carry is not None else {})

    def outputs(self, inputs: dict[str, torch.Tensor]) -> object:
        """Call the model with its own inputs, and return its output."""
        call = self._call
        keyword = {n: inputs[n] for n in call.keyword if n in inputs}
        return self.model(*(inputs[n] for n in call.positional), **keyword)

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        """Return the loss, a scalar tensor."""
        with self.autocast():
            return self._evaluate(*values)

    def _evaluate(self, *values: torch.Tensor) -> torch.Tensor:
        return self.computed(self.arguments(values))[0]

    def computed(self, inputs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Run the model and its loss; with SAM, both twice, and the gradient is that of the second pass."""
        loss, values = self.reported(self.outputs(inputs), inputs)
        if self._sam is None or not self.model.training:
            return loss, values
        trained = {path: p for path, p in self.named_parameters() if path not in self.untrained}
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        with _reparametrize_module(self, self._sam.moved(trained, gradients), tie_weights=True):
            second, _ = self.reported(self.outputs(inputs), inputs)
        return second + (loss - second).detach(), values

    def loss_of(self, output: object, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Compute the loss from the model's output.

        Raises:
            CaptureError: the loss is not a tensor.
        """
        return self.reported(output, inputs)[0]

    def reported(self, output: object, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss, and the values that the loss function returns beside it, detached and by name.

        Raises:
            CaptureError: the loss is not a tensor, or a value beside it is not one.
        """
        if self._inside:
            return _scalar(loss_of(output)), {}
        function = self._loss if self._loss is not None else self.loss
        returned = function(output, *(inputs[n] for n in self._call.targets))
        loss, values = returned if _has_values(returned) else (returned, {})
        if (carry := self._carry) is not None:
            carry.update(values, source_lines.where(function))
            values = {name: value for name, value in values.items() if name not in carry._carry[0].structures}
        if not isinstance(loss, torch.Tensor):
            raise CaptureError(
                f"{source_lines.where(function)}: the loss is {_kind(loss)}, not a tensor. Return a scalar "
                "tensor such as loss.mean(), without .item() or float(), alone or with values beside it: "
                "(loss, {'accuracy': accuracy})"
            )
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                raise CaptureError(
                    f"{source_lines.where(function)}: the value {name!r} beside the loss is a {type(value).__name__}, "
                    "not a tensor. Leave .item(), float() and len() out: what the step returns are numbers. A count is "
                    "a sum of ones, such as torch.ones_like(y).sum()"
                )
        return _scalar(loss), {str(name): value.detach() for name, value in values.items()}


def _kind(value: object) -> str:
    """What stands in the place of a tensor, for a message; a number that a trace follows is Python's to the user."""
    if value is None:
        return "None"
    symbolic = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
    name = type(value).__name__
    return f"a {name.removeprefix('Sym').lower() if symbolic else name}"


def _named_modules(modules: Mapping[str, nn.Module]) -> nn.ModuleDict:
    """Modules by name, each with a prefix: a ModuleDict has attributes such as `keys`, which no name may have."""
    return nn.ModuleDict({f"of_{name}": module for name, module in modules.items()})


def _scalar(loss: torch.Tensor) -> torch.Tensor:
    """The loss without dimensions of size 1: eager differentiates any loss of one element."""
    return loss.reshape(()) if loss.ndim and all(size == 1 for size in loss.shape) else loss


def _has_values(returned: object) -> bool:
    """Whether a loss function returned a loss and a dictionary of further values."""
    return isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)


class ReportingModule(StepModule):
    """The step module that also returns the values that the loss function returns beside the loss."""

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the loss and the values beside it, detached."""
        loss, reported = self.named(*values)
        return (loss, *reported.values())

    def named(self, *values: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss, and the values beside it by name."""
        inputs = self.arguments(values)
        with self.autocast():
            return self.computed(inputs)


class PiecesModule(ReportingModule):
    """The step module of a step in two pieces: returns the loss and the model's outputs, which Python reads."""

    def named(self, *values: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss, and the model's detached output tensors by name."""
        inputs = dict(zip(self._names, values, strict=True))
        with self.autocast():
            output = self.outputs(inputs)
            refuse_selected(output)
            outputs = {name: tensor.detach() for name, tensor in flatten_outputs(output).items()}
            return self.loss_of(output, inputs), outputs


class OutputsModule(nn.Module):
    """A function over the model, which returns its output tensors as a flat tuple."""

    def __init__(self, module: StepModule, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = module.model
        self._module = (module,)  # the tuple hides its parameters from nn.Module, which would register them again
        self._names = names

    def run(self, inputs: dict[str, torch.Tensor]) -> object:
        """Call the function on inputs by name."""
        raise NotImplementedError

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the output tensors, in the order of their names."""
        return tuple(self.named(*values).values())

    def named(self, *values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the output tensors by name."""
        with self._module[0].autocast():
            outputs = flatten_outputs(self.run(dict(zip(self._names, values, strict=True))))
        refuse_selected(outputs)
        return outputs


class PredictModule(OutputsModule):
    """The model alone, without a loss that it computes itself."""

    def run(self, inputs: dict[str, torch.Tensor]) -> object:
        """Call the model on inputs by name."""
        return self._module[0].outputs(inputs)

    def named(self, *values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the model's output tensors by name."""
        outputs = super().named(*values)
        if self._module[0]._inside:
            outputs.pop("loss", None)
        return outputs


class EntryModule(OutputsModule):
    """An entry of the user's (`TrainStep.entries`)."""

    def __init__(self, module: StepModule, name: str, entry: Entry) -> None:
        super().__init__(module, tuple(entry.inputs))
        for child_name, child in module.named_children():
            self.add_module(child_name, child)
        self._entry = entry
        self._own = name

    def run(self, inputs: dict[str, torch.Tensor]) -> object:
        """Call the user's function on inputs by name, and on what it carries.

        Raises:
            CaptureError: it returns no tensor, or not what it carries.
        """
        place = source_lines.where(self._entry.function)
        returned = self._result(inputs, place)
        if not flatten_outputs(returned):
            raise CaptureError(f"{place}: the entry {self._own!r} returns {_kind_of(returned)}")
        return returned

    def _result(self, inputs: dict[str, torch.Tensor], place: str) -> object:
        if not self._entry.carry:
            return self._entry.run(inputs)
        carried = self.entries[f"of_{self._own}"]
        assert isinstance(carried, Carried)
        returned = self._entry.run({**inputs, **carried.values()})
        if not (isinstance(returned, tuple) and _has_values(returned)):
            raise CaptureError(f"{place}: an entry that carries values returns them beside its result: (result, {{…}})")
        carried.update(returned[1], place)
        return returned[0]


def _kind_of(returned: object) -> str:
    """What an entry returned, and what to return instead."""
    if returned is None:
        return "nothing. Return a tensor, or tensors in a tuple, a dictionary or a dataclass"
    if isinstance(returned, Iterator):
        return f"a {type(returned).__name__}, and no tensor. Return a list of tensors, or torch.stack of it"
    return (
        f"a {type(returned).__name__}, and no tensor. Leave out .item(), .numpy(), .tolist() and int(): the caller "
        "gets an array"
    )


def name_of(path: str) -> str:
    """Return the state name for an attribute path of `StepModule`: the name that its own module has for it."""
    if path.startswith(MODEL_PREFIX):
        return path.removeprefix(MODEL_PREFIX)
    for prefix, kind in _CARRIED.items():
        if path.startswith(prefix):
            return f"{CARRIED}/{kind}{path.removeprefix(prefix)}"
    return path.removeprefix(BESIDE_PREFIX)


# What carried values are called: by the value, and for those of an entry by both.
_CARRIED = {"carried.of_steps.": "", "carried.of_evaluation.": "eval/", "entries.of_": ""}


def is_carried(path: str) -> bool:
    """Whether an attribute path of `StepModule` leads to a carried value."""
    return path.startswith(tuple(_CARRIED))

"""`torch.autograd.Function` in a captured step.

torch.export traces through a Function's forward and forgets its backward: the exported step would have the gradient of
the forward's operators. So while it runs, a call becomes one operator whose decomposition is the forward and whose
autograd formula is the backward, which AOTAutograd then traces (docs.pytorch.org, "PyTorch Custom Operators").
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.autograd import Function

from irongrad.diagnostics import source_lines
from irongrad.operators.decompositions.registry import LIBRARY, register_decomposition
from irongrad.runtime.errors import CaptureError

_numbers = itertools.count()
_apply: Any = Function.apply.__func__


class Context:
    """What a Function's `ctx` offers, without autograd behind it."""

    saved_tensors: tuple[torch.Tensor | None, ...] = ()

    def __init__(self, needs_input_grad: tuple[bool, ...], place: str) -> None:
        self.needs_input_grad = needs_input_grad
        self._place = place

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Keep `tensors` for the backward."""
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        """Integers have no gradient anyway; that of others is not asked for."""

    def set_materialize_grads(self, value: bool) -> None:
        """Gradients that nothing asks for are zeros here."""

    def mark_dirty(self, *tensors: torch.Tensor) -> None:
        """Refuse to write into an argument.

        Raises:
            CaptureError: always.
        """
        raise CaptureError(
            f"{self._place}\n  a torch.autograd.Function writes into its argument; return a new tensor instead"
        )


@contextmanager
def kept() -> Iterator[None]:
    """While open, a call of a user's Function is an operator with that Function's backward as its formula."""

    def apply(cls: type[Function], *args: Any) -> Any:
        if not source_lines.is_user_class(cls):
            return _apply(cls, *args)
        return _Call(cls, args)(*(a for a in args if isinstance(a, torch.Tensor)))

    with mock.patch.object(Function, "apply", classmethod(apply)):
        yield


class _Call:
    """One call of a Function, its arguments that are no tensors bound."""

    def __init__(self, cls: type[Function], args: Sequence[Any]) -> None:
        self._cls = cls
        self._args = tuple(args)
        self._single = False

    def __call__(self, *tensors: torch.Tensor) -> Any:
        name = f"{LIBRARY}::{self._cls.__name__}_{next(_numbers)}"
        torch.library.define(name, "(Tensor[] tensors) -> Tensor[]")
        torch.library.impl(name, "default", self.forward)
        torch.library.register_fake(name, self.forward)
        torch.library.register_autograd(name, self.backward, setup_context=_save_inputs)
        operator = getattr(getattr(torch.ops, LIBRARY), name.partition("::")[2]).default
        register_decomposition(operator)(self.forward)
        outputs = operator(list(tensors))
        return outputs[0] if self._single else tuple(outputs)

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the Function's forward; what it returns unchanged is copied, as an operator may not return its input."""
        return [o.clone() if any(o is t for t in tensors) else o for o in self._run(tensors)[1]]

    def backward(self, ctx: Any, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Run the Function's backward on what its forward saves, which is run again and merged with the first run."""
        with torch.no_grad():
            context = self._run(ctx.tensors)[0]
        made = self._cls.backward(context, *gradients)
        made = made if isinstance(made, tuple) else (made,)
        if len(made) != len(self._args):
            raise CaptureError(
                f"{source_lines.where(self._cls.backward)}\n  {self._cls.__name__}.backward returns {len(made)} "
                f"gradients, and its forward takes {len(self._args)} arguments. "
                "Return None for one that has no gradient"
            )
        return [g for g, a in zip(made, self._args, strict=True) if isinstance(a, torch.Tensor)]

    def _run(self, tensors: Sequence[torch.Tensor]) -> tuple[Context, tuple[torch.Tensor, ...]]:
        given = iter(tensors)
        args = [next(given) if isinstance(a, torch.Tensor) else a for a in self._args]
        forward: Callable[..., Any] = self._cls.forward
        needs = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in self._args)
        context = Context(needs, source_lines.where(forward))
        if self._cls.setup_context is Function.setup_context:
            outputs = forward(context, *args)
        else:
            outputs = forward(*args)
            self._cls.setup_context(context, tuple(args), outputs)
        self._single = isinstance(outputs, torch.Tensor)
        return context, (outputs,) if self._single else tuple(outputs)


def _save_inputs(ctx: Any, inputs: tuple[Sequence[torch.Tensor]], output: object) -> None:
    (ctx.tensors,) = inputs

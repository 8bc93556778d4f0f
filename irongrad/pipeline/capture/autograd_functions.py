"""Keep the backward of each `torch.autograd.Function` of the user or of a package in a captured step.

torch.export traces through a Function's forward and drops its backward. The exported step would then have the gradient
of the forward's operators. So during the export, each call becomes one custom operator. Its decomposition is the
forward. Its autograd formula is the backward, which AOTAutograd traces (docs.pytorch.org, "PyTorch Custom Operators").
"""

from __future__ import annotations

import inspect
import itertools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from irongrad.diagnostics import source_lines
from irongrad.operators.decompositions.registry import LIBRARY, register_decomposition
from irongrad.pipeline.capture.plain_operators import plain_operators
from irongrad.pipeline.capture.selected_rows import refuse_selected
from irongrad.pipeline.capture.side_effects import backward_refused
from irongrad.pipeline.capture.without_value_reads import ValueFree
from irongrad.runtime.errors import CaptureError

_OF_BACKWARD = (
    "A compiled backward only returns gradients. Write into buffers in the model's forward, or compute what you record "
    "from the gradients after the step"
)
_OF_PARAMETERS = (  # backward() would add to the gradients of parameters that it reaches, outside of the step's graph
    "Hand the parameters to apply, and return their gradients too, which torch.autograd.grad computes; or use "
    "torch.utils.checkpoint, if the Function only saves memory"
)
_OF_FORWARD = "Return a new tensor instead, and write it into a buffer in the model's own forward"

_numbers = itertools.count()
_operators: set[OpOverload] = set()
_apply: Any = Function.apply.__func__
# What `Function.apply` does, whatever code it has meanwhile.
_plain_apply: Any = FunctionType(_apply.__code__, _apply.__globals__, closure=_apply.__closure__)


class _Redirected:
    """Holds the code that `Function.apply` has while calls are kept; `super()` gives it the same free variable."""

    def apply(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (a class method, as in PyTorch)
        super()
        return _irongrad_apply(cls, *args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


class Context:
    """A replacement for a Function's `ctx` that works without autograd.

    Attributes:
        saved_tensors: the tensors that the forward saved for the backward.
        needs_input_grad: for each argument of the forward, whether it needs a gradient.
        fixed: the outputs through which no gradient goes.
        materialises: whether the backward gets zeros for an output without a gradient; else it gets None.
    """

    saved_tensors: tuple[torch.Tensor | None, ...] = ()
    fixed: tuple[torch.Tensor, ...] = ()
    materialises = True

    def __init__(self, needs_input_grad: tuple[bool, ...], place: str) -> None:
        self.needs_input_grad = needs_input_grad
        self._place = place

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Save `tensors` for the backward."""
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        """Let no gradient go through outputs: the backward gets none for them, whatever is computed from them."""
        self.fixed = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Choose what the backward gets for an output without a gradient."""
        self.materialises = value

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
    """While open, each call of a Function that is not PyTorch's own becomes an operator with its backward."""

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            return _checkpointed(*args)
        if cls.__module__.partition(".")[0] == torch.__name__:
            return _plain_apply(cls, *args, **kwargs)
        if kwargs or cls.setup_context is not Function.setup_context:  # PyTorch too binds arguments in this case alone
            bound = inspect.signature(cls.forward).bind(*args, **kwargs)
            bound.apply_defaults()
            args = bound.args
        refuse_selected(*args)
        return _Call(cls, args)(*(a for a in args if isinstance(a, torch.Tensor)))

    # The code is replaced, not the attribute: `swish = Swish.apply`, as people write it, keeps the function itself.
    before, _apply.__code__ = _apply.__code__, _Redirected.apply.__code__
    try:
        with mock.patch.object(torch.autograd.function, "_irongrad_apply", apply, create=True):
            yield
    finally:
        _apply.__code__ = before


def _checkpointed(function: Callable[..., Any], preserves: bool, *args: Any) -> Any:
    """What `checkpoint(function, *args, use_reentrant=True)` computes.

    Its forward runs without gradients, and a trace would keep that. Its backward runs if an argument needs a gradient,
    and then parameters that `function` reads get theirs, too.
    """
    needs = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    with torch.set_grad_enabled(torch.is_grad_enabled() and needs):
        return function(*args)


def calls_functions(graph: torch.fx.GraphModule) -> bool:
    """Whether a captured graph calls a Function; what that does is traced only later."""
    return any(node.target in _operators for node in graph.graph.nodes)


class _Call:
    """One call of a Function as an operator: takes the tensor arguments, and holds the values of all others."""

    def __init__(self, cls: type[Function], args: Sequence[Any]) -> None:
        self._cls = cls
        self._args = tuple(args)
        self._single = False
        self._fixed: frozenset[int] = frozenset()

    def __call__(self, *tensors: torch.Tensor) -> Any:
        name = f"{LIBRARY}::{self._cls.__name__}_{next(_numbers)}"
        torch.library.define(name, "(Tensor[] tensors) -> Tensor[]")
        torch.library.impl(name, "default", self.forward)
        torch.library.register_fake(name, self.forward)
        torch.library.register_autograd(name, self.backward, setup_context=_save_inputs)
        operator = getattr(getattr(torch.ops, LIBRARY), name.partition("::")[2]).default
        register_decomposition(operator)(dispatch_functionalize(self.forward))  # it may write into its own tensors
        _operators.add(operator)
        outputs = [o.detach() if i in self._fixed else o for i, o in enumerate(operator(list(tensors)))]
        return outputs[0] if self._single else tuple(outputs)

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the Function's forward; copy an output that is an input, since an operator may not return its input."""
        return [o.clone() if any(o is t for t in tensors) else o for o in self._run(tensors)[1]]

    def backward(self, ctx: Any, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Run the Function's backward.

        The forward runs again to compute the tensors that it saves. A later pass merges both runs.
        """
        with torch.no_grad():
            context, outputs = self._run(ctx.tensors)
            if context.materialises:
                pairs = zip(gradients, outputs, strict=True)
                gradients = [torch.zeros_like(o) if g is None else g for g, o in pairs]
        name = f"{self._cls.__name__}.backward"
        with plain_operators(), backward_refused(name, _OF_PARAMETERS), _OwnWrites(name, _OF_BACKWARD, gradients):
            results = self._cls.backward(context, *gradients)
        results = results if isinstance(results, tuple) else (results,)
        count = len(self._args)
        if all(further is None for further in results[count:]):
            results = results[:count]  # PyTorch leaves out what a backward returns for arguments that there are not
        if len(results) != count:
            raise CaptureError(
                f"{source_lines.where(self._cls.backward)}\n  {name} returns {len(results)} gradients, and its forward "
                f"takes {count} arguments. "
                "Return None for one that has no gradient"
            )
        return [g for g, a in zip(results, self._args, strict=True) if isinstance(a, torch.Tensor)]

    def _run(self, tensors: Sequence[torch.Tensor]) -> tuple[Context, tuple[torch.Tensor, ...]]:
        remaining = iter(tensors)
        args = [next(remaining) if isinstance(a, torch.Tensor) else a for a in self._args]
        forward: Callable[..., Any] = self._cls.forward
        needs = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in self._args)
        context = Context(needs, source_lines.where(forward))
        with plain_operators(), ValueFree(), _OwnWrites(f"{self._cls.__name__}.forward", _OF_FORWARD):
            if self._cls.setup_context is Function.setup_context:
                outputs = forward(context, *args)
            else:
                outputs = forward(*args)
                self._cls.setup_context(context, tuple(args), outputs)
        self._single = isinstance(outputs, torch.Tensor)
        returned = (outputs,) if self._single else tuple(outputs)
        self._fixed = frozenset(i for i, o in enumerate(returned) if any(o is f for f in context.fixed))
        return context, returned


class _OwnWrites(TorchDispatchMode):
    """Refuse writes into tensors that the code inside neither makes nor is given.

    Args:
        name: what the code inside is called.
        instead: what to do instead.
        given: further tensors that the code may write into.
    """

    supports_higher_order_operators = True

    def __init__(self, name: str, instead: str, given: Sequence[torch.Tensor | None] = ()) -> None:
        super().__init__()
        self._name, self._instead = name, instead
        # Keeps the tensors alive, so that no later tensor gets the number of an earlier one.
        self._own: dict[int, object] = {id(t): t for t in given}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        # Control flow writes into none of its arguments. detach_, which PyTorch's while_loop calls, changes no value.
        writes = isinstance(func, OpOverload) and func is not torch.ops.aten.detach_.default
        outs = func._schema.arguments if writes else ()
        written = [_argument(a.name, i, args, kwargs or {}) for i, a in enumerate(outs) if _is_out(a)]
        for tensor in (t for t in tree_leaves(written) if isinstance(t, torch.Tensor)):
            if id(tensor) not in self._own:
                raise CaptureError(
                    f"{_user_line()}\n  {self._name} of a torch.autograd.Function writes into its argument, or into "
                    f"another tensor from outside of it ({func}). {self._instead}"
                )
        try:
            result = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            # In torch 2.13, Dynamo does not run here, which makes what a body reads from around it an argument.
            if isinstance(func, HigherOrderOperator) and "FunctionalTensor on its own" in str(error):
                raise CaptureError(
                    f"{_user_line()}\n  {func.name()} in {self._name} of a torch.autograd.Function reads a tensor from "
                    "around it. Hand it over: as one more carried value that each iteration returns as it is, or as an "
                    "operand"
                ) from error
            raise
        if not (isinstance(func, OpOverload) and func.is_view) or id(args[0]) in self._own:
            self._own |= {id(t): t for t in tree_leaves(result) if isinstance(t, torch.Tensor)}
        return result


def _argument(name: str, place: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[place] if place < len(args) else kwargs.get(name)


def _is_out(argument: torch._C.Argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _user_line() -> str:
    """`file:line: source` of the innermost line of the user's code that runs now."""
    mine = [f for f in traceback.extract_stack() if source_lines.is_user_file(f.filename)]
    return f"{mine[-1].filename}:{mine[-1].lineno}: {mine[-1].line}" if mine else "(line unknown)"


def _save_inputs(ctx: Any, inputs: tuple[Sequence[torch.Tensor]], output: object) -> None:
    (ctx.tensors,) = inputs
    ctx.set_materialize_grads(False)

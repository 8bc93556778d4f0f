"""Fixtures that the tests of decompositions share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from irongrad.frontends.compile_function import flat_function, trace_function
from irongrad.graph.recorder import Decomposition, Operator
from irongrad.operators.decompositions import decomposition_table
from irongrad.operators.legalize import retrace
from irongrad.pipeline.capture.plain_operators import plain_operators

aten = torch.ops.aten

Check = Callable[..., list[torch.Tensor]]


@pytest.fixture(scope="session")
def equals_aten() -> Check:
    """Compare the decomposition of an operator with ATen's kernel, and return the kernel's results."""

    def check(name: str, *arguments: object) -> list[torch.Tensor]:
        operator = getattr(aten, name)
        operator = operator if isinstance(operator, torch._ops.OpOverload) else operator.default
        copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        found, expected = decomposition_table()[operator](*arguments), operator(*copies)
        if isinstance(expected, torch.Tensor):
            found, expected = [found], [expected]
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if other is not None:
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10, equal_nan=True)
        return list(expected)

    return check


@dataclass(frozen=True)
class Joint:
    """A function's outputs and its vector-Jacobian product, as eager code and as the decomposed graph.

    Attributes:
        eager: takes inputs and cotangents, returns outputs and gradients.
        compiled: the same function as the decomposed graph.
        inputs: the inputs of the function.
        cotangents: the cotangents of the differentiable outputs.
        differentiable: for each output, whether it has a gradient.
    """

    eager: Callable[..., list[Tensor]]
    compiled: Callable[..., list[Tensor]]
    inputs: tuple[Tensor, ...]
    cotangents: tuple[Tensor, ...]
    differentiable: list[bool]

    def equals_eager(self) -> None:
        """Compare all outputs and gradients with those of ATen."""
        values = (*self.inputs, *self.cotangents)
        with plain_operators():
            expected = self.eager(*values)
        for one, other in zip(self.compiled(*values), expected, strict=True):
            digits = {"rtol": 1e-9, "atol": 1e-9} if other.dtype is torch.float64 else {}
            torch.testing.assert_close(one, other, equal_nan=True, **digits)

    def equals_differences(self) -> None:
        """Compare the compiled gradients with finite differences of the compiled outputs."""
        inputs = [i.clone().requires_grad_() for i in self.inputs]
        function = functools.partial(_Compiled.apply, self)
        torch.autograd.gradcheck(function, inputs, fast_mode=True, check_undefined_grad=False)


class _Compiled(torch.autograd.Function):
    """The decomposed joint graph as a function with a gradient."""

    @staticmethod
    def forward(ctx: Any, joint: Joint, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.joint = joint
        ctx.save_for_backward(*inputs)
        outputs = joint.compiled(*inputs, *joint.cotangents)[: len(joint.differentiable)]
        return tuple(o for o, wanted in zip(outputs, joint.differentiable, strict=True) if wanted)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        results = ctx.joint.compiled(*ctx.saved_tensors, *cotangents)
        return None, *results[len(ctx.joint.differentiable) :]


def _joint(run: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Joint:
    outputs = tree_leaves(run(*(i.clone().requires_grad_() for i in inputs)))
    differentiable = [o.requires_grad for o in outputs]
    generator = torch.Generator().manual_seed(1)
    wanted = [o for o, needed in zip(outputs, differentiable, strict=True) if needed]
    cotangents = tuple(torch.randn(o.shape, dtype=o.dtype, generator=generator) for o in wanted)
    eager = _with_product(run, len(inputs))
    function = flat_function(eager, (*inputs, *cotangents), gradients=False)
    step = trace_function(function, eager)
    graph, constants = step.functions["call"].graph, [t.initial for t in step.state]
    return Joint(eager, lambda *values: list(graph(*values, *constants)), inputs, cotangents, differentiable)


def _with_product(run: Callable[..., Any], count: int) -> Callable[..., list[Tensor]]:
    """The function of `count` tensors together with its vector-Jacobian product; cotangents follow the tensors."""

    def joint(*values: Tensor) -> list[Tensor]:
        nested = any(v.requires_grad for v in values)
        with torch.enable_grad():
            inputs = [v if v.requires_grad else v.detach().requires_grad_() for v in values[:count]]
            outputs = tree_leaves(run(*inputs))
            wanted = [o for o in outputs if o.requires_grad]
            options: dict[str, Any] = {"create_graph": nested, "allow_unused": True, "materialize_grads": True}
            gradients = torch.autograd.grad(wanted, inputs, values[count:], **options) if wanted else []
        return [o if nested else o.detach() for o in (*outputs, *gradients)]

    return joint


@contextmanager
def _recorded() -> Iterator[set[Operator]]:
    """Collect the operators that are decomposed inside the `with` block."""
    ran: set[Operator] = set()

    def recording(operator: Operator, function: Decomposition) -> Decomposition:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if result is not NotImplemented:
                ran.add(operator)
            return result

        return run

    table = {operator: recording(operator, function) for operator, function in decomposition_table().items()}
    with mock.patch.object(retrace, "decomposition_table", return_value=table), plain_operators():
        yield ran


def _joints(run: Callable[..., Any], inputs: tuple[Tensor, ...], order: int) -> tuple[Sequence[Joint], set[Operator]]:
    """The joint graphs of a function and of its derivatives up to `order`, and the operators decomposed in them."""
    made: list[Joint] = []
    with _recorded() as ran:
        for _ in range(max(order, 1)):
            made.append(_joint(run, inputs))
            outputs = len(made[-1].differentiable)
            run = functools.partial(lambda eager, outputs, *v: eager(*v)[outputs:], made[-1].eager, outputs)
            inputs = (*inputs, *made[-1].cotangents)
    return made, ran


@pytest.fixture(scope="session")
def joints() -> Callable[..., tuple[Sequence[Joint], set[Operator]]]:
    """`_joints`, cached by its arguments."""
    return functools.cache(_joints)


@pytest.fixture(scope="session")
def recorded() -> Callable[[], AbstractContextManager[set[Operator]]]:
    """`_recorded`."""
    return _recorded

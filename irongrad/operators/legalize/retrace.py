"""Trace a function of tensors to a functional graph of operators that the importer accepts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import Target
from torch.fx.traceback import preserve_node_meta

from irongrad.diagnostics.refusals import gathers, refusal_of, refuse
from irongrad.diagnostics.source_lines import line_of, located
from irongrad.graph.recorder import Decomposition, Operator, record
from irongrad.graph.subgraphs import aliases_allowed, check_control_flow, simplified
from irongrad.operators.decompositions import decomposition_table, is_ours
from irongrad.operators.legalize.empty_tensors import fold_empty_tensors
from irongrad.operators.legalize.half_precision import functional_of, is_computed_wider, rounded, widened
from irongrad.operators.legalize.negative_indices import without_negative_indices
from irongrad.operators.legalize.size_numbers import takes_numbers_of_sizes, without_numbers_of_sizes
from irongrad.operators.legalize.stacked_scalars import stack_scalars_first
from irongrad.operators.legalize.wrapped_numbers import with_wrapped_numbers
from irongrad.runtime.errors import UnsupportedOpError
from irongrad.sizes.symbols import Derived, Dims, Symbols


def retrace(
    function: Callable[..., Sequence[torch.Tensor]],
    examples: Sequence[torch.Tensor],
    *,
    decompose: bool = True,
    dims: Sequence[Dims] = (),
    derived: Derived | None = None,
) -> GraphModule:
    """Trace `function` on fake copies of `examples`; keep the stack traces of graphs that it interprets.

    Args:
        function: takes tensors like `examples`, returns a flat sequence of tensors and mutates nothing.
        examples: real or fake tensors. Only shapes and dtypes matter: a compiled step has no strides.
        decompose: whether to expand operators with IronGrad's decomposition table.
        dims: for each example, the names of the dimensions that stay symbols; empty for a graph of fixed sizes.
        derived: sizes of named dimensions that are expressions of other sizes.
    """
    return traced(function, examples, decomposition_table() if decompose else {}, dims, derived)


def traced(
    function: Callable[..., Sequence[torch.Tensor]],
    examples: Sequence[torch.Tensor],
    table: Mapping[Operator, Decomposition],
    dims: Sequence[Dims] = (),
    derived: Derived | None = None,
) -> GraphModule:
    """Trace as `retrace` does, with the decompositions in `table`.

    A graph of fixed sizes is recorded if the recorder supports the function; otherwise `make_fx` traces it.
    """
    passes = [stack_scalars_first, fold_empty_tensors]
    if not any(dims):
        # force_eager: otherwise Dynamo compiles control flow, which the recorder does not support.
        with suppress(Exception), preserve_node_meta(), aliases_allowed(), torch.compiler.set_stance("force_eager"):
            mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
            return simplified(record(function, [(e.shape, e.dtype) for e in examples], table, mode), passes)
    return simplified(_traced_by_make_fx(function, examples, table, dims, derived), passes)


def _traced_by_make_fx(
    function: Callable[..., Sequence[torch.Tensor]],
    examples: Sequence[torch.Tensor],
    table: Mapping[Operator, Decomposition],
    dims: Sequence[Dims],
    derived: Derived | None,
) -> GraphModule:
    environment = ShapeEnv(duck_shape=False)
    names = dims or [{}] * len(examples)
    sizes = {name: int(e.shape[d]) for e, named in zip(examples, names, strict=True) for d, name in named.items()}
    symbols = Symbols(environment, sizes, derived or {})
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment)
    with mode:
        fakes = [symbols.empty_like(e, d) for e, d in zip(examples, names, strict=True)]
    # PyTorch 2.13 computes the shapes of some operators for symbolic sizes in Python only (constant_pad_nd).
    dispatcher = enable_python_dispatcher() if any(dims) else nullcontext()
    with mode, torch.no_grad(), preserve_node_meta(), aliases_allowed(), dispatcher:
        try:
            graph = make_fx(function, decomposition_table=table, tracing_mode="real")(*fakes)
            if takes_numbers_of_sizes(graph):
                written = partial(without_numbers_of_sizes, graph)
                # The first trace asked the same of the sizes, and refused what does not hold for all of them.
                with environment.suppress_guards():
                    graph = make_fx(written, decomposition_table=table, tracing_mode="real")(*fakes)
        except UnsupportedOpError as error:
            raise located(error) from error
    return graph


def interpret(graph: GraphModule, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Run `graph` on flat `values` and return its flat outputs."""
    outputs: Sequence[torch.Tensor] = torch.fx.Interpreter(graph).run(*values, enable_io_processing=False)
    return outputs


def interpret_eager(graph: GraphModule, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Run a graph that PyTorch traced for its own kernels, in the portable form of `Portable`.

    Raises:
        UnsupportedOpError: the graph has control flow that cannot be compiled.
    """
    check_control_flow(graph)
    outputs: Sequence[torch.Tensor] = Portable(graph).run(*values, enable_io_processing=False)
    return outputs


aten = torch.ops.aten

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

DETERMINANTS = frozenset({aten._linalg_det.default, aten._linalg_slogdet.default})


class Portable(torch.fx.Interpreter):
    """Interpreter that removes what only eager kernels support: strides, negative indices and half precision."""

    def run_node(self, n: Node) -> Any:
        """Run one node, and keep it in `self.node` for `call_function`.

        Raises:
            UnsupportedOpError: the node cannot be compiled, and refusals are not gathered or it has no stand-in.
        """
        self.node = n
        try:
            return super().run_node(n)
        except UnsupportedOpError as error:
            if not gathers() or (value := self.stand_in(n.meta.get("val"))) is None:
                raise
            refuse([refusal_of(located(error, line_of(n)))])
            return value

    def stand_in(self, value: Any) -> Any:
        """Return a tensor like `value` in place of the result of a refused node, so that tracing can go on.

        Returns:
            An uninitialised tensor, or a list of them; None for other values and for tensors of symbolic sizes.
        """
        if isinstance(value, list | tuple):
            return [self.stand_in(v) for v in value]
        if not isinstance(value, torch.Tensor) or not all(isinstance(n, int) for n in value.shape):
            return None
        return torch.empty(value.shape, dtype=value.dtype)

    def fetch_args_kwargs_from_env(self, n: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a node; transpose a matrix that is not contiguous if its determinant is computed.

        ATen factors the transpose of a contiguous matrix, and any other matrix itself
        (ATen/native/BatchLinearAlgebra.cpp). The backward in the graph solves with the factors of one of these cases.
        Compiled matrices are all contiguous, so the others are transposed here; the determinant is the same.
        """
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        if n.target in DETERMINANTS and not n.all_input_nodes[0].meta["val"].is_contiguous():
            args = (args[0].mT,)
        return args, kwargs

    def call_function(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one node in its portable form."""
        # The assertion was checked at capture. Its side effect would keep dead code alive.
        if target is aten._assert_tensor_metadata.default:
            return None
        # PyTorch traces branches and loop bodies with view_copy operators in place of views.
        if isinstance(target, OpOverload) and torch.Tag.view_copy in target.tags:
            target = getattr(getattr(aten, _packet(target).removesuffix("_copy")), target._overloadname)
        # view requires compatible strides; reshape computes the same values for any strides.
        if target is aten.view.default:
            target = aten.reshape.default
        args = without_negative_indices(target, args)
        if isinstance(target, HigherOrderOperator):
            args = tuple(_region(a) if isinstance(a, GraphModule) else a for a in args)
        functional = functional_of(target)
        if functional is not None and is_computed_wider(functional, (args, kwargs)):
            return args[0].copy_(self.call_function(functional, args, kwargs))
        args = with_wrapped_numbers(target, args, self.node.meta.get("val"))
        if is_computed_wider(target, (args, kwargs)):
            result = self._dispatched(target, *widened((args, kwargs)))
            return rounded(target, args, result, self.node.meta["val"])
        return self._dispatched(target, args, kwargs)

    def _dispatched(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; IronGrad's decomposition replaces the dispatcher's, which would write into tensors."""
        if isinstance(target, OpOverload) and target.has_kernel_for_dispatch_key(_COMPOSITE) and is_ours(target):
            return decomposition_table()[target](*args, **kwargs)
        return super().call_function(target, args, kwargs)


def _packet(operator: OpOverload) -> str:
    name: str = operator._overloadpacket.__name__
    return name


def _region(graph: GraphModule) -> Callable[..., Any]:
    return lambda *values: interpret_eager(graph, values)

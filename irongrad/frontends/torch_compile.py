"""`torch.compile(model, backend="irongrad")`: IronGrad as a just-in-time compiler, with the same passes and caches.

Dynamo splits a Python program into graphs of tensors, and adds guards on the properties that it saw. AOTAutograd turns
each graph into a forward and a backward without mutation. Both are compiled here as functions of fixed shapes. Dynamo
finds `torch_backend` by the entry point in pyproject.toml.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import tracing
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from irongrad.cache import default_store
from irongrad.diagnostics.stage_errors import reported_as
from irongrad.frontends.torch_call import TensorLike, TorchCall
from irongrad.graph.step_graph import Function, StepGraph, Value
from irongrad.operators.decompositions.registry import BeforeAutograd
from irongrad.operators.legalize.legality import check_operators, check_values
from irongrad.operators.legalize.retrace import interpret_eager, retrace
from irongrad.operators.random import Draws, is_random
from irongrad.pipeline.assemble.interface import describe_function
from irongrad.pipeline.backend import optimised_function, portable_function
from irongrad.pipeline.capture.plain_operators import plain_operators
from irongrad.pipeline.guards.decisions import Indices
from irongrad.pipeline.guards.function_indices import function_indices, guarded
from irongrad.pipeline.iree.compile_cached import compile_once
from irongrad.runtime.errors import UnsupportedOpError
from irongrad.runtime.manifest import SEED
from irongrad.runtime.scratch import scratch_directory
from irongrad.targets import parse_target

Compiled = Callable[..., Any]


def torch_backend(graph: GraphModule, examples: Sequence[Any]) -> Compiled:
    """Compile one of Dynamo's graphs, forward and backward, for this machine's CPU.

    Sizes that Dynamo left symbolic become guards on their values, so each size has a graph of its own.

    Raises:
        UnsupportedOpError: an operator cannot be compiled, or a tensor is not on the CPU.
    """
    for example in examples:
        _specialise(example)
        _check_device(example)
    compiler = aot_autograd(
        fw_compiler=compile_graph,
        bw_compiler=compile_graph,
        inference_compiler=compile_graph,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=False,
    )
    with plain_operators(), BeforeAutograd():
        compiled: Compiled = compiler(graph, examples)
    return compiled


def _specialise(example: Any) -> None:
    """Read the value of every size and number, which adds a guard on it."""
    for number in example.shape if isinstance(example, torch.Tensor) else [example]:
        _plain(number)


def _plain(number: Any) -> Any:
    """The value of a number that may be symbolic."""
    for symbolic, plain in ((torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool)):
        if isinstance(number, symbolic):
            return plain(number)
    return number


def _check_device(example: Any) -> None:
    if isinstance(example, torch.Tensor) and example.device.type != "cpu":
        raise UnsupportedOpError(f"a tensor on {example.device} cannot be compiled here; move the model to the CPU")


@reported_as("the compilation of a graph of torch.compile")
def compile_graph(graph: GraphModule, examples: Sequence[Any]) -> Compiled:
    """Compile a functional graph of ATen operators to a function of the same arguments."""
    plan = _Plan(graph)
    # AOTAutograd is still tracing on fake tensors, but constant folding here needs real ones.
    with tracing(None), _disable_current_modes(), plain_operators():
        call = plan.compiled()

    def run(*values: Any) -> list[Any]:
        given = [values[i] for i in plan.tensors]
        if plan.draws:
            given.append(torch.randint(2**63 - 1, ()))  # from the generator that torch.manual_seed seeds
        made = iter(call(given) if call is not None else ())
        return [next(made) if n in plan.computed else _passed(n, plan.places, values) for n in plan.results]

    boxed: Compiled = make_boxed_func(run)
    return boxed


def _passed(result: Any, places: dict[Node, int], values: Sequence[Any]) -> Any:
    """A result that is not computed: an argument, a number, or None."""
    return values[places[result]] if isinstance(result, Node) else result


class _Plan:
    """The part of a graph of AOTAutograd that is compiled. Such a graph may take numbers, and return arguments or None.

    Attributes:
        places: the position of each argument.
        tensors: the positions of the arguments that are tensors.
        results: the results of the graph: nodes, numbers, or None.
        computed: the results that the compiled function computes.
        draws: whether the compiled function takes a seed as its last argument.
    """

    def __init__(self, graph: GraphModule) -> None:
        self._graph = graph
        placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
        self.places = {n: i for i, n in enumerate(placeholders)}
        self.tensors = [i for i, n in enumerate(placeholders) if isinstance(n.meta["val"], torch.Tensor)]
        self._numbers = [None if i in self.tensors else _plain(n.meta["val"]) for n, i in self.places.items()]
        self._examples = [placeholders[i].meta["val"] for i in self.tensors]
        self.results: list[Any] = list(graph.graph.output_node().args[0])
        self.computed = {n for n in self.results if isinstance(n, Node) and n not in self.places}
        self.draws = any(is_random(n.target) for n in graph.graph.nodes)

    def compiled(self) -> TorchCall | None:
        """Compile the function; return None if it computes nothing.

        Raises:
            UnsupportedOpError: an operator cannot be compiled.
        """
        wanted = [n for n in self.results if n in self.computed]
        if not wanted:
            return None
        check_values(self._graph)
        names = [f"arg{i}" for i in self.places.values()]
        indices, early = function_indices(self._graph, names, lambda: self._graph)
        graph, target = self._step_graph(indices, early), parse_target("llvm-cpu")
        check_operators(graph)
        graph, _ = optimised_function(graph, target)
        with scratch_directory() as scratch:
            interface = describe_function(graph)
            module = portable_function(graph, interface, scratch)
            binary = compile_once(default_store(), module, target, scratch)
        return TorchCall(module, binary.vmfb, [TensorLike.of(n.meta["val"]) for n in wanted])

    def _step_graph(self, indices: Indices, early: Function | None) -> StepGraph:
        examples = [torch.empty(TensorLike.of(t).shape, dtype=t.dtype, device="meta") for t in self._examples]
        names = [f"arg{i}" for i in self.tensors]
        inputs = dict(zip(names, examples, strict=True))
        if self.draws:
            inputs[SEED] = torch.empty((), dtype=torch.int64, device="meta")
        made = retrace(self._run, list(inputs.values()))
        count = len(made.graph.output_node().args[0])
        arguments = tuple(Value("input", n) for n in inputs)
        results = tuple(Value("output", f"result{i}") for i in range(count))
        graph = StepGraph((), (), inputs, {}, functions={"call": Function(made, arguments, results)})
        return guarded(graph, indices, early)

    def _run(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Run the graph on tensors only; if it draws random numbers, the last tensor is the seed."""
        given = iter(tensors)
        values = [next(given) if number is None else number for number in self._numbers]
        if not self.draws:
            return self._outputs(values)
        with Draws(next(given), 0):
            return self._outputs(values)

    def _outputs(self, values: Sequence[Any]) -> list[torch.Tensor]:
        outputs = zip(self.results, interpret_eager(self._graph, values), strict=True)
        return [made for node, made in outputs if node in self.computed]

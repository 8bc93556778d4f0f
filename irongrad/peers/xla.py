"""What XLA makes of a step: torch-mlir lowers the captured graph to StableHLO, and JAX's XLA compiles that."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from irongrad.analysis.records import Source
from irongrad.graph.dtypes import to_numpy
from irongrad.graph.step_graph import StepGraph, Value
from irongrad.peers.kernels import Compiled, Kernel
from irongrad.peers.own import layer_of, layers_of
from irongrad.pipeline.driver import step_graph
from irongrad.pipeline.lower.importer import import_functions
from irongrad.step.train_step import TrainStep

NAME = "xla"
_FUNCTIONS = ("joint", "update")


def compiled(step: TrainStep, folder: Path, *, one_thread: bool) -> tuple[Compiled, Callable[[], float]]:
    """Compile a step by XLA; return what it made, and what takes a step.

    The graph is the captured one, before any pass of IronGrad. Forward, backward and update are one program, whose
    state is donated, as with `jax.jit`.
    """
    if one_thread:
        os.environ["NPROC"] = "1"  # the size of XLA's thread pools
    from irongrad.jax.compiled_by_xla import Call, compile_chain, on_device

    classes = layers_of(step)
    graph = step_graph(step)
    graph = replace(graph, functions={name: graph.functions[name] for name in _FUNCTIONS})
    module = import_functions(graph, folder, "stablehlo").modules.stablehlo
    calls = [
        Call(f"graph.{name}", tuple(map(_spelled, function.arguments)), tuple(map(_spelled, function.results)))
        for name, function in graph.functions.items()
    ]
    made = dict.fromkeys(name for call in calls for name in call.results)
    results = [name for name in made if not name.startswith("gradient:")]
    start = time.perf_counter()
    program = compile_chain(module, calls, results)
    values = {name: on_device(array) for name, array in _values(graph).items() if name in program.arguments}

    def run() -> float:
        values.update(program(values))
        return float(values["output:loss"])

    loss = run()
    seconds = time.perf_counter() - start
    kernels = tuple(_kernels(program.kernels, classes))
    about = (kernels, program.flops, "all arithmetic", program.temporary_bytes, seconds, loss)
    return Compiled(NAME, version("jaxlib"), *about), run


def _spelled(value: Value) -> str:
    return f"{value.kind}:{value.name}"


def _values(graph: StepGraph) -> dict[str, Any]:
    """The initial state, the example inputs and the hyperparameters, by the names of their values."""
    import numpy as np

    state = {f"state:{t.name}": to_numpy(t.initial) for t in graph.state}
    inputs = {f"input:{name}": to_numpy(tensor) for name, tensor in graph.inputs.items()}
    return state | inputs | {f"hyper:{name}": np.float64(value) for name, value in graph.hypers.items()}


def _kernels(found: Any, classes: Mapping[str, str]) -> Iterator[Kernel]:
    for kernel in found:
        source = Source.of(kernel.source)
        yield Kernel(
            kernel.name,
            kernel.library,
            source.phase if source is not None else "",
            layer_of(source, dict(classes)),
            kernel.read,
            kernel.written,
            len(kernel.results),
            sum(kernel.results),
            kernel.times,
        )

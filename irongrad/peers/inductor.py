"""What torch.compile makes of a step: read from Inductor's scheduler when it has generated the code of a graph."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from irongrad.peers.kernels import LOSS, OPTIMIZER, Compiled, Kernel
from irongrad.peers.torch_steps import TorchStep, torch_step
from irongrad.step.train_step import TrainStep

NAME = "inductor"


@dataclass
class _Graph:
    """A graph that Inductor compiled: its kernels, its FLOP, and how often it ran."""

    kernels: tuple[Kernel, ...]
    flops: int
    runs: int = 0


@dataclass
class _Compilation:
    """The graphs that Inductor has compiled so far."""

    graphs: list[_Graph] = field(default_factory=list)

    def forget_runs(self) -> None:
        for graph in self.graphs:
            graph.runs = 0


def compiled(step: TrainStep, folder: Path, *, one_thread: bool) -> tuple[Compiled, Callable[[], float]]:
    """Compile a step by torch.compile; return what it made, and what takes a step.

    The model with its loss is one compiled function, and the update another. Graphs count as often as one step runs
    them. A model of which torch.compile would run a part eagerly fails.
    """
    if one_thread:
        torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    running = torch_step(step, compiled=True, whole=True)
    with _watched() as compilation:
        start = time.perf_counter()
        loss = running.run()
        seconds = time.perf_counter() - start
        running.run()  # an optimizer whose state is new may compile again
        compilation.forget_runs()
        running.run()
    ran = [graph for graph in compilation.graphs if graph.runs]
    kernels = tuple(k for graph in ran for k in graph.kernels)
    flops = sum(graph.flops for graph in ran)
    about = (kernels, flops, "products and convolutions", _peak_bytes(running), seconds, loss)
    return Compiled(NAME, torch.__version__, *about), running.run


@contextmanager
def _watched() -> Iterator[_Compilation]:
    """Note every graph that Inductor compiles inside.

    Its caches are off: a graph that Dynamo traces again would come from them, and nobody would see it compiled.
    """
    from torch._dynamo import config as dynamo_config
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    usual = GraphLowering.compile_to_module
    compilation = _Compilation()

    def noting(self: Any) -> Any:
        module = usual(self)
        with V.set_graph_handler(self):
            graph = _Graph(tuple(_kernels(self)), _flops(self))
        compilation.graphs.append(graph)
        call = module.call

        def counted(arguments: Any) -> Any:
            graph.runs += 1
            return call(arguments)

        module.call = counted
        return module

    GraphLowering.compile_to_module = noting
    try:
        with config.patch(force_disable_caches=True), dynamo_config.patch(allow_rnn=True):
            yield compilation
    finally:
        GraphLowering.compile_to_module = usual


def _kernels(graph: Any) -> Iterator[Kernel]:
    """The kernels of a graph: fused loop nests, and calls of libraries."""
    from torch._inductor.ir import MultiOutput
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

    phase = "update" if graph.is_inference else "backward" if graph.is_backward else "forward"
    # The first result of the forward is the loss; the others are kept for the backward.
    results = set(graph.get_output_names()[:1]) if phase == "forward" else set()
    for node in graph.scheduler.nodes:
        if isinstance(node, NopKernelSchedulerNode) or isinstance(node.node, MultiOutput):
            continue
        read, written = _traffic(graph, node)
        made = {name: size for name, size in written.items() if name not in results and not _is_state(graph, name)}
        yield Kernel(
            node.get_name(),
            isinstance(node, ExternKernelSchedulerNode),
            phase,
            OPTIMIZER if phase == "update" else _layer(node),
            sum(read.values()),
            sum(written.values()),
            len(made),
            sum(made.values()),
        )


def _traffic(graph: Any, node: Any) -> tuple[dict[str, int], dict[str, int]]:
    """The bytes that a node reads and writes, by buffer, without those that stay in its registers or local buffers."""
    gone = graph.removed_buffers | graph.inplaced_to_remove
    written = node.get_read_write_buffer_accesses(include_reads=False, include_writes=True)
    read = node.get_read_write_buffer_accesses(include_reads=True, include_writes=False)
    made = set(node.get_buffer_names())
    return (
        {name: size for name, size in read.items() if name not in gone | made},
        {name: size for name, size in written.items() if name not in gone},
    )


def _is_state(graph: Any, name: str) -> bool:
    """Whether a buffer is the new value of an argument of the graph: a parameter, a statistic, or optimizer state."""
    buffer = graph.scheduler.name_to_buf.get(name)
    return buffer is not None and bool(buffer.get_mutations())


def _layer(node: Any) -> str:
    """The class of the module of the last operator of a node that has one; `(loss)` outside of the model."""
    origins = [origin for part in node.get_nodes() for origin in part.node.get_origins()]
    stacks = [o.meta.get("nn_module_stack") or o.meta.get("fwd_nn_module_stack") for o in sorted(origins)]
    paths = [[*stack.values()] for stack in stacks if stack]
    if not paths:
        return LOSS
    (whole, _), *inside = paths[-1]
    if not inside or inside[0][0] == f"{whole}.loss":  # of `StepModule`, which holds the model beside the loss
        return LOSS
    return str(inside[-1][1].__name__)


def _flops(graph: Any) -> int:
    from torch._inductor.fx_utils import count_flops_fx

    return sum(count_flops_fx(node) or 0 for node in graph.module.graph.nodes)


def _peak_bytes(step: TorchStep) -> int:
    """The most bytes that one step has allocated at a time, of those that it allocates itself."""
    step.clear()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step.run()
    live = most = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most

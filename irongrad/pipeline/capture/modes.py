"""Training and evaluation mode of a module for the time of a run, and modes that a trace replaces."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._export.passes import replace_set_grad_with_hop_pass as set_grad_regions
from torch._export.utils import nodes_first
from torch.fx import GraphModule

from irongrad.diagnostics.source_lines import line_of
from irongrad.graph.derivatives import SET_GRADIENTS, transforms
from irongrad.runtime.errors import UnsupportedOpError
from irongrad.step.train_step import TrainStep


@contextmanager
def mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """While open, `module` is in training or evaluation mode; on exit, each submodule gets its own mode back.

    A module that is already in training mode keeps its submodules' modes. So a BatchNorm that the user froze with
    `.eval()` stays frozen in the training graph.
    """
    before = [(m, m.training) for m in module.modules()]
    if not training or not module.training:
        with mock.patch.object(nn.Module, "train", _set_mode):
            _set_mode_of(module, training)
    try:
        yield
    finally:
        for submodule, was in before:
            submodule.training = was


@contextmanager
def in_evaluation(step: TrainStep) -> Iterator[None]:
    """While open, the model of a step and the modules beside it are in evaluation mode."""
    with ExitStack() as stack:
        for module in (step.model, *step.modules.values()):
            stack.enter_context(mode(module, training=False))
        yield


def _set_mode(module: nn.Module, mode: bool = True) -> nn.Module:
    """Do what `nn.Module.train` does, but leave out a submodule's method of that name that does something else."""
    module.training = mode
    for child in module.children():
        _set_mode_of(child, mode)
    return module


def _set_mode_of(module: nn.Module, mode: bool) -> None:
    parameters = list(inspect.signature(module.train).parameters.values())
    takes_mode = bool(parameters) and (parameters[0].name == "mode" or isinstance(parameters[0].default, bool))
    others = [p for p in parameters[1:] if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if takes_mode and not others:
        module.train(mode)
    else:
        _set_mode(module, mode)


@contextmanager
def without_fast_path() -> Iterator[None]:
    """While open, attention in evaluation mode computes what it computes in training, and what is compiled.

    PyTorch's fast path of `TransformerEncoder` puts padded rows into nested tensors, and gives zeros for them. Noise
    cannot be added to a nested tensor. Under autocast on a CPU it hands bfloat16 to a float32 kernel, and fails.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """While open, `torch.inference_mode` is `torch.no_grad`: torch 2.13's traces lose the former, or fail in it."""
    before: list[bool] = []

    def enter(context: Any) -> None:
        before.append(torch.is_grad_enabled())
        torch.set_grad_enabled(not context.mode)  # inference_mode(False) sets it within no_grad, too

    def leave(context: object, *error: object) -> None:
        torch.set_grad_enabled(before.pop())

    kind = torch.inference_mode
    with mock.patch.object(kind, "__enter__", enter), mock.patch.object(kind, "__exit__", leave):
        yield


@contextmanager
def no_grad_in_autocast() -> Iterator[None]:
    """While open, torch.export keeps a `torch.no_grad` within `torch.autocast`, which torch 2.13 loses.

    It cuts the autocast region into parts at the `no_grad`, each with an autocast of its own, and then takes a part
    for one without gradients only if that begins with the `no_grad`.
    """

    def first(nodes: Any, condition: Any) -> Any:
        return nodes_first([n for n in nodes if n.target is not torch.amp.autocast_mode._enter_autocast], condition)

    with mock.patch.object(set_grad_regions, "nodes_first", first):
        yield


@contextmanager
def whole_transforms() -> Iterator[None]:
    """While open, torch.export keeps a transform of `torch.func` in one graph, whatever enables gradients within it.

    It starts a graph wherever gradients are enabled or disabled, and transforms enable them. Under `torch.autocast`
    each of these graphs has the autocast, so a level was opened in one of them and closed in another.
    """
    make_graphs = set_grad_regions.replace_set_grad_with_hop_pass

    def mended(graph: GraphModule, signature: Any) -> Any:
        _hide_modes_of_transforms(graph)
        return make_graphs(graph, signature)

    with mock.patch.object(set_grad_regions, make_graphs.__name__, mended):
        yield


def _hide_modes_of_transforms(graph: GraphModule) -> None:
    """Put a call of ours where a transform enables or disables gradients, and nothing where they are so already."""
    enabled = torch.is_grad_enabled()
    for node in graph.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled):
        before, (enabled,) = enabled, node.args
        if enabled == before:
            graph.graph.erase_node(node)
    nodes = list(graph.graph.nodes)
    for places in transforms(nodes):
        changes = [nodes[i] for i in places if nodes[i].target is torch._C._set_grad_enabled]
        if len(changes) % 2:
            raise UnsupportedOpError(
                f"{line_of(nodes[places.start])}: torch.func.vjp is called where gradients are disabled, and the "
                "function that it returns where they are enabled, or the other way round. Call both in one place"
            )
        for node in changes:
            node.target = SET_GRADIENTS
    graph.recompile()


@contextmanager
def compiled_as_plain() -> Iterator[None]:
    """While open, a module that `torch.compile` wraps runs as it is."""

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        return module._orig_mod(*args, **kwargs)

    with mock.patch.object(OptimizedModule, "__call__", call):
        yield


@contextmanager
def exportable_modes() -> Iterator[None]:
    """While open, torch.export keeps what `torch.inference_mode`, `torch.no_grad` and `torch.compile` mean."""
    with inference_as_no_grad(), no_grad_in_autocast(), whole_transforms(), compiled_as_plain():
        yield

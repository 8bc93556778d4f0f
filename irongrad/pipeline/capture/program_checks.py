"""Check what torch.export has captured: the loss, the values beside it, the inputs, and the draws."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from irongrad.diagnostics import source_lines
from irongrad.graph.flat_graph import FlatGraph, is_inlined, regions_of
from irongrad.operators.random import draws_with, is_random, undrawable
from irongrad.runtime.errors import CaptureError, UnsupportedOpError
from irongrad.step.train_step import TrainStep


def used_inputs(program: ExportedProgram) -> list[bool]:
    """Whether each of the user's inputs is read."""
    by_name = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    return [bool(by_name[name].users) for name in program.graph_signature.user_inputs if isinstance(name, str)]


def loss_node(program: ExportedProgram) -> torch.fx.Node:
    """Return the node of `CapturedStep.train` or `.eval` that computes the loss."""
    node = next(n for n in program.graph.output_node().args[0] if n.name == program.graph_signature.user_outputs[0])
    return FlatGraph(program.graph_module).origins(node)[-1]


def check_loss(program: ExportedProgram, step: TrainStep) -> None:
    """Refuse a loss that is no floating-point scalar."""
    node = loss_node(program)
    value = node.meta["val"]
    if value.shape == () and value.dtype.is_floating_point:
        return
    place = source_lines.line_of(node, otherwise=source_lines.where(step.loss if step.loss is not None else step.model))
    inside = (
        "" if step.loss is not None else " TrainStep.loss is None, so the model's own output is taken for the loss."
    )
    raise CaptureError(
        f"{place}\n  the loss has shape {tuple(value.shape)} and dtype {value.dtype}; it must be a floating-point "
        f"scalar.{inside} Reduce it in the loss function: return loss.mean() or loss.sum()"
    )


def check_names(names: tuple[str, ...], step: TrainStep) -> None:
    """Refuse values beside the loss where they have no place."""
    if names and step.between:
        raise CaptureError(
            f"{source_lines.where(step.loss)}: a step in pieces returns the loss alone, and this loss function returns "
            f"{', '.join(names)} beside it"
        )
    if "loss" in names:
        raise CaptureError(f"{source_lines.where(step.loss)}: a value beside the loss has the name 'loss'; rename it")


def check_values(program: ExportedProgram, step: TrainStep, names: tuple[str, ...]) -> None:
    """Check that the values beside the loss are numbers that `train_steps` can stack and micro-batches can average."""
    if not names:
        return
    results = {node.name: node for node in program.graph.output_node().args[0]}
    for name, result in zip(names, program.graph_signature.user_outputs[1:], strict=True):
        value = results[str(result)].meta["val"]
        place = f"{source_lines.where(step.loss)}: the value {name!r} beside the loss"
        if value.shape != () or value.dtype.is_complex:
            raise CaptureError(
                f"{place} has shape {tuple(value.shape)} and dtype {value.dtype}; it must be a single number. Reduce "
                "it, such as by .mean(), or let the model return it"
            )
        if step.accumulate > 1 and not value.dtype.is_floating_point:
            raise CaptureError(
                f"{place} is {value.dtype}, and micro-batches take the mean of their values: return {name}.float()"
            )


def check_used(program: ExportedProgram, step: TrainStep) -> None:
    """Refuse an input that neither the model nor the loss reads."""
    for name, used in zip(step.inputs, used_inputs(program), strict=True):
        if not used:
            raise CaptureError(
                f"{source_lines.where(step.model)}: input {name!r} is not used by the model or the loss. Remove it "
                "from TrainStep.inputs, or list the inputs that the model takes in TrainStep.model_inputs if it went "
                "to the wrong place"
            )


def refuse_undrawable(graph: GraphModule, *, once: bool = True) -> None:
    """Refuse an operator that draws random numbers which a compiled step cannot draw.

    Args:
        graph: the graph, with its regions.
        once: whether the graph runs once a step. A draw is identified by the number of its call, which is the same in
            every iteration of a loop.

    Raises:
        UnsupportedOpError: names the first such operator, with the user's line.
    """
    for node in graph.graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            for region in regions_of(graph, node):
                refuse_undrawable(region, once=once and is_inlined(node))
            continue
        reason = None
        if is_random(node.target):
            reason = undrawable(node.target, node.kwargs.get("generator"))
        if reason is None and not once and draws_with(node.target, node.args, node.kwargs):
            reason = "draws random numbers in a branch or a loop. Draw them before it, and hand them in"
        if reason is not None:
            raise UnsupportedOpError(f"{source_lines.line_of(node)}: {node.target} {reason}")

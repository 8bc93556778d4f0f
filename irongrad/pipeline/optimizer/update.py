"""JointStep -> StepGraph: add the optimizer's update to the joint graph, and its state to the model's."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from irongrad.graph.cleanup import eliminate_dead_code
from irongrad.graph.relied_state import refuse_changed
from irongrad.graph.step_graph import Function, StateTensor, StepGraph, Value, relied_by_both, specialised_name
from irongrad.operators.legalize.retrace import interpret, retrace
from irongrad.operators.legalize.scalars import ScalarsToTensors
from irongrad.pipeline.differentiate.differentiate import JointStep
from irongrad.pipeline.optimizer.after_update import AfterUpdate, trace_after
from irongrad.pipeline.optimizer.repeated_updates import copy_to_all
from irongrad.pipeline.optimizer.state import steps_so_far
from irongrad.pipeline.optimizer.trace import Update, trace_update
from irongrad.runtime.errors import CaptureError
from irongrad.runtime.manifest import STEPS, Role
from irongrad.step.loss_scale import SKIPPED_VALUE, LossScale, Values, loss_scale_of, scaled_update

COUNT = Value("count", "accumulated")
_STEPS = Value("state", STEPS)
_UPDATES_MADE = Value("made", "updates")  # by each optimizer; only inside a scaled update


def add_optimizer(joint: JointStep, after: AfterUpdate | None = None) -> StepGraph:
    """Trace the update and build the functions of the step graph.

    Args:
        joint: the differentiated step.
        after: the trace of its `after_step`, if there is one already.

    Raises:
        CaptureError: an optimizer's state or update cannot be captured, a hyperparameter has the name of an input, an
            index of the update is not proved to be in range, or the step changes state on whose values it relies.
    """
    step = joint.captured.step
    update = trace_update(joint)
    after = after or trace_after(step)
    steps = StateTensor(STEPS, Role.COUNTER, steps_so_far(update.state))
    relied = after.relied if after is not None else {}
    of_model = (replace(t, relied=relied_by_both(t.relied, relied.get(t.name))) for t in joint.state)
    state = (*of_model, *update.state, steps)
    # Tensors of our own: an eager run in another thread gives the user's other memory meanwhile.
    entries = {name: made.inputs for name, made in joint.captured.inference.items() if name in step.entries}
    taken = {*step.inputs, *(n for names in entries.values() for n in names)}  # an entry may be left out
    inputs = {name: tensor.detach() for name, tensor in step.examples.items() if name in taken}
    hypers = _hypers(joint, update, after)
    fixed = [*update.fixed, *(after.fixed if after is not None else ())]
    if clash := sorted(set(hypers) & set(inputs)):
        owner = "after_step's numbers" if after is not None and clash[0] in _names(after) else "hyperparameters"
        raise CaptureError(f"inputs {clash} have the names of {owner}; rename the inputs")
    functions = {
        "joint": _joint_function(joint.joint, update),
        "update": _update_function(joint, update, after),
        "accumulate": _accumulate_function(joint, update),
        "mean": _mean_function(joint, update),
        **joint.inference,
    }
    for specialised in joint.specialised[:-1]:  # the functions of the last have the plain names
        functions[specialised_name("joint", specialised.bucket)] = _joint_function(specialised.joint, update)
        functions |= {specialised_name(n, specialised.bucket): f for n, f in specialised.inference.items()}
    graph = StepGraph(
        state,
        update.parameters,
        inputs,
        hypers,
        {h.name: h.default for h in fixed},
        functions,
        step.accumulate,
        step.precision,
        buckets=step.bucket_list,
        dynamic={name: dims for name, dims in step.dynamic.items() if name in taken},
        bucket_limits=joint.bucket_limits,
        limits=joint.limits,
        entries=entries,
        output_sizes=joint.output_sizes,
    )
    refuse_changed([graph])
    return graph


def _names(after: AfterUpdate) -> set[str]:
    return {h.name for h in after.hypers}


def _hypers(joint: JointStep, update: Update, after: AfterUpdate | None = None) -> dict[str, float]:
    """The run-time hyperparameters of the update, and of what comes after it, with their defaults."""
    scale = loss_scale_of(joint.captured.step)
    own = {h.name: h.default for h in update.hypers} | dict(scale.hypers if scale is not None else {})
    more = {h.name: h.default for h in after.hypers} if after is not None else {}
    if clash := sorted(more.keys() & {*own, *(h.name for h in update.fixed)}):
        raise CaptureError(f"after_step has numbers with the names of hyperparameters, {clash}; rename them")
    return own | more


def _update_arguments(update: Update, count: Value, scale: LossScale | None) -> list[Value]:
    return [
        *(Value("state", n) for n in update.parameters),
        *(Value("gradient", n) for n in update.parameters),
        *(Value("state", t.name) for t in update.state),
        count,
        *(scale.values if scale is not None else ()),
        *(Value("hyper", h.name) for h in update.hypers),
        *(Value("hyper", n) for n in (scale.hypers if scale is not None else ())),
    ]


def _update_results(update: Update) -> list[Value]:
    return [*(Value("state", n) for n in update.parameters), *(Value("state", t.name) for t in update.state)]


def _examples(joint: JointStep, update: Update, after: AfterUpdate | None = None) -> Values:
    examples = {Value("state", t.name): t.initial for t in (*joint.state, *update.state)}
    examples[_STEPS] = torch.zeros((), dtype=torch.int64)
    examples[_UPDATES_MADE] = torch.zeros(len(joint.captured.step.optimizers), dtype=torch.int64)
    examples |= {Value("hyper", n): torch.zeros((), dtype=torch.float64) for n in _hypers(joint, update, after)}
    for kind in ("gradient", "accumulator"):
        examples |= {Value(kind, n): examples[Value("state", n)] for n in update.parameters}
    examples[COUNT] = torch.ones((), dtype=torch.float64)
    examples |= {Value("input", n): t for n, t in joint.captured.step.inputs.items()}
    return examples


def _update_function(joint: JointStep, update: Update, after: AfterUpdate | None) -> Function:
    """Build the update of the optimizers, and what the user's `after_step` does after it."""
    optimizers = _optimizers_function(joint, update)
    return optimizers if after is None else _followed(optimizers, after, _examples(joint, update, after))


def _followed(update: Function, after: AfterUpdate, examples: Values) -> Function:
    """Build the function that runs `update`, and then `after` on the new state."""
    read = [a for a in after.arguments if a not in update.arguments and a not in update.results]
    arguments = (*update.arguments, *read)
    results = (*update.results, *(r for r in after.results if r not in update.results))

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        values = dict(zip(arguments, tensors, strict=True))
        new = dict(zip(update.results, interpret(update.graph, [values[a] for a in update.arguments]), strict=True))
        values |= new
        changed = ScalarsToTensors(after.graph).run(*(values[a] for a in after.arguments), enable_io_processing=False)
        new |= {r: _like(values[r], t) for r, t in zip(after.results, changed, strict=True)}
        return [new[r] for r in results]

    return Function(retrace(run, [examples[a] for a in arguments]), arguments, results)


def _optimizers_function(joint: JointStep, update: Update) -> Function:
    """Build the update; it raises the step count by one even if the loss scale skips the update."""
    optimizers = len(joint.captured.step.optimizers)
    scale = loss_scale_of(joint.captured.step)
    if scale is None:
        return _counted_update(joint, update, _STEPS)
    plain = _counted_update(joint, update, _UPDATES_MADE)

    def apply(values: Values) -> Values:
        made = values[_STEPS].expand(optimizers)
        if SKIPPED_VALUE in values:
            made = made - values[SKIPPED_VALUE]
        outputs = interpret(plain.graph, [made if a == _UPDATES_MADE else values[a] for a in plain.arguments])
        return {r: t for r, t in zip(plain.results, outputs, strict=True) if r != _UPDATES_MADE}

    rule = scaled_update(scale, update.owners, apply)
    arguments = _update_arguments(update, _STEPS, scale)
    results = [*_update_results(update), _STEPS, *(scale.values if scale.dynamic else ())]

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        values = dict(zip(arguments, tensors, strict=True))
        new = rule(values) | {_STEPS: values[_STEPS] + 1}
        return [new[r] for r in results]

    examples = _examples(joint, update)
    return Function(retrace(run, [examples[a] for a in arguments]), tuple(arguments), tuple(results))


def _counted_update(joint: JointStep, update: Update, count: Value) -> Function:
    """Build the update of all parameters; it also raises `count`: one number, or one for each optimizer."""
    arguments = _update_arguments(update, count, None)
    traced = [*update.traced, count]

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        values = dict(zip(arguments, tensors, strict=True))
        operands = [
            values[a].expand(len(joint.captured.step.optimizers)) if a == count else values[a] for a in arguments
        ]
        outputs = ScalarsToTensors(update.graph).run(*operands, enable_io_processing=False)
        new = zip(update.traced, outputs, strict=True)
        return [*(_like(values[v], t) if v.kind == "state" else t for v, t in new), values[count] + 1]

    examples = _examples(joint, update)
    graph = retrace(run, [examples[a] for a in arguments])
    new = copy_to_all(graph, arguments, traced, update.alike, update.initial)
    results = [*_update_results(update), count]
    graph.graph.output_node().args = ([new[r] for r in results],)
    eliminate_dead_code(graph)
    graph.recompile()
    return Function(graph, tuple(arguments), tuple(results))


def _like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return new.to(old.dtype).reshape(old.shape)


def _joint_function(whole: Function, update: Update) -> Function:
    """Drop the gradients of parameters that no optimizer holds from the joint graph."""
    kept = [i for i, r in enumerate(whole.results) if r.kind != "gradient" or r.name in update.parameters]
    if len(kept) == len(whole.results):
        return whole
    graph = copy.deepcopy(whole.graph)
    output = graph.graph.output_node()
    output.args = ([output.args[0][i] for i in kept],)
    eliminate_dead_code(graph)
    graph.recompile()
    return Function(graph, whole.arguments, tuple(whole.results[i] for i in kept))


def _accumulate_function(joint: JointStep, update: Update) -> Function:
    """Build the function that adds the gradients to the accumulators."""
    gradients = [Value("gradient", n) for n in update.parameters]
    accumulators = [Value("accumulator", n) for n in update.parameters]

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        half = len(gradients)
        return [total + gradient for gradient, total in zip(tensors[:half], tensors[half:], strict=True)]

    examples = _examples(joint, update)
    arguments = (*gradients, *accumulators)
    return Function(retrace(run, [examples[a] for a in arguments]), arguments, tuple(accumulators))


def _mean_function(joint: JointStep, update: Update) -> Function:
    """Build the function that divides the accumulated sums by the number of gradients in each."""
    arguments = (*(Value("accumulator", n) for n in update.parameters), COUNT)

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        *sums, count = tensors
        return [(total / count).to(total.dtype) for total in sums]  # of rank 0 they would become the count's float64

    examples = _examples(joint, update)
    results = tuple(Value("gradient", n) for n in update.parameters)
    return Function(retrace(run, [examples[a] for a in arguments]), arguments, results)

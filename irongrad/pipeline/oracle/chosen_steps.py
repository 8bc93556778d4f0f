"""Steps chosen where numbers break: values of inputs and hyperparameters at which a wrong program shows.

The example inputs are seldom at an edge. So one more step is compared with eager for each of several choices: all
values equal, zero, at an end of their range, a row that a mask hides, and each hyperparameter that may be zero at zero.
A choice that eager itself does not survive is left out, and the report says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice

import numpy as np
import torch

from irongrad.graph.dtypes import to_numpy
from irongrad.graph.step_graph import Range, StepGraph
from irongrad.pipeline.capture.capture import CapturedStep
from irongrad.pipeline.oracle.eager_run import Variant, elements_of
from irongrad.pipeline.oracle.expected_values import Expected
from irongrad.pipeline.oracle.oracle import LARGE, golden_runs
from irongrad.pipeline.oracle.steps_at_rest import free_hypers, is_bounded, still, with_rest
from irongrad.runtime.golden import Golden, is_later, key_of
from irongrad.runtime.manifest import UNLIMITED, Role
from irongrad.runtime.undecided import MOMENTS
from irongrad.step.hyperparameters import hyperparameters
from irongrad.step.optimizer_slots import is_foreign
from irongrad.step.train_step import TrainStep

MOST = 12
# Of a large step, whose eager step takes seconds; another is tried if eager does not survive the first. The own second
# step of most large steps takes the chosen inputs, so no further step is made.
OF_LARGE_STEPS = 1

# Equal values cancel in normalisations, which amplifies rounding: eager float32 errs by up to 1.3 of the tolerance that
# noise derives there (BatchNorm over zeros). A wrong program errs by orders of magnitude.
_WIDER = 4.0

# A larger number has an infinite square in float32.
_LARGEST_ROOT = float(np.sqrt(np.finfo(np.float32).max))

# Keys of parameter groups that may be zero.
_EDGES = ("momentum", "betas", "weight_decay", "dampening")

# Operators, as an exported program names them, for which equal values in a batch are a special case. Statistics of
# equal values cancel, and rounding then decides most updates. Equal scores are a tie. So a choice is a step of its own.
_BETWEEN_VALUES = frozenset({"batch_norm", "instance_norm", "sync_batch_norm", "topk", "sort", "argsort", "argmax"})

# The share of a parameter's update above which a tolerance hides it, and the share of parameters that may be hidden. A
# bias before a normalisation, and the keys' bias in attention, have gradients that are zero but for rounding anywhere.
_HIDDEN = 0.1
_MOST_HIDDEN = 0.25


@dataclass(frozen=True)
class Choice:
    """Inputs or hyperparameters to compare a step at.

    Attributes:
        about: what they are, for a message.
        inputs: inputs that replace the example's.
        hypers: hyperparameters that replace the defaults, by name.
    """

    about: str
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    hypers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Chosen:
    """The expected values of the choices.

    Attributes:
        expected: the values of each choice that eager survives.
        skipped: the other choices, each with the reason.
    """

    expected: tuple[Expected, ...] = ()
    skipped: tuple[str, ...] = ()


def own_and_chosen(
    captured: CapturedStep, graph: StepGraph, steps: int, check: Callable[[], None] = lambda: None
) -> tuple[Expected, Chosen]:
    """Make the first runs of a step: of its own training, and of each choice.

    Args:
        captured: the captured step.
        graph: has the names of the values.
        steps: the most training steps in a run of its own.
        check: called before each value; an exception from it ends the runs.
    """
    joins = elements_of(graph) > LARGE and not _compares_values(captured)
    stays = staying(captured.step, graph) if joins else {}
    found = input_choices(captured.step, graph, graph.ranges) if stays else iter(())
    skipped: list[str] = []
    for choice in islice(found, OF_LARGE_STEPS + 1):
        variant = Variant(stays, hyper_steps=frozenset({0}), later=choice.inputs)
        runs = golden_runs(captured, graph, steps, check, variant)
        made = _survived(choice, runs, partial(_comparable_later, choice.about), check)
        if isinstance(made, Expected) and _hides_updates(graph, made.golden):
            skipped.clear()
            break
        if isinstance(made, Expected):
            return with_rest(captured, graph, made, check), Chosen((), tuple(skipped))
        skipped.append(made)
    own = with_rest(captured, graph, Expected(golden_runs(captured, graph, steps, check)), check)
    return own, Chosen((), tuple(skipped)) if skipped else chosen_steps(captured, graph, check)


def staying(step: TrainStep, graph: StepGraph) -> dict[str, float]:
    """Hyperparameters at which a step moves no parameter, and its gradients show in the state; empty if none do.

    The step after such a step begins at the initial parameters, where ties are that an update breaks, as of biases that
    are all zero. It shows a wrong gradient of the step before, as its moments include that gradient.
    """
    hypers = still(step, graph)
    state = {t.name for t in graph.state}
    shows = all(any(f"optimizer/{moment}/{name}" in state for moment in MOMENTS) for name in graph.gradients)
    is_free = {h.name for h in hyperparameters(step.optimizers) if h.key == "lr"} <= hypers.keys()
    return hypers if shows and is_free and not any(map(is_foreign, step.optimizers)) else {}


def _compares_values(captured: CapturedStep) -> bool:
    """Whether the forward normalises or compares values, of which a choice makes many equal."""
    operators = (node.target for node in captured.train.graph.nodes if node.op == "call_function")
    return any(op._opname in _BETWEEN_VALUES for op in operators if isinstance(op, torch._ops.OpOverload))


def _hides_updates(graph: StepGraph, golden: Golden) -> bool:
    """Whether rounding decides most updates of parameters at the chosen inputs, as behind a BatchNorm over zeros."""
    hidden: list[bool] = []
    for tensor in graph.state:
        if tensor.name in graph.gradients and tensor.role is Role.PARAMETER:
            key = key_of("state", golden.steps, tensor.name)
            moved = np.abs(golden.expected[key] - to_numpy(tensor.initial)).max(initial=0.0)
            hidden.append(bool(golden.allowed[key] > _HIDDEN * moved > 0.0))
    return sum(hidden) > _MOST_HIDDEN * len(hidden)


def chosen_steps(captured: CapturedStep, graph: StepGraph, check: Callable[[], None] = lambda: None) -> Chosen:
    """Make the first runs of each choice; `check` is called before each value, and ends the runs by an exception."""
    expected: list[Expected] = []
    skipped: list[str] = []
    is_large = elements_of(graph) > LARGE
    found = chain(input_choices(captured.step, graph, graph.ranges), hyper_choices(captured.step, graph))
    for choice in islice(found, OF_LARGE_STEPS + 1 if is_large else MOST):
        if is_large and len(expected) == OF_LARGE_STEPS:
            break
        at_choice = replace(captured, step=captured.step.with_examples(choice.inputs))
        hidden = _hidden(graph, choice)
        # If no gradients are recorded, the state that is not compared tells whether eager survives.
        keeps = partial(_is_compared, hidden) if is_large or "accumulate" in graph.functions else None
        runs = golden_runs(at_choice, graph, 1, check, Variant(choice.hypers), keeps)
        made = _survived(choice, runs, partial(_comparable, hidden, choice.about), check)
        if isinstance(made, Expected):
            expected.append(made)
        else:
            skipped.append(made)
    return Chosen(tuple(expected), tuple(skipped))


def _survived(
    choice: Choice, runs: Iterator[Golden], comparable: Callable[[Golden], Golden], check: Callable[[], None]
) -> Expected | str:
    """Make the first runs of a choice; return why it is skipped if eager does not survive it."""
    try:
        first = next(runs)
        made = Expected(map(comparable, chain([first], runs)))
    except Exception as error:
        check()  # the error may be its own
        return f"{choice.about}: eager raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if broken := _broken(first, is_later if first.later else bool):
        return f"{choice.about}: eager gives NaN or infinity, in {broken}"
    if huge := _huge(made.golden):
        return f"{choice.about}: rounding decides whether an optimizer's square of {huge} is infinite"
    return made


def _huge(golden: Golden) -> str:
    """The first key of a gradient whose rounding error may have an infinite square; empty if there is none.

    What an optimizer makes of gradients is not compared at a choice, but it has to be finite. Behind a BatchNorm over
    zeros, each further one multiplies rounding errors by up to 316: in eager, too, 16 of them make Adam's moments
    infinite.
    """
    keys = (key for key in golden.expected if key.startswith("gradient/"))
    return next((key for key in keys if golden.allowed[key] > _LARGEST_ROOT), "")


def input_choices(step: TrainStep, graph: StepGraph, ranges: Sequence[Range]) -> Iterator[Choice]:
    """Yield the choices of inputs, the most telling first; for a large step, first one for all inputs together."""
    limits = {r.input: r for r in ranges}
    lists = [found for n, t in step.inputs.items() if (found := list(_values(n, t, limits.get(n))))]
    if elements_of(graph) > LARGE and len(lists) > 1:
        yield _together([found[0] for found in lists])
    yield from _in_turn(lists)


def hyper_choices(step: TrainStep, graph: StepGraph) -> Iterator[Choice]:
    """Yield the choices of hyperparameters."""
    edges: dict[str, dict[str, float]] = {}
    for hyper in free_hypers(step, graph):
        if hyper.key in _EDGES and hyper.default != 0.0:
            name = hyper.name.rpartition("_")[0] if hyper.name.rpartition("_")[2].isdigit() else hyper.name
            edges.setdefault(name, {})[hyper.name] = 0.0
    for name, hypers in edges.items():
        yield Choice(f"{name} = 0", hypers=hypers)


def _together(parts: Sequence[Choice]) -> Choice:
    """All of `parts` in one step."""
    inputs = {name: values for part in parts for name, values in part.inputs.items()}
    return Choice(" and ".join(part.about for part in parts), inputs)


def _in_turn(lists: Sequence[Sequence[Choice]]) -> Iterator[Choice]:
    """Yield the first of each list, then the second of each, and so on."""
    for position in range(max(map(len, lists), default=0)):
        yield from (items[position] for items in lists if position < len(items))


def _values(name: str, tensor: torch.Tensor, limit: Range | None) -> Iterator[Choice]:
    """Other values of one input that its type and range allow."""
    found = [(f"all of {name} {value}", torch.full_like(tensor, value)) for value in _extremes(tensor, limit)]
    if tensor.ndim and tensor.numel() and tensor.shape[0] > 1 and _is_mask(tensor):
        for value in (1, 0):
            row = tensor.clone()
            row[0] = value
            found.insert(0, (f"the first row of {name} {row[0].flatten()[0].item()}", row))
    for about, values in found:
        if not torch.equal(values, tensor):
            yield Choice(about, {name: values})


def _extremes(tensor: torch.Tensor, limit: Range | None) -> Iterable[bool | int | float]:
    if tensor.dtype == torch.bool:
        return (False, True)
    if tensor.is_floating_point():
        return (0.0,)
    if tensor.is_complex() or not tensor.numel():
        return ()
    low, high = int(tensor.min()), int(tensor.max())
    if limit is not None and not limit.limits:
        low = limit.minimum if limit.minimum > -UNLIMITED else low
        high = limit.maximum if limit.maximum < UNLIMITED else high
    return dict.fromkeys((low, high))


def _is_mask(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.bool or (not tensor.is_complex() and bool(((tensor == 0) | (tensor == 1)).all()))


def _hidden(graph: StepGraph, choice: Choice) -> frozenset[str]:
    """The golden keys of what is not compared at an edge: what the update makes of values that the step computes there.

    There a gradient may be zero but for rounding, and Adam makes a whole step of its sign. So parameters are compared
    if no entry point returns gradients, and at other hyperparameters, where the gradients are the example's own. An
    optimizer has other state at some of these, such as no momentum.
    """
    whole = bool(choice.hypers) or "accumulate" not in graph.functions
    left_out = {Role.OPTIMIZER} if whole else {Role.OPTIMIZER, Role.PARAMETER}
    return frozenset(key_of("state", 1, t.name) for t in graph.state if t.role in left_out)


def _is_compared(hidden: frozenset[str], key: str) -> bool:
    return key not in hidden


def _comparable(hidden: frozenset[str], about: str, golden: Golden) -> Golden:
    expected = {key: value for key, value in golden.expected.items() if key not in hidden}
    allowed = {key: _WIDER * golden.allowed[key] for key in expected}
    return replace(golden, expected=expected, allowed=allowed, about=about)


def _comparable_later(about: str, golden: Golden) -> Golden:
    """As `_comparable`, for a choice that the second step of several takes: what the first computes stays as it is."""
    allowed = {key: bound * (_WIDER if is_later(key) else 1.0) for key, bound in golden.allowed.items()}
    return replace(golden, allowed=allowed, about=about)


def _broken(golden: Golden, counts: Callable[[str], bool]) -> str:
    """The first key that counts of a value that is NaN or infinite in a run of eager; empty if there is none."""
    return next((key for key in golden.expected if counts(key) and not is_bounded(golden, key)), "")

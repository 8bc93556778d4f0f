"""The entry points of a step graph: names, arguments and results, as the manifest describes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from irongrad.graph.dtypes import numpy_name
from irongrad.graph.step_graph import Range, StepGraph
from irongrad.runtime.errors import UserError
from irongrad.runtime.manifest import (
    OF_GRADIENTS,
    OF_STATE,
    OF_UPDATES,
    STACKED,
    STEPS_DIM,
    TICKET,
    TRAIN_AND_EXPORT,
    EntryPoint,
    Role,
    StateSpec,
    TensorSpec,
    of_entry,
    trained_state,
)
from irongrad.runtime.suggestion import suggestion
from irongrad.step.train_step import INFERENCE

# The functions of the step graph that each entry point runs, in order.
_CHAINS = {
    "train_step": ("joint", "update"),
    "train_steps": ("joint", "update"),
    TRAIN_AND_EXPORT: ("joint", "update"),
    "grad_step": ("joint", "accumulate"),
    "apply_step": ("mean", "update"),
    "forward": ("forward",),
    "finish_step": ("finish", "update"),
    "eval_step": ("eval",),
    "predict": ("predict",),
    "call": ("call",),
}


# The entry points of an undivided step. A split step has `forward` and `finish_step` in their place.
_OF_UNDIVIDED_STEP = ("train_step", *STACKED, "grad_step", "apply_step", *OF_GRADIENTS)
_TICKET = TensorSpec(TICKET, "int64", ())


def chain_of(entry: str, graph: StepGraph) -> tuple[str, ...]:
    """The functions of `graph` that an entry point runs, in order; none for an entry point that computes nothing.

    With micro-batches, gradients are accumulated before the update. The updates of shards follow it. An imported step
    is a single function, `step`.
    """
    chain = (entry,) if entry in graph.entries else _CHAINS.get(entry, ())
    if chain == ("joint", "update") and "step" in graph.functions:
        return ("step",)
    if graph.accumulate > 1 and chain == ("joint", "update"):
        chain = ("joint", "accumulate", "update")
    return (*chain, *(s.function for s in graph.shards)) if "update" in chain else chain


def chains_of(entry: str, graph: StepGraph) -> list[tuple[str, ...]]:
    """The distinct chains of an entry point over all forms of its functions; see `chain_of`."""
    chain = chain_of(entry, graph)
    made = [tuple(graph.in_bucket(n, bucket) for n in chain) for bucket in graph.forms] or [chain]
    return list(dict.fromkeys(made))


def inference_of(chosen: Sequence[str] | None, entries: Collection[str]) -> tuple[str, ...]:
    """Which of `eval`, `predict` and the user's `entries` the entry points `chosen` run.

    All, if `chosen` is None or has an unknown name. `describe` later refuses such a name and lists the known ones.
    """
    if chosen is None or not set(chosen) <= {*SUMMARIES, *entries}:
        return (*INFERENCE, *entries)
    return tuple(
        name for name in (*INFERENCE, *entries) if any(name in _CHAINS.get(entry, (entry,)) for entry in chosen)
    )


SUMMARIES = {
    "train_step": "One training step; returns the loss before the update.",
    "train_steps": "K training steps in one call, over inputs stacked along a first dimension; returns every loss.",
    TRAIN_AND_EXPORT: "As `train_steps`; returns every loss, and the state that training changes.",
    "grad_step": "Loss and gradients, added to the accumulators; parameters stay as they are.",
    "apply_step": "The update from the mean of the accumulated gradients, then cleared; returns the step count.",
    "forward": "The model's outputs in training mode, and the number of this forward; the state stays as it is.",
    "finish_step": "The rest of the training step whose forward gave this number; returns the loss before the update.",
    "eval_step": "The loss in evaluation mode.",
    "predict": "The model's outputs in evaluation mode.",
    "call": "The compiled function.",
    "export_state": "Every state tensor, in the manifest's order, without those of a base file.",
    "import_state": "Replaces every state tensor, in the same order; returns the step count.",
    "export_gradients": "The accumulated sums of gradients, and of how many steps.",
    "import_gradients": "Replaces the accumulated sums of gradients and their number, which it returns.",
    "reset_carry": "Puts the carried values back to the beginning; returns the step count.",
    "reset": "Puts the state back to the loaded parameter file, clears the accumulators; returns the step count.",
}


# The entry points that concern the state of all steps.
OF_WHOLE = (*OF_STATE, "reset", "reset_carry")

_OF_ENTRY = "A function over the model, in evaluation mode; the state stays as it is."


@dataclass(frozen=True)
class Interface:
    """Entry points and state of a step, ready for the manifest.

    Attributes:
        entry_points: the entry points, in the order of their export.
        state: the specifications of all state tensors.
    """

    entry_points: tuple[EntryPoint, ...]
    state: tuple[StateSpec, ...]

    @property
    def accumulates(self) -> bool:
        """Whether an entry point reads or writes accumulated gradients."""
        return any(n in self for n in ("grad_step", "apply_step", *OF_GRADIENTS))

    def __contains__(self, name: str) -> bool:
        return any(e.name == name for e in self.entry_points)


def describe(graph: StepGraph, chosen: Sequence[str] | None) -> Interface:
    """Describe all entry points of `graph`, or only the `chosen` ones.

    Those of a named step carry its name, except the user's own entries and those of the whole state.

    Raises:
        UserError: `chosen` has an unknown name, or only entry points that compute nothing.
    """
    inputs = {n: _with_names(_spec(n, t, graph.ranges), graph.dynamic.get(n, {})) for n, t in graph.inputs.items()}
    state = tuple(
        StateSpec(t.name, numpy_name(t.initial.dtype), tuple(t.initial.shape), t.role, t.aliases, t.frozen)
        for t in graph.state
    )
    in_base = {t.name for t in graph.state if t.in_base}
    tensors = tuple(TensorSpec(s.name, s.dtype, s.shape) for s in state if s.name not in in_base)
    hypers = tuple(graph.hypers)
    in_pieces = "finish" in graph.functions
    trained = _reported(graph, "finish" if in_pieces else chain_of("train_step", graph)[0])
    evaluated = _reported(graph, "eval") if "eval" in graph.functions else ()
    of_entries = {name for names in graph.entries.values() for name in names}
    everything = tuple(spec for name, spec in inputs.items() if name not in of_entries)
    stacked = tuple(_stacked(s) for s in everything)
    losses = (_stacked(trained[0], "losses"), *map(_stacked, trained[1:]))
    exported = tuple(TensorSpec(s.name, s.dtype, s.shape) for s in trained_state(state))
    sums = tuple(_spec(n, graph.tensor(n).initial, ()) for n in graph.gradients)
    count = TensorSpec("count", "int64", ())
    # Every entry point has a result: nothing waits for a call without one, and then iree-run-module of IREE 3.13.0
    # sometimes hangs at exit.
    steps = TensorSpec("steps", "int64", ())
    signatures = {
        "train_step": (everything, hypers, trained),
        "train_steps": (stacked, hypers, losses),
        TRAIN_AND_EXPORT: (stacked, hypers, (*losses, *exported)),
        "grad_step": (everything, (), trained),
        "apply_step": ((), hypers, (steps,)),
        "eval_step": (everything, (), evaluated),
        "predict": _inference(graph, "predict", inputs),
        **{name: _inference(graph, name, inputs) for name in graph.entries},
        "export_state": ((), (), tensors),
        "import_state": (tensors, (), (steps,)),
        "export_gradients": ((), (), (*sums, count)),
        "import_gradients": ((*sums, count), (), (count,)),
        "reset": ((), (), (steps,)),
        "reset_carry": ((), (), (steps,)),
    }
    if not any(tensor.role is Role.CARRIED for tensor in graph.state):
        del signatures["reset_carry"]
    if in_pieces:
        pieces = {"forward": _forward(graph, inputs), "finish_step": (_late_inputs(graph, inputs), hypers, trained)}
        signatures = {**pieces, **{name: parts for name, parts in signatures.items() if name not in _OF_UNDIVIDED_STEP}}
    signatures = {n: parts for n, parts in signatures.items() if set(chain_of(n, graph)) <= set(graph.functions)}
    if "grad_step" not in signatures:
        signatures = {name: parts for name, parts in signatures.items() if name not in OF_GRADIENTS}
    names = _chosen(list(signatures), chosen, graph)
    own = {n: graph.name if n in SUMMARIES and n not in OF_WHOLE else "" for n in names}
    points = tuple(EntryPoint(n, *signatures[n], SUMMARIES.get(n, _OF_ENTRY), own[n]) for n in names)
    return Interface(points, state)


def interfaces_of(graphs: Mapping[str, StepGraph], chosen: Sequence[str] | None) -> dict[str, Interface]:
    """Describe the entry points of steps over one state; those of the whole state are the first step's.

    Of several steps, those of which nothing is chosen are left out.

    Args:
        graphs: the step graphs by name.
        chosen: the names of the entry points to include, for each step that has them; None for all.

    Raises:
        UserError: as `describe`; no step has an entry point of a chosen name.
    """
    everything = {name: {e.name for e in describe(graph, None).entry_points} for name, graph in graphs.items()}
    known = {n for step, names in everything.items() for n in (*names, *(f"{step}.{n}" for n in names if step))}
    if unknown := [n for n in chosen or () if n not in known]:
        hint = suggestion(unknown[0], known)
        raise UserError(f"there is no entry point {unknown[0]!r}{hint}; there are {', '.join(sorted(known))}")
    found: dict[str, Interface] = {}
    for name, graph in graphs.items():
        mine = None if chosen is None else [n for n in everything[name] if n in chosen or f"{name}.{n}" in chosen]
        if len(graphs) > 1 and mine is not None and not any(chain_of(n, graph) for n in mine):
            continue
        interface = describe(graph, mine)
        if found:
            own = tuple(e for e in interface.entry_points if e.name not in OF_WHOLE)
            interface = replace(interface, entry_points=own)
        found[name] = interface
    if not found:
        raise UserError(f"entry points {list(chosen or ())} compute nothing; add one of a step")
    return found


def without_unused_state(graphs: Mapping[str, StepGraph], chosen: Sequence[str] | None) -> dict[str, StepGraph]:
    """Drop the state of the optimizers and of loss scales, if no chosen entry point of any step updates.

    So an artifact that only predicts has the size of the model. It still takes checkpoints of the whole step.
    """
    updating = {"update", "step"}
    chains = [chain_of(name, graph) for graph in graphs.values() for name in chosen or ()]
    if chosen is None or any(updating & {*chain} for chain in chains):
        return dict(graphs)
    return {
        name: replace(graph, state=tuple(t for t in graph.state if t.role not in OF_UPDATES))
        for name, graph in graphs.items()
    }


def exchanging(graphs: Mapping[str, StepGraph], bucket_bytes: int) -> dict[str, StepGraph]:
    """Mark the steps whose ranks exchange gradients, in buckets of at most `bucket_bytes`; 0 for none.

    Raises:
        UserError: a step carries values from call to call, is in pieces, or came from elsewhere than PyTorch, so its
            gradients cannot be exchanged.
    """
    for graph in graphs.values() if bucket_bytes else ():
        if carried := [t.name for t in graph.state if t.role is Role.CARRIED]:
            name = carried[0].rpartition("/")[2]
            raise UserError(
                f"{name!r} is carried from call to call, and belongs to one rank's data, so it cannot be part of a "
                "state that all ranks share: compile without communicate, or give the value as an input"
            )
        if "joint" not in graph.functions:
            raise UserError("communicate needs forward and backward in one piece: leave out between")
    return {name: replace(graph, bucket_bytes=bucket_bytes) for name, graph in graphs.items()}


def describe_function(graph: StepGraph) -> Interface:
    """Describe the single entry point of a compiled function, and the constants that it reads."""
    function = graph.functions["call"]
    inputs = tuple(_spec(n, t, graph.ranges) for n, t in graph.inputs.items())
    outputs = tuple(_output(graph, "call", r.name) for r in function.results)
    state = tuple(StateSpec(t.name, numpy_name(t.initial.dtype), tuple(t.initial.shape), t.role) for t in graph.state)
    return Interface((EntryPoint("call", inputs, (), outputs, SUMMARIES["call"]),), state)


def selected(graph: StepGraph, interface: Interface) -> StepGraph:
    """A copy of `graph` with only the functions that the entry points of `interface` need, and their checks."""
    names = {name for e in interface.entry_points for chain in chains_of(e.name, graph) for name in chain}
    functions = {n: f for n, f in graph.functions.items() if n.removeprefix("check.") in names}
    return replace(graph, functions=functions)


def _chosen(available: list[str], chosen: Sequence[str] | None, graph: StepGraph) -> list[str]:
    if chosen is None:
        return available
    if unknown := [n for n in chosen if n not in available]:
        raise UserError(f"entry points {unknown} do not exist; this step has {available}")
    if not any(chain_of(n, graph) for n in chosen):
        raise UserError(f"entry points {list(chosen)} compute nothing; add one of {', '.join(_CHAINS)}")
    # Verification and checkpoints use the entry points of `OF_STATE`.
    return [n for n in available if n in {*chosen, *OF_STATE}]


def _inference(
    graph: StepGraph, name: str, inputs: dict[str, TensorSpec]
) -> tuple[tuple[TensorSpec, ...], tuple[str, ...], tuple[TensorSpec, ...]]:
    """The signature of an entry point that runs one function in evaluation mode."""
    function = graph.functions.get(name)
    if function is None:
        return (), (), ()
    taken = (inputs[a.name] for a in function.arguments if a.kind == "input")
    own = tuple(replace(s, name=s.name.removeprefix(of_entry(name, ""))) for s in taken)
    sizes = graph.output_sizes.get(name, {})
    outputs = tuple(_sized(_output(graph, name, r.name), sizes) for r in function.results if r.kind == "output")
    return own, (), outputs


def _forward(
    graph: StepGraph, inputs: dict[str, TensorSpec]
) -> tuple[tuple[TensorSpec, ...], tuple[str, ...], tuple[TensorSpec, ...]]:
    function = graph.functions["forward"]
    taken = tuple(inputs[a.name] for a in function.arguments if a.kind == "input")
    outputs = (_output(graph, "forward", r.name) for r in function.results if r.kind == "output")
    return taken, (), (*outputs, _TICKET)


def _late_inputs(graph: StepGraph, inputs: dict[str, TensorSpec]) -> tuple[TensorSpec, ...]:
    """The inputs of a split step's second piece: the ticket, and all inputs that the first piece does not take."""
    early = {a.name for a in graph.functions["forward"].arguments if a.kind == "input"}
    return (_TICKET, *(spec for name, spec in inputs.items() if name not in early))


def _reported(graph: StepGraph, function: str) -> tuple[TensorSpec, ...]:
    """The loss that a function returns, and the values beside it."""
    names = [r.name for r in graph.functions[function].results if r.kind == "output"]
    return tuple(_output(graph, function, name) for name in names)


def _output(graph: StepGraph, function: str, name: str) -> TensorSpec:
    made = graph.functions[function]
    for result, value in zip(made.results, made.results_like(), strict=True):
        if result.kind == "output" and result.name == name:
            return TensorSpec(name, numpy_name(value.dtype), tuple(value.shape))
    raise KeyError(name)


def _with_names(spec: TensorSpec, dims: Mapping[int, str]) -> TensorSpec:
    return replace(spec, shape=tuple(dims.get(d, size) for d, size in enumerate(spec.shape)))


def _sized(spec: TensorSpec, sizes: Mapping[str, tuple[Any, ...]]) -> TensorSpec:
    """An output whose dynamic dimensions are names or expressions of names."""
    shape = sizes.get(spec.name, spec.shape)
    return replace(spec, shape=tuple(s if isinstance(s, int) else _spelled(s) for s in shape))


def _spelled(size: Any) -> int | str:
    return int(size) if size.is_Integer else str(size)


def _stacked(spec: TensorSpec, name: str | None = None) -> TensorSpec:
    return replace(spec, name=name or spec.name, shape=(STEPS_DIM, *spec.shape))


def _spec(name: str, tensor: torch.Tensor, ranges: Sequence[Range]) -> TensorSpec:
    found = next((r for r in ranges if r.input == name), None)
    spec = TensorSpec(name, numpy_name(tensor.dtype), tuple(tensor.shape))
    if found is None:
        return spec
    limits = tuple(map(str, found.limits))
    return replace(spec, minimum=found.minimum, maximum=found.maximum, exempt=found.exempt, limits=limits)

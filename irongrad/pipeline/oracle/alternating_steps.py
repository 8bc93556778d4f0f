"""Several steps over one state, run in turn: each has to see what the others have changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from irongrad.graph.dtypes import to_numpy
from irongrad.graph.eager_control_flow import eager_control_flow
from irongrad.graph.step_graph import StepGraph
from irongrad.pipeline.capture.capture import CapturedStep
from irongrad.pipeline.capture.modes import without_fast_path
from irongrad.pipeline.capture.recurrent_layers import eager_lstm
from irongrad.pipeline.oracle.eager_float64 import eager_float64
from irongrad.pipeline.oracle.eager_inference import Recorder
from irongrad.pipeline.oracle.eager_loss_scale import EagerScaler
from irongrad.pipeline.oracle.eager_run import (
    PLAIN,
    First,
    elements_of,
    half_of_the_threads,
    train,
)
from irongrad.pipeline.oracle.oracle import Spread, Values
from irongrad.pipeline.oracle.rounding_noise import RoundingNoise
from irongrad.pipeline.oracle.substitutes import Substitutes
from irongrad.runtime.golden import Golden, key_of
from irongrad.runtime.manifest import DRAWS, of_entry
from irongrad.step.borrow import borrowed
from irongrad.step.loss_scale import loss_scale_of

# How often each step runs. In the second round, each starts from what all have changed.
ROUNDS = 2


@dataclass(frozen=True)
class Alternation:
    """Steps that run in turn.

    Attributes:
        captured: the captured steps by name.
        graphs: their own step graphs, which have the names of their values.
        names: for each step, the names of its state in the joined one.
    """

    captured: Mapping[str, CapturedStep]
    graphs: Mapping[str, StepGraph]
    names: Mapping[str, Mapping[str, str]]

    @property
    def order(self) -> tuple[str, ...]:
        """The names of the steps in the order in which they run."""
        return tuple(self.captured) * ROUNDS

    def runs(self, check: Callable[[], None] = lambda: None) -> Iterator[Golden]:
        """Run the steps in eager PyTorch; yield the losses, and the state at the end, with the tolerances so far.

        Args:
            check: called before each value is recorded; an exception from it ends the runs.
        """
        exact = Values()
        oracle, dtype = ("float64", torch.float64) if not self._has_scale() else ("float32", None)
        self._run(dtype, None, partial(_recorded, exact.record, check))
        spread = Spread(exact, rounded=oracle != "float64")

        def run(seed: int | None) -> None:
            self._run(None, seed, partial(_recorded, spread.record, check))

        steps = {name: captured.step for name, captured in self.captured.items()}
        inputs = {of_entry(name, n): to_numpy(t) for name, step in steps.items() for n, t in step.inputs.items()}
        elements = sum(map(elements_of, self.graphs.values()))
        for allowed in spread.widened_by(run, elements):
            yield Golden(len(self.order), oracle, inputs, exact.arrays, allowed, order=self.order)

    def _has_scale(self) -> bool:
        """Whether a step has a loss scale: its gradients overflow in the step's own dtypes alone."""
        return any(captured.step.scaler is not None for captured in self.captured.values())

    @half_of_the_threads()
    @eager_control_flow()
    @eager_lstm()
    @without_fast_path()
    def _run(self, dtype: torch.dtype | None, seed: int | None, record: Recorder) -> None:
        noise = RoundingNoise(seed) if seed is not None else nullcontext()
        wide = eager_float64 if dtype is torch.float64 else nullcontext
        with ExitStack() as stack:
            for captured in self.captured.values():
                stack.enter_context(borrowed(captured.step, dtype))
            stack.enter_context(Substitutes())
            counts, calls = dict.fromkeys(self.captured, 0), 0
            steps = {name: captured.step for name, captured in self.captured.items()}
            scalers = {name: EagerScaler(loss_scale_of(s), s.optimizers, None) for name, s in steps.items()}
            state: dict[str, torch.Tensor] = {}
            for position, name in enumerate(self.order):
                step, graph = steps[name], self.graphs[name]
                inputs = {n: t.to(dtype) if dtype and t.is_floating_point() else t for n, t in step.inputs.items()}
                found: dict[str, torch.Tensor] = {}
                first = First(counts[name], calls, scalers[name])
                train(step, graph, [inputs], 1, noise, wide, partial(_keep, found), None, PLAIN, first)
                record(key_of("loss", position), found[key_of("loss", counts[name])])
                counts[name] += 1
                calls += graph.accumulate if graph.trains_at_random else 0
                after = {self.names[name][t.name]: found[key_of("state", counts[name], t.name)] for t in graph.state}
                state |= after
            if DRAWS in state:
                state[DRAWS] = torch.tensor(calls)
            for tensor_name, tensor in state.items():
                record(key_of("state", len(self.order), tensor_name), tensor)


def _keep(found: dict[str, torch.Tensor], key: str, tensor: torch.Tensor) -> None:
    found[key] = tensor.clone()


def _recorded(record: Recorder, check: Callable[[], None], key: str, tensor: torch.Tensor) -> None:
    check()
    record(key, tensor)

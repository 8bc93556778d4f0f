"""Measure functions of tensors on this machine, each compiled separately; `--tune` chooses by the times."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import iree.runtime as ireert
import msgspec
import numpy as np
import torch

from irongrad.cache import Store
from irongrad.cache.machine import host, sources
from irongrad.graph.dtypes import to_numpy
from irongrad.graph.step_graph import Function, StepGraph, Value
from irongrad.operators.legalize.retrace import retrace
from irongrad.passes import parse_passes, run_passes
from irongrad.pipeline.iree.compile import CompiledModule, compile_module
from irongrad.pipeline.lower.importer import import_functions
from irongrad.pipeline.package import target_spec
from irongrad.runtime.errors import UserError
from irongrad.runtime.manifest import EntryPoint
from irongrad.runtime.scratch import scratch_directory
from irongrad.runtime.selection import why_not
from irongrad.runtime.transfer import to_device
from irongrad.targets import Target

TIMING = "timing"

# Each function runs in this many rounds, in turns with the others. The fastest round counts, because other work on the
# machine only makes a round slower.
ROUNDS = 7
_LEAST_SECONDS = 0.01  # of a round; a faster function runs several times per round

# Passes that also run on a step's graph, so a function has the same form as in a step.
_CLEAN_UP = "simplify,cse,layout,cse,dce"
_TIMES = "times.msgpack"


@dataclass(frozen=True)
class Stopwatch:
    """Measures functions on the devices of targets; earlier measurements come from the cache.

    Attributes:
        targets: the targets to compile for.
        store: the cache of times; None for no cache.
        on_start: called before each measurement, with a description of the computation.
    """

    targets: tuple[Target, ...]
    store: Store | None = None
    on_start: Callable[[str], None] = lambda what: None

    def __call__(
        self, what: str, candidates: Mapping[str, Callable[..., torch.Tensor]], operands: Sequence[torch.Tensor]
    ) -> dict[str, float]:
        """Measure functions that compute the same result; their times on several targets are added.

        Args:
            what: a description of the computation.
            candidates: the functions, by name.
            operands: tensors with the shapes and dtypes of the arguments.

        Returns:
            The run time of each candidate in seconds, by name.

        Raises:
            UserError: a target cannot run on this machine.
        """
        seconds = dict.fromkeys(candidates, 0.0)
        self.on_start(what)
        for target in self.targets:
            key = _key(what, tuple(candidates), operands, target)
            times = self._known(key)
            if times is None:
                times = _measured(candidates, operands, target)
                if self.store is not None:
                    self.store.put(TIMING, key, {_TIMES: msgspec.msgpack.encode(times)})
            seconds = {name: seconds[name] + times[name] for name in seconds}
        return seconds

    def _known(self, key: str) -> dict[str, float] | None:
        with scratch_directory() as folder:
            if self.store is not None and self.store.get(TIMING, key, folder):
                with suppress(msgspec.DecodeError):
                    return msgspec.msgpack.decode((folder / _TIMES).read_bytes(), type=dict[str, float])
        return None


def _key(what: str, names: Sequence[str], operands: Sequence[torch.Tensor], target: Target) -> str:
    """The key of a measurement, from everything that the times depend on, including IronGrad's own sources."""
    like = [(tuple(o.shape), str(o.dtype)) for o in operands]
    versions = [version(p) for p in ("torch", "torch-mlir", "iree-base-compiler", "iree-base-runtime")]
    parts = (what, names, like, target, versions, host(), sources())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@dataclass(frozen=True)
class _Module:
    """A program of functions to measure.

    Attributes:
        bytecode: the module as MLIR bytecode.
        entry_points: empty; the functions are called directly.
    """

    bytecode: bytes
    entry_points: tuple[EntryPoint, ...] = ()


@cache
def _why_not(target: Target) -> str:
    """Why `target` cannot run on this machine, found with a module that adds two numbers; empty if it can."""
    with scratch_directory() as folder:
        compiled = _compiled([lambda x: x + x], [torch.empty(1, device="meta")], target, folder)
        return why_not(target_spec(compiled, target.name), folder, target.device)


def _compiled(
    functions: Iterable[Callable[..., torch.Tensor]], operands: Sequence[torch.Tensor], target: Target, scratch: Path
) -> CompiledModule:
    """Compile one module of `functions`, each named by its position."""
    named = {str(i): _function(fn, operands) for i, fn in enumerate(functions)}
    graph = run_passes(StepGraph((), (), {}, {}, functions=named), parse_passes(_CLEAN_UP), [target.backend])
    linalg = import_functions(graph, scratch).modules.linalg
    return compile_module(_Module(linalg), target, scratch)


def _measured(
    candidates: Mapping[str, Callable[..., torch.Tensor]], operands: Sequence[torch.Tensor], target: Target
) -> dict[str, float]:
    if reason := _why_not(target):
        raise UserError(f"--tune measures on this machine, and the target {target.name} cannot run here: {reason}")
    with scratch_directory() as folder:
        compiled = _compiled(candidates.values(), operands, target, folder)
    device = ireert.get_device(target.device)
    instance = ireert.VmInstance()
    module = ireert.VmModule.copy_buffer(instance, compiled.vmfb)
    context_ = ireert.VmContext(instance, modules=[ireert.create_hal_module(instance, device), module])
    values = [to_device(device, to_numpy(_filled(o))) for o in operands]
    calls = {name: _call(context_, module.lookup_function(f"graph.{i}"), values) for i, name in enumerate(candidates)}
    return _fastest(calls)


def _function(fn: Callable[..., torch.Tensor], operands: Sequence[torch.Tensor]) -> Function:
    graph = retrace(lambda *tensors: [fn(*tensors)], operands)
    arguments = tuple(Value("input", f"x{i}") for i in range(len(operands)))
    return Function(graph, arguments, (Value("output", "result"),))


def _filled(operand: torch.Tensor) -> torch.Tensor:
    return torch.randn(operand.shape, dtype=operand.dtype, generator=torch.Generator().manual_seed(0))


def _call(context: Any, function: Any, values: Sequence[Any]) -> Callable[[], None]:
    def run() -> None:
        arguments, results = ireert.VmVariantList(len(values)), ireert.VmVariantList(1)
        for value in values:
            arguments.push_ref(value)
        context.invoke(function, arguments, results)

    return run


def _fastest(calls: Mapping[str, Callable[[], None]]) -> dict[str, float]:
    """The seconds of each function's fastest round, in turns; its first call, which loads code, does not count."""
    repeats: dict[str, int] = {}
    for name, call in calls.items():
        call()
        repeats[name] = max(1, int(_LEAST_SECONDS / max(_seconds(call, 1), 1e-9)))
    rounds = [{name: _seconds(call, repeats[name]) for name, call in calls.items()} for _ in range(ROUNDS)]
    return {name: float(np.min([r[name] for r in rounds])) for name in calls}


def _seconds(call: Callable[[], None], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats

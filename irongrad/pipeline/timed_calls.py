"""Load compiled functions, and time calls of them in turns; what fails to compile or to run is left out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import iree.runtime as ireert
import torch

from irongrad.analysis.machine import threads
from irongrad.graph.dtypes import to_numpy
from irongrad.passes.base import Measured
from irongrad.runtime.calls import invoke
from irongrad.runtime.devices import driver_of
from irongrad.runtime.manifest import EntryPoint
from irongrad.runtime.transfer import to_device
from irongrad.runtime.vm_instance import open_device, vm_instance
from irongrad.targets import Target

# Each function runs in this many rounds, in turns with the others. The fastest round is its time, because other work on
# the machine only makes a round slower. Short rounds fit between the turns of that work.
ROUNDS = 12
_LEAST_SECONDS = 0.004  # of a round; a faster function runs several times per round

# The fastest functions and the default run in this many rounds again, and only these count. The first rounds have
# chosen them, and so favour those that were lucky.
CONFIRMING = 24

_FEWEST = 5  # rounds of functions that take long

# A function is faster than the default if it takes this much less time.
MARGIN = 0.05

# So many standard deviations of the number of rounds above the median are 1 % of all cases.
_SURE = 2.33

# The fewest and the most rounds in which two functions are paired.
_PAIRS = 9, 200

Call = Callable[[], None]
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class Program:
    """A program of functions to measure.

    Attributes:
        bytecode: the module as MLIR bytecode.
        entry_points: empty; the functions are called directly.
    """

    bytecode: bytes
    entry_points: tuple[EntryPoint, ...] = ()


def built(
    build: Callable[[Mapping[K, V]], Mapping[K, Call]], parts: Mapping[K, V]
) -> tuple[dict[K, Call], dict[K, str]]:
    """Compile parts together, or each alone if that fails.

    Args:
        build: compiles some of the parts, and returns a call of each.
        parts: what to compile, by name.

    Returns:
        A call of each part that compiles, and why the others do not.
    """
    try:
        return dict(build(parts)), {}
    except Exception as error:  # whatever a form raises, it is the form that is left out
        if len(parts) == 1:
            return {}, dict.fromkeys(parts, reason(error))
    each = [built(build, {name: part}) for name, part in parts.items()]
    calls = {name: call for one, _ in each for name, call in one.items()}
    return calls, {name: why for _, failed in each for name, why in failed.items()}


def reason(error: Exception) -> str:
    """The first line of an error's message, or its class if there is none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def device_of(target: Target) -> str:
    """The device on which to measure for a target: without threads if the process may use one core alone.

    A thread of a device would share that core with the thread that waits for it.
    """
    return (threads() == 1 and target.serial_device) or target.device


def calls_of(vmfb: bytes, driver: str, functions: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, Call]:
    """Load a module; return a call of each function, whose results are tensors.

    Args:
        vmfb: the compiled module.
        driver: the URI of the IREE device.
        functions: for each function, tensors with the shapes and dtypes of its arguments.
    """
    device, instance = open_device(driver), vm_instance()
    module = ireert.VmModule.copy_buffer(instance, vmfb)
    context = ireert.VmContext(instance, modules=[ireert.create_hal_module(instance, device), module])

    def call_of(name: str, operands: Sequence[torch.Tensor]) -> Call:
        values = [to_device(device, to_numpy(_filled(o))) for o in operands]
        return _call(context, driver_of(driver), module.lookup_function(name), values)

    return {name: call_of(name, operands) for name, operands in functions.items()}


def _filled(operand: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if not operand.dtype.is_floating_point:
        return torch.zeros(operand.shape, dtype=operand.dtype)
    return torch.randn(operand.shape, dtype=operand.dtype, generator=generator)


def _call(context: Any, driver: str, function: Any, values: Sequence[Any]) -> Call:
    def run() -> None:
        arguments, results = ireert.VmVariantList(len(values)), ireert.VmVariantList(1)
        for value in values:
            arguments.push_ref(value)
        invoke(context, driver, function, arguments, results)

    return run


def fastest(default: str, calls: Mapping[str, Call], failed: Mapping[str, str], most: float = 2.0) -> Measured:
    """The seconds of each function's fastest round, in turns; its first call, which loads code, does not count.

    The two fastest and the default are measured again. Which of them are faster than the default is decided by the
    ratios of times in the same round. The fastest rounds alone may be chance: on a busy machine, some functions find a
    quiet moment, and others none.

    Args:
        default: the name of the default.
        calls: the functions, by name.
        failed: why other functions are not among them, by name.
        most: about how long to measure in seconds, if that is time for a few rounds.
    """
    failed = dict(failed)
    repeats: dict[str, int] = {}
    whole = 0.0  # the seconds of a round
    for name, call in calls.items():
        try:
            repeats[name], took = _warmed(call)
            whole += took
        except Exception as error:  # as in `built`
            failed[name] = reason(error)
    if not repeats:
        return Measured({}, failed=failed)
    running = {name: calls[name] for name in repeats}
    share = min(1.0, most / (whole * (ROUNDS + CONFIRMING)))
    seconds = _least(_rounds(running, repeats, max(_FEWEST, int(share * ROUNDS))))
    confirming = {*sorted(seconds, key=seconds.__getitem__)[:2], default}
    again = {name: call for name, call in running.items() if name in confirming}
    rounds = _rounds(again, repeats, max(_FEWEST, int(share * CONFIRMING)))
    seconds |= _least(rounds)
    bounds = {n: bound([r[n] / r[default] for r in rounds]) for n in again if default in again}
    faster = sorted((n for n in bounds if bounds[n] < 1 - MARGIN), key=seconds.__getitem__)
    return Measured(seconds, tuple(faster), failed)


def bound(values: Sequence[float]) -> float:
    """An upper bound of the median of what `values` are samples of, which is right in 99 of 100 cases.

    It is one of the values: how many of them are above the median has a binomial distribution, whatever they are (H. A.
    David and H. N. Nagaraja, "Order Statistics", 2003).
    """
    place = math.ceil(len(values) / 2 + _SURE * math.sqrt(len(values)) / 2)
    return sorted(values)[min(place, len(values)) - 1]


def paired(one: Call, other: Call, most: float) -> list[tuple[float, float]]:
    """The seconds of two functions in rounds in turn; which of them comes first alternates.

    Args:
        one: a function.
        other: another one.
        most: about how long to measure in seconds, if that is time for a few rounds.
    """
    (repeats, took), (others, took_other) = _warmed(one), _warmed(other)
    fewest, rounds = _PAIRS[0], int(most / (took + took_other))
    found = []
    for number in range(min(max(fewest, rounds), _PAIRS[1])):
        if number % 2:
            last = _seconds(other, others)
            found.append((_seconds(one, repeats), last))
        else:
            found.append((_seconds(one, repeats), _seconds(other, others)))
    return found


def _warmed(call: Call) -> tuple[int, float]:
    """Call a function for the first times; return how often it runs in a round, and the seconds of a round."""
    call()
    once = max(_seconds(call, 1), 1e-9)
    repeats = max(1, int(_LEAST_SECONDS / once))
    return repeats, repeats * once


def _rounds(calls: Mapping[str, Call], repeats: Mapping[str, int], count: int) -> list[dict[str, float]]:
    return [{name: _seconds(call, repeats[name]) for name, call in calls.items()} for _ in range(count)]


def _least(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: min(r[name] for r in rounds) for name in rounds[0]}


def _seconds(call: Call, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats

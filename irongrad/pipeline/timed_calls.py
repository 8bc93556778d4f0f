"""Load compiled functions, and time calls of them in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import iree.runtime as ireert
import torch

from irongrad.graph.dtypes import to_numpy
from irongrad.runtime.transfer import to_device

# Each function runs in this many rounds, in turns with the others. The fastest round counts, because other work on the
# machine only makes a round slower. Short rounds fit between the turns of that work.
ROUNDS = 12
_LEAST_SECONDS = 0.004  # of a round; a faster function runs several times per round

# The fastest functions and the default run in this many rounds again, and only these count. The first rounds have
# chosen them, and so favour those that were lucky.
CONFIRMING = 24

_FEWEST = 3  # rounds of functions that take long

Call = Callable[[], None]


def calls_of(vmfb: bytes, driver: str, functions: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, Call]:
    """Load a module; return a call of each function, whose only result is one tensor.

    Args:
        vmfb: the compiled module.
        driver: the URI of the IREE device.
        functions: for each function, tensors with the shapes and dtypes of its arguments.
    """
    device, instance = ireert.get_device(driver), ireert.VmInstance()
    module = ireert.VmModule.copy_buffer(instance, vmfb)
    context = ireert.VmContext(instance, modules=[ireert.create_hal_module(instance, device), module])
    return {
        name: _call(context, module.lookup_function(name), [to_device(device, to_numpy(_filled(o))) for o in operands])
        for name, operands in functions.items()
    }


def _filled(operand: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if not operand.dtype.is_floating_point:
        return torch.zeros(operand.shape, dtype=operand.dtype)
    return torch.randn(operand.shape, dtype=operand.dtype, generator=generator)


def _call(context: Any, function: Any, values: Sequence[Any]) -> Call:
    def run() -> None:
        arguments, results = ireert.VmVariantList(len(values)), ireert.VmVariantList(1)
        for value in values:
            arguments.push_ref(value)
        context.invoke(function, arguments, results)

    return run


def fastest(calls: Mapping[str, Call], most: float = 2.0) -> dict[str, float]:
    """The seconds of each function's fastest round, in turns; its first call, which loads code, does not count.

    The two fastest and the first of `calls`, the default, are measured again.

    Args:
        calls: the functions, by name.
        most: about how long to measure in seconds, if that is time for a few rounds.
    """
    repeats: dict[str, int] = {}
    whole = 0.0  # the seconds of a round
    for name, call in calls.items():
        call()
        once = max(_seconds(call, 1), 1e-9)
        repeats[name] = max(1, int(_LEAST_SECONDS / once))
        whole += repeats[name] * once
    share = min(1.0, most / (whole * (ROUNDS + CONFIRMING)))
    seconds = _least(calls, repeats, max(_FEWEST, int(share * ROUNDS)))
    again = dict.fromkeys([*sorted(seconds, key=seconds.__getitem__)[:2], *list(calls)[:1]])
    confirming = {name: calls[name] for name in again}
    return seconds | _least(confirming, repeats, max(_FEWEST, int(share * CONFIRMING)))


def _least(calls: Mapping[str, Call], repeats: Mapping[str, int], rounds: int) -> dict[str, float]:
    made = [{name: _seconds(call, repeats[name]) for name, call in calls.items()} for _ in range(rounds)]
    return {name: min(r[name] for r in made) for name in calls}


def _seconds(call: Call, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats

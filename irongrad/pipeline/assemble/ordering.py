"""Order what reads a value after host code that IREE does not see it depend on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def after(passed: Sequence[str], result: str, value: str, kind: str) -> Iterator[str]:
    """Define `result` as `value` behind a barrier, which orders all readers of `result` after the checks in `passed`.

    IREE 3.13.0 orders the operations of a block by their operands alone (ScheduleExecutionPass). So without the
    barrier, a call that changes the state could run before the refusal.
    """
    names = [result, *(f"{result}.{i}" for i in range(len(passed)))]
    kinds = ", ".join([kind, *("i1" for _ in passed)])
    yield f"{', '.join(names)} = util.optimization_barrier {', '.join([value, *passed])} : {kinds}"

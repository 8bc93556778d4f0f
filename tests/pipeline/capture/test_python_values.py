"""A step that counts its calls in a Python value is refused, wherever the value is: it may matter in a later call."""

from __future__ import annotations

import array
import itertools
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.capture.python_values import fingerprint
from irongrad.runtime.errors import CaptureError

# More calls than a compilation makes: two eager runs of the step give the same.
MANY = 1000

LOCAL = threading.local()
LOCAL.calls = 0
CALLS: ContextVar[int] = ContextVar("calls", default=0)


class Slots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


def numbers() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def in_an_array(state: Any) -> int:
    state += 1
    return int(state[0])


def in_a_long_list(state: Any) -> int:
    state[150] += 1
    return int(state[150])


def in_the_middle_of_lists(state: Any) -> int:
    state[0][0][0][0][0][0] += 1
    return int(state[0][0][0][0][0][0])


def in_an_element(state: Any) -> int:
    state[0] += 1
    return int(state[0])


def in_an_attribute(state: Any) -> int:
    state.calls += 1
    return int(state.calls)


def in_an_iterator(state: Any) -> int:
    return int(next(state))


def in_a_partial(state: Any) -> int:
    state.keywords["calls"] += 1
    return int(state.keywords["calls"])


def of_a_thread(state: Any) -> int:
    LOCAL.calls += 1
    return int(LOCAL.calls)


def of_a_context(state: Any) -> int:
    CALLS.set(CALLS.get() + 1)
    return CALLS.get()


def of_a_function(state: Any) -> int:
    of_a_function.calls = getattr(of_a_function, "calls", 0) + 1  # type: ignore[attr-defined]
    return of_a_function.calls  # type: ignore[attr-defined, no-any-return]


def of_a_default(state: Any, calls: list[int] = [0]) -> int:  # noqa: B006
    calls[0] += 1
    return calls[0]


class Counting(nn.Linear):
    """Changes after many calls; `count` counts them."""

    calls = 0

    def __init__(self, count: Callable[[Any], int], state: Any) -> None:
        super().__init__(3, 2)
        self.count, self.state = count, state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if self.count(self.state) > MANY else 1)


def of_the_class(state: Any) -> int:
    Counting.calls += 1
    return Counting.calls


class CountsInOwnClass(Counting):
    def __init__(self) -> None:
        super().__init__(lambda state: 0, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return super().forward(x) * (2 if type(self).calls > MANY else 1)


@pytest.mark.parametrize(
    ("count", "state"),
    [
        (in_an_array, lambda: np.zeros(1)),
        (in_a_long_list, lambda: [0] * 200),
        (in_a_long_list, lambda: deque([0] * 200)),
        (in_a_long_list, lambda: dict.fromkeys(range(200), 0)),
        (in_the_middle_of_lists, lambda: [[[[[[0]]]]]]),
        (in_an_element, lambda: array.array("i", [0])),
        (in_an_element, lambda: bytearray(1)),
        (in_an_attribute, Slots),
        (in_an_attribute, lambda: types.SimpleNamespace(calls=0)),
        (in_an_iterator, itertools.count),
        (in_an_iterator, lambda: itertools.cycle([0] * MANY + [2 * MANY])),
        (in_an_iterator, lambda: iter(range(2 * MANY))),
        (in_an_iterator, numbers),
        (in_a_partial, lambda: partial(dict, calls=0)),
        (of_a_thread, lambda: None),
        (of_a_context, lambda: None),
        (of_a_function, lambda: None),
        (of_a_default, lambda: None),
        (of_the_class, lambda: None),
    ],
)
def test_a_count_of_calls_is_refused(count: Callable[[Any], int], state: Callable[[], Any]) -> None:
    _is_refused(Counting(count, state()))


def test_a_count_of_calls_in_the_models_class_is_refused() -> None:
    _is_refused(CountsInOwnClass())


def _is_refused(model: nn.Module) -> None:
    inputs = {"x": torch.randn(4, 3), "y": torch.randn(4, 2)}
    step = ig.TrainStep(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    with pytest.raises(CaptureError, match="a Python value"):
        capture(step)


def test_values_that_stay_have_one_fingerprint() -> None:
    """Also where a fingerprint copies an iterator to see where it is."""
    pairs = zip("ab", [1, 2], strict=True)
    values = [
        np.arange(3),
        itertools.count(3),
        iter([1, 2]),
        numbers(),
        partial(int, base=2),
        Slots(),
        pairs,
    ]
    before = [fingerprint(v) for v in values]
    assert before == [fingerprint(v) for v in values]
    assert list(pairs) == [("a", 1), ("b", 2)]

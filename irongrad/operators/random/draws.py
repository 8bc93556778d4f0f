"""`Draws`: while it is open, PyTorch's random operators draw from Philox instead of from PyTorch's own generator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from irongrad.operators.random.philox import MASK, Words, high_word, philox
from irongrad.operators.random.samplers import IN_PLACE, SAMPLERS
from irongrad.runtime.errors import UnsupportedOpError

aten = torch.ops.aten

# Random, though PyTorch does not tag them so; and tagged so, though its CPU kernel takes no dropout.
_UNTAGGED = frozenset({aten.binomial.default, aten._sample_dirichlet.default})
_TAGGED_IN_VAIN = frozenset({aten._scaled_dot_product_flash_attention_for_cpu.default})


def draws(operator: object) -> bool:
    """Whether an operator draws random numbers, or is composed of one that does."""
    if not isinstance(operator, torch._ops.OpOverload) or operator in _TAGGED_IN_VAIN:
        return False
    known = operator in SAMPLERS or operator in IN_PLACE or operator in _UNTAGGED
    return known or torch.Tag.nondeterministic_seeded in operator.tags


def is_random(operator: object) -> bool:
    """Whether an operator draws random numbers itself."""
    return draws(operator) and not operator.has_kernel_for_dispatch_key(  # type: ignore[attr-defined]
        torch._C.DispatchKey.CompositeImplicitAutograd
    )


def undrawable(operator: object, generator: object) -> str | None:
    """Why a random operator's call with this `generator` cannot be drawn; None where it can."""
    if generator is not None:
        return (
            "draws from a torch.Generator of its own, whose state a compiled step does not have. Leave generator out; "
            "the step's own seed makes the numbers repeatable"
        )
    if operator not in SAMPLERS and operator not in IN_PLACE:
        return (
            "draws from a distribution that IronGrad cannot sample with a fixed graph. Pass the random tensor as an "
            "input, or make it of torch.rand, randn, bernoulli, multinomial or exponential_"
        )
    return None


_NUMBERS: ContextVar[torch.Tensor | None] = ContextVar("numbers", default=None)


@contextmanager
def numbered(places: torch.Tensor) -> Iterator[None]:
    """While open, the elements that are drawn have these places in their tensor, not those of row-major order.

    A tensor with padding is drawn so that its true elements are those of the tensor without.
    """
    token = _NUMBERS.set(places)
    try:
        yield
    finally:
        _NUMBERS.reset(token)


class Draws(TorchDispatchMode):
    """Random operators under it return words of Philox, a function of seed, draw count, call and place alone.

    It works below autograd, so that a gradient is that of the values drawn, and is the same for eager tensors and for
    tensors that are traced. The key is the seed; the counter is (place in the tensor, number of the call, draw count).

    Calls are numbered in the order in which they are made, and the number is kept as the seed of PyTorch's own default
    generator: `torch.utils.checkpoint` puts that back before it runs a forward again, so that it draws the same.

    One Philox call an element, though it yields four words: on two Zen 3 cores a dropout of a million elements takes
    1.0 to 1.7 ms in IREE 3.13.0 then, as one loop with what comes before and after it. With four elements a call it
    takes 2.4 to 5.8 ms, as the four parts have to be put together in memory first.

    Attributes:
        used: whether a random operator was called.
    """

    supports_higher_order_operators = True

    def __init__(self, seed: torch.Tensor | int, draws: torch.Tensor | int) -> None:
        """Draw under `seed`, for the `draws`-th time; both numbers or int64 tensors of rank 0."""
        super().__init__()
        self._key, self._draws = _halves(seed), _halves(draws)
        self.used = False

    def __enter__(self) -> Draws:
        self._before = torch.get_rng_state()
        torch.default_generator.manual_seed(0)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch.set_rng_state(self._before)

    def words(self, shape: Sequence[int]) -> Words:
        """Four random words for every element of `shape`. A draw of no elements takes no number, as in eager."""
        size = math.prod(shape)
        if not size:
            nothing = torch.full(list(shape), 0)
            return nothing, nothing, nothing, nothing
        given = _NUMBERS.get()
        places = torch.arange(size).reshape(list(shape)) if given is None else given
        number = torch.default_generator.initial_seed()
        torch.default_generator.manual_seed(number + 1)
        return philox((places, torch.full((), number), *self._draws), self._key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if not is_random(func):
            return func(*args, **kwargs)
        if reason := undrawable(func, kwargs.get("generator")):
            raise UnsupportedOpError(f"{func} {reason}")
        self.used = True
        kwargs = {n: v for n, v in kwargs.items() if n != "generator"}
        if func in IN_PLACE:
            return args[0].copy_(IN_PLACE[func](self, *args, **kwargs))
        return SAMPLERS[func](self, *args, **kwargs)


def _halves(value: torch.Tensor | int) -> tuple[torch.Tensor, torch.Tensor]:
    """The lower and the upper word of 64 bits."""
    wide = value if isinstance(value, torch.Tensor) else torch.full((), value)
    return wide & MASK, high_word(wide)

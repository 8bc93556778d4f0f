"""`Draws`: while open, PyTorch's random operators draw from Philox instead of PyTorch's own generator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode

from irongrad.operators.random.philox import MASK, Words, high_word, philox, philox_eagerly
from irongrad.operators.random.samplers import IN_PLACE, SAMPLERS
from irongrad.runtime.errors import UnsupportedOpError

aten = torch.ops.aten

# PyTorch does not tag these random operators as random.
_UNTAGGED = frozenset({aten.binomial.default, aten._sample_dirichlet.default})
# PyTorch tags this operator as random, but its CPU kernel does not support dropout.
_TAGGED_IN_VAIN = frozenset({aten._scaled_dot_product_flash_attention_for_cpu.default})


def draws(operator: object) -> bool:
    """Return whether an operator draws random numbers, itself or through operators that it is composed of."""
    if not isinstance(operator, torch._ops.OpOverload) or operator in _TAGGED_IN_VAIN:
        return False
    known = operator in SAMPLERS or operator in IN_PLACE or operator in _UNTAGGED
    return known or torch.Tag.nondeterministic_seeded in operator.tags


def is_random(operator: object) -> bool:
    """Return whether an operator draws random numbers itself, not through operators that it is composed of."""
    return draws(operator) and not operator.has_kernel_for_dispatch_key(  # type: ignore[attr-defined]
        torch._C.DispatchKey.CompositeImplicitAutograd
    )


def draws_with(operator: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator draws random numbers if it is called with these arguments.

    One that is composed of others draws nothing in evaluation mode, or with a dropout of zero: attention, say.
    """
    if not draws(operator) or is_random(operator):
        return draws(operator)
    schema = operator._schema.arguments  # type: ignore[attr-defined]
    given = {a.name: a.default_value for a in schema} | dict(zip((a.name for a in schema), args, strict=False))
    given |= kwargs
    chances = [given[name] for name in ("dropout_p", "p", "dropout") if name in given]
    trains = given.get("train", given.get("training", True))
    return bool(trains) and not (chances and chances[0] == 0)


def undrawable(operator: object, generator: object) -> str | None:
    """Return why a random operator cannot be drawn with this `generator`; None if it can be."""
    if generator is not None:
        return (
            "draws from a torch.Generator of its own, whose state a compiled step does not have. Leave generator out; "
            "the step's own seed makes the numbers repeatable"
        )
    if operator not in SAMPLERS and operator not in IN_PLACE:
        return (
            "draws from a distribution that IronGrad cannot sample with a fixed graph. Pass the random tensor as an "
            "input, or compute it from torch.rand, randn, bernoulli, multinomial or exponential_"
        )
    return None


_NUMBERS: ContextVar[torch.Tensor | None] = ContextVar("numbers", default=None)


@contextmanager
def numbered(places: torch.Tensor) -> Iterator[None]:
    """While open, `Draws` numbers the elements of a drawn tensor by `places` instead of in row-major order.

    The true elements of a padded tensor then get the same values as in the tensor without padding.

    Args:
        places: the number of each element, int64, of the shape that is drawn.
    """
    token = _NUMBERS.set(places)
    try:
        yield
    finally:
        _NUMBERS.reset(token)


class Draws(TorchDispatchMode):
    """While open, random operators draw from Philox words that depend on seed, draw count, call and place alone.

    The mode works below autograd, so gradients are those of the drawn values. It draws the same values for eager and
    for traced tensors. The key is the seed; the counter is (place in the tensor, number of the call, draw count).

    Calls are numbered in call order. The number is kept as the seed of PyTorch's default generator, because
    `torch.utils.checkpoint` restores that generator before it reruns a forward. So the rerun draws the same values.

    Each element takes one Philox call, although a call yields four words. IREE 3.13.0 then fuses a dropout with its
    producers and consumers into one loop: for a million elements it takes 1.0 to 1.7 ms on two Zen 3 cores. With four
    elements per call it takes 2.4 to 5.8 ms, because the four parts are first assembled in memory.

    Attributes:
        used: whether a random operator was called.
    """

    supports_higher_order_operators = True

    def __init__(self, seed: torch.Tensor | int, draws: torch.Tensor | int) -> None:
        """Draw from `seed` with the draw count `draws`; both are numbers or rank-0 int64 tensors."""
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
        """Return four random words for every element of `shape`.

        A draw of no elements does not advance the number of the call; eager does not advance its generator either.
        """
        size = math.prod(shape)
        if not size:
            nothing = torch.full(list(shape), 0)
            return nothing, nothing, nothing, nothing
        override = _NUMBERS.get()
        places = torch.arange(size).reshape(list(shape)) if override is None else override
        number = torch.default_generator.initial_seed()
        torch.default_generator.manual_seed(number + 1)
        if get_proxy_mode() is None and all(type(t) is torch.Tensor for t in (places, *self._draws, *self._key)):
            others, key = (number, *map(int, self._draws)), [*map(int, self._key)]
            return philox_eagerly(places, others, key)
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
    """The lower and the upper word of a 64-bit value."""
    wide = value if isinstance(value, torch.Tensor) else torch.full((), value)
    return wide & MASK, high_word(wide)

"""Recurrent layers: one operator for all time steps of a layer, and one for its backward.

A long sequence becomes a scan, so the compiled layer is as large for a thousand steps as for twenty. A short sequence
is unrolled, unless all targets have kernels of ours for loops. Work that does not depend on the state stays outside the
steps. The caller projects the inputs of all steps in one product. The backward stacks the gradients of the gates and
computes the gradients of the weights in one product. That is faster than a sum of one product per step (J. Appleyard et
al., "Optimizing Performance of Recurrent Neural Networks on GPUs", 2016), and rounds less.

The equations are those in the documentation of torch.nn.LSTM, GRU and RNN. The gradients are derived from them by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from irongrad.operators.decompositions.registry import decomposes
from irongrad.operators.decompositions.repetition import Repeated
from irongrad.operators.decompositions.unknown_sizes import is_known
from irongrad.runtime.errors import UnsupportedOpError

Tensors = Sequence[Tensor]

# At 16 steps both forms take equally long to compile. A training step of an LSTM of 64 units then takes 0.8 ms unrolled
# and 1.9 ms as loops (llvm-cpu, two Zen 3 cores). Unrolled code grows with every further step.
LONGEST_UNROLLED = 16

# The same where the targets have kernels for loops. On a Xeon with AVX-512, loops of 3 to 16 steps take 0.7 to 0.95 of
# the time of the unrolled steps (docs/dev/measurements/2026-11-30-xeon.md).
_LONGEST_BESIDE_KERNELS = 2

# What these kernels compute in; states are float32.
_OF_KERNELS = (torch.float32, torch.bfloat16)

_HAS_KERNELS: ContextVar[bool] = ContextVar("has_kernels", default=False)


@contextmanager
def loops_for(*, has_kernels: bool) -> Iterator[None]:
    """While open, steps are unrolled or not as is best for the targets.

    Args:
        has_kernels: whether all targets have kernels of ours for loops.
    """
    token = _HAS_KERNELS.set(has_kernels)
    try:
        yield
    finally:
        _HAS_KERNELS.reset(token)


def is_unrolled(x: Tensor, state: Tensor) -> bool:
    """Whether a layer is unrolled.

    Args:
        x: its projected inputs, (steps, batch, gates).
        state: a tensor of its state.
    """
    steps, batch = x.shape[:2]
    are_of_kernels = x.dtype in _OF_KERNELS and state.dtype == torch.float32
    # There are none for a batch that is known to have one row: IREE removes its dimension.
    to_kernels = _HAS_KERNELS.get() and are_of_kernels and not (is_known(batch) and batch == 1)
    return is_known(steps) and 0 < steps <= (_LONGEST_BESIDE_KERNELS if to_kernels else LONGEST_UNROLLED)


class Cell(NamedTuple):
    """The equations of one kind of recurrent layer.

    Attributes:
        step: (projected input, state, weights) -> (new state, values saved for the backward). The first tensor of the
            state is the output. The saved values begin with the rest of the new state.
        back: (gradient of the new state, old state, new state and saved values, weights) -> (gradient of the projected
            input, gradients of the old state, other gradients from which those of the weights are computed). The first
            and the last ones have the dtype of the weights.
        weights: (old outputs, new states and saved values, gradients of the projected inputs, other gradients), each
            stacked over the steps -> gradients of the weights.
    """

    step: Callable[[Tensor, Tensors, Tensors], tuple[Tensors, Tensors]]
    back: Callable[[Tensors, Tensors, Tensors, Tensors], tuple[Tensor, Tensors, Tensors]]
    weights: Callable[[Tensor, Tensors, Tensor, Tensors], Tensors]


def _lstm(x: Tensor, state: Tensors, weights: Tensors) -> tuple[Tensors, Tensors]:
    h, c = state
    i, f, g, o = (x + _linear(h, weights[0], h.dtype)).chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c = f * c + i * g
    h = o * c.tanh()
    for projection in weights[1:]:
        h = _linear(h, projection, h.dtype)
    return (h, c), (c, i, f, g, o)


def _lstm_back(grads: Tensors, old: Tensors, saved: Tensors, weights: Tensors) -> tuple[Tensor, Tensors, Tensors]:
    """Differentiate h' = o tanh(c'), c' = f c + i g and the gates; a sigmoid's slope is s (1 - s), a tanh's 1 - t^2.

    The gradient of c' is its own gradient plus the one through h'. With a projection, the gradient of h' first goes
    back through the projection.
    """
    (dh, dc), (_, c, i, f, g, o) = grads, saved
    t = c.tanh()
    dm = dh
    for projection in weights[1:]:
        dm = _linear(dh, projection.t(), dh.dtype)
    dc = dc + dm * o * (1 - t * t)
    di, df, dg, do = dc * g, dc * old[1], dc * i, dm * t
    da = _joined([di * i * (1 - i), df * f * (1 - f), dg * (1 - g * g), do * o * (1 - o)], weights[0].dtype)
    return da, (_linear(da, weights[0].t(), dc.dtype), dc * f), [dh.to(da.dtype)] * (len(weights) - 1)


def _lstm_weights(old: Tensor, saved: Tensors, dx: Tensor, others: Tensors) -> Tensors:
    """The gradients of the state's weight and of a projection, whose input was o tanh(c')."""
    _, c, *_, o = saved
    return [_product(dx, old), *(_product(dh, o * c.tanh()) for dh in others)]


def _gru(x: Tensor, state: Tensors, weights: Tensors) -> tuple[Tensors, Tensors]:
    (h,) = state
    hidden = _linear(h, weights[0], h.dtype)
    for bias in weights[1:]:
        hidden = hidden + bias
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), hidden.chunk(3, -1)
    r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
    n = (xn + r * hn).tanh()
    return ((1 - z) * n + z * h,), (r, z, n, hn)


def _gru_back(grads: Tensors, old: Tensors, saved: Tensors, weights: Tensors) -> tuple[Tensor, Tensors, Tensors]:
    """Differentiate h' = (1 - z) n + z h, n = tanh(xn + r hn) and the gates, whose slope is s (1 - s).

    The input's part and the state's part of a gate have the same gradient. The exception is n, where r multiplies the
    state's part.
    """
    (dh,), (h,) = grads, old
    _, r, z, n, hn = saved
    dn = dh * (1 - z) * (1 - n * n)
    dr = dn * hn * r * (1 - r)
    dz = dh * (h - n) * z * (1 - z)
    hidden = _joined([dr, dz, dn * r], weights[0].dtype)
    return _joined([dr, dz, dn], hidden.dtype), (dh * z + _linear(hidden, weights[0].t(), h.dtype),), (hidden,)


def _gru_weights(old: Tensor, saved: Tensors, dx: Tensor, others: Tensors) -> Tensors:
    """The gradients of the state's weight and bias; r multiplies this bias, so it has a gradient of its own."""
    (hidden,) = others
    return [_product(hidden, old), hidden.sum((0, 1), dtype=old.dtype)]


def _rnn_tanh(x: Tensor, state: Tensors, weights: Tensors) -> tuple[Tensors, Tensors]:
    return ((x + _linear(state[0], weights[0], state[0].dtype)).tanh(),), ()


def _rnn_tanh_back(grads: Tensors, old: Tensors, saved: Tensors, weights: Tensors) -> tuple[Tensor, Tensors, Tensors]:
    da = (grads[0] * (1 - saved[0] * saved[0])).to(weights[0].dtype)
    return da, (_linear(da, weights[0].t(), grads[0].dtype),), ()


def _rnn_relu(x: Tensor, state: Tensors, weights: Tensors) -> tuple[Tensors, Tensors]:
    return ((x + _linear(state[0], weights[0], state[0].dtype)).relu(),), ()


def _rnn_relu_back(grads: Tensors, old: Tensors, saved: Tensors, weights: Tensors) -> tuple[Tensor, Tensors, Tensors]:
    da = torch.where(saved[0] > 0, grads[0], 0).to(weights[0].dtype)
    return da, (_linear(da, weights[0].t(), grads[0].dtype),), ()


def _rnn_weights(old: Tensor, saved: Tensors, dx: Tensor, others: Tensors) -> Tensors:
    return [_product(dx, old)]


def _linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The product with a weight, (outputs, inputs), as `dtype`; the weight's own dtype may be narrower."""
    return (x.to(weight.dtype) @ weight.t()).to(dtype)


def _joined(gates: Tensors, dtype: torch.dtype) -> Tensor:
    """Gradients of gates side by side, rounded before: a kernel of a loop joins values that it has computed."""
    return torch.cat([gate.to(dtype) for gate in gates], -1)


def _product(grads: Tensor, values: Tensor) -> Tensor:
    """The sum over steps and batch of the outer products of `grads` and `values`, in the dtype of `grads`."""
    return grads.flatten(0, 1).t() @ values.to(grads.dtype).flatten(0, 1)


CELLS = {
    "lstm": Cell(_lstm, _lstm_back, _lstm_weights),
    "gru": Cell(_gru, _gru_back, _gru_weights),
    "rnn_tanh": Cell(_rnn_tanh, _rnn_tanh_back, _rnn_weights),
    "rnn_relu": Cell(_rnn_relu, _rnn_relu_back, _rnn_weights),
}


def forward(cell: str, x: Tensor, state: Tensors, weights: Tensors, *, unrolled: bool | None = None) -> list[Tensor]:
    """Run all steps of a layer.

    Args:
        cell: a name in `CELLS`.
        x: the projected inputs, (steps, batch, gates).
        state: the initial state; each tensor is (batch, size).
        weights: the weight of the state, and the further weights that `cell` takes.
        unrolled: whether the steps are unrolled; None for what is best.

    Returns:
        The last state. Then, stacked over the steps, the outputs and the values saved for the backward.
    """
    count = len(state)

    def body(*values: Tensor) -> list[Tensor]:
        new, saved = CELLS[cell].step(values[count], values[:count], values[count + 1 :])
        return [*new, new[0], *saved]

    run = _unrolled if (is_unrolled(x, state[0]) if unrolled is None else unrolled) else _scan
    return run(body, list(state), [x], tuple(weights), backwards=False)


def backward(
    cell: str, grads: Tensors, state: Tensors, weights: Tensors, saved: Tensors, last: Tensor | None = None
) -> list[Tensor]:
    """Return the gradients of `x`, of each of `state` and of each of `weights`.

    Args:
        cell: a name in `CELLS`.
        grads: the gradients of the last state, and then that of the stacked outputs.
        state: as `forward` took it.
        weights: as `forward` took them.
        saved: the results of `forward` after the last state.
        last: for padded sequences, the number of the last true step, () int64, whose state is the last one. Gradients
            and saved values of steps behind it are zero. None if all steps are true ones.
    """
    count = len(state)
    old = [torch.cat([first.unsqueeze(0), stack[:-1]]) for first, stack in zip(state, saved, strict=False)]
    begun, entering = [*grads[:count]], [grads[count]]
    if last is not None:
        begun, entering = [torch.zeros_like(g) for g in begun], _entering_at(last, grads)

    def body(*values: Tensor) -> list[Tensor]:
        given = iter(values)
        sizes = count, len(entering), count, len(saved)
        carried, added, before, after = (list(islice(given, size)) for size in sizes)
        carried[: len(added)] = (c + a for c, a in zip(carried, added, strict=False))
        dx, dold, others = CELLS[cell].back(carried, before, after, list(given))
        return [*dold, dx, *others]

    run = _unrolled if is_unrolled(grads[count], state[0]) else _scan
    results = list(run(body, begun, [*entering, *old, *saved], tuple(weights), backwards=True))
    dx, *others = results[count:]
    made = CELLS[cell].weights(old[0], saved, dx, others)
    return [dx, *results[:count], *made[: len(weights)]]  # `Cell.weights` gives gradients of biases in any case


def _entering_at(last: Tensor, grads: Tensors) -> list[Tensor]:
    """The gradients of the last state as stacks, zero except at the step `last`; the first plus that of the outputs."""
    *of_state, of_outputs = grads
    is_last = (torch.arange(of_outputs.shape[0]) == last).reshape(-1, 1, 1)
    first, *others = (torch.where(is_last, grad.unsqueeze(0), 0) for grad in of_state)
    return [of_outputs + first, *others]


def _scan(
    body: Callable[..., Any], carried: list[Tensor], stacks: list[Tensor], outer: tuple[Tensor, ...], *, backwards: bool
) -> list[Tensor]:
    """Scan `body` over the rows of `stacks`, from the last row if `backwards`.

    Returns the final carried values, and then the other results of `body`, stacked.
    """
    count = len(carried)
    given = [stack.flip(0) for stack in stacks] if backwards else stacks
    results = torch.ops.higher_order.scan(body, carried, given, outer)
    return [*results[:count], *(stack.flip(0) if backwards else stack for stack in results[count:])]


def _unrolled(
    body: Callable[..., Any], carried: list[Tensor], stacks: list[Tensor], outer: tuple[Tensor, ...], *, backwards: bool
) -> list[Tensor]:
    """Do the same without a scan."""
    count, rows, steps = len(carried), {}, range(stacks[0].shape[0])
    repeated = Repeated(body)
    for step in steps[::-1] if backwards else steps:
        results = repeated(*carried, *(stack[step] for stack in stacks), *outer)
        carried, rows[step] = results[:count], results[count:]
    return [*carried, *(torch.stack(made) for made in zip(*(rows[step] for step in steps), strict=True))]


@torch.library.custom_op("irongrad::recurrent", mutates_args=())  # type: ignore[untyped-decorator]
def recurrent(cell: str, x: Tensor, state: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """Run `forward` as one operator, so that autograd differentiates a graph by `backward`."""
    return forward(cell, x, state, weights)


@torch.library.custom_op("irongrad::recurrent_backward", mutates_args=())  # type: ignore[untyped-decorator]
def recurrent_backward(
    cell: str, grads: list[Tensor], state: list[Tensor], weights: list[Tensor], saved: list[Tensor]
) -> list[Tensor]:
    """Run `backward` as one operator."""
    return backward(cell, grads, state, weights, saved)


decomposes(torch.ops.irongrad.recurrent.default)(forward)
decomposes(torch.ops.irongrad.recurrent_backward.default)(backward)


@recurrent.register_fake  # type: ignore[untyped-decorator]
def _recurrent_fake(cell: str, x: Tensor, state: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    rows = CELLS[cell].step(x[0], state, weights)
    stacks = [r.new_empty((x.shape[0], *r.shape)) for r in (rows[0][0], *rows[1])]
    return [*(s.new_empty(s.shape) for s in state), *stacks]


@recurrent_backward.register_fake  # type: ignore[untyped-decorator]
def _recurrent_backward_fake(
    cell: str, grads: list[Tensor], state: list[Tensor], weights: list[Tensor], saved: list[Tensor]
) -> list[Tensor]:
    dx = weights[0].new_empty((*grads[-1].shape[:2], weights[0].shape[0]))
    return [dx, *(t.new_empty(t.shape) for t in (*state, *weights))]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    cell, x, state, weights = inputs
    ctx.cell, ctx.sizes = cell, (len(state), len(weights))
    ctx.save_for_backward(x, *state, *weights, *output)


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    """Differentiate by `backward`; if autograd differentiates the result again, through the steps of `forward`."""
    count, weight_count = ctx.sizes
    x, *kept = ctx.saved_tensors
    state, weights, output = kept[:count], kept[count : count + weight_count], kept[count + weight_count :]
    given = [torch.zeros_like(o) if g is None else g for g, o in zip(grads[: count + 1], output, strict=False)]
    if torch.is_grad_enabled():
        if not is_known(x.shape[0]) or x.shape[0] > LONGEST_UNROLLED:
            raise UnsupportedOpError(
                f"a second derivative of a recurrent layer over {x.shape[0]} steps: above {LONGEST_UNROLLED} steps it "
                "is that of a scan, whose second derivatives are wrong in PyTorch 2.13. Pass shorter sequences, or let "
                "the loss contain no gradient that goes through this layer"
            )
        inputs = [t if t.requires_grad else t.detach().requires_grad_() for t in (x, *state, *weights)]
        made = forward(ctx.cell, inputs[0], inputs[1 : count + 1], inputs[count + 1 :], unrolled=True)[: count + 1]
        results = [*torch.autograd.grad(made, inputs, given, create_graph=True, materialize_grads=True)]
    else:
        results = torch.ops.irongrad.recurrent_backward(ctx.cell, given, state, weights, output[count:])
    return None, results[0], results[1 : count + 1], results[count + 1 :]


recurrent.register_autograd(_differentiate, setup_context=_keep)

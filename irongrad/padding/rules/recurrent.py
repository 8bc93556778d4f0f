"""Padding rules of recurrent layers over padded time: the last state is that of the true last step."""

from __future__ import annotations

from typing import Any

import torch

from irongrad.operators.decompositions.recurrent import backward
from irongrad.padding.layout import Layout, dim_of, size_of, solid
from irongrad.padding.padded import Padded
from irongrad.padding.registry import Call, NoRule, rule


def _check(steps: Padded) -> None:
    if steps.padded(2) or len(steps.layout[0]) > 1:
        raise NoRule("over padded gates, or steps with padding between true elements, has no padding rule")


@rule(torch.ops.irongrad.recurrent.default)
def _forward(call: Call) -> list[Padded]:
    """Steps past the true last one do not affect earlier ones; the last states are taken from those of all steps."""
    x, count = call["x"], len(call["state"])
    _check(x)
    steps, batch = solid(x.layout[0]), solid(x.layout[1])
    results = call.run()
    stacks = [Padded(r, (steps, batch, dim_of(r.shape[2]))) for r in results[count:]]
    last: Any = call.padding.sizes.true(size_of(steps) - 1)
    row = torch.as_tensor(last).reshape(1)
    states = [Padded(call.padding.take(s, 0, row).squeeze(0), s.layout[1:]) for s in stacks[:count]]
    return [*states, *stacks]


@rule(torch.ops.irongrad.recurrent_backward.default)
def _backward(call: Call) -> list[Padded]:
    """The gradients of the last states enter at the true last step."""
    steps = call["grads"][-1]
    _check(steps)
    grads, state, saved = ([call.padding.fill(v, 0) for v in call[n]] for n in ("grads", "state", "saved"))
    weights = [w.tensor for w in call["weights"]]
    time, batch = solid(steps.layout[0]), solid(steps.layout[1])
    last: Any = torch.as_tensor(call.padding.sizes.true(size_of(time) - 1)) if steps.padded(0) else None
    results = backward(call["cell"], grads, state, weights, saved, last)
    layouts: list[Layout] = [(time, batch, dim_of(results[0].shape[2]))]
    layouts += [(batch, dim_of(s.shape[1])) for s in state]
    layouts += [w.layout for w in call["weights"]]
    return [Padded(r, layout) for r, layout in zip(results, layouts, strict=True)]

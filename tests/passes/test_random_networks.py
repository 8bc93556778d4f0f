"""Random networks of convolutions: all passes, with any form of any convolution, keep loss, output and gradients."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from irongrad.graph.float64_runs import differences, magnitudes, run_in_float64
from irongrad.passes import passes_at
from irongrad.passes.graph import convolutions
from irongrad.pipeline.bisect.bisect import bisect

CONVOLUTIONS = {
    1: (nn.Conv1d, nn.ConvTranspose1d),
    2: (nn.Conv2d, nn.ConvTranspose2d),
    3: (nn.Conv3d, nn.ConvTranspose3d),
}


def convolution(r: random.Random, x: torch.Tensor) -> nn.Module:
    """A convolution of any kernel, stride, padding, dilation and groups. If it does not fit `x`, its call raises."""
    dims, channels = x.ndim - 2, x.shape[1]
    groups = r.choice([1, 1, channels, *(g for g in range(1, channels + 1) if channels % g == 0)])
    kernel, padding = ([r.randint(low, high) for _ in range(dims)] for low, high in ((1, 4), (0, 3)))
    stride = [r.choice([1, 1, 2, 3, 5]) for _ in range(dims)]
    dilation = [r.choice([1, 1, 2, 3]) for _ in range(dims)]
    plain, transposed = CONVOLUTIONS[dims]
    shared = {"groups": groups, "bias": r.random() < 0.5, "dilation": dilation}
    if r.random() < 0.3:
        more = [r.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True)]
        return transposed(channels, groups * r.randint(1, 3), kernel, stride, padding, more, **shared)
    mode = r.choice(["zeros", "zeros", "zeros", "reflect", "circular", "replicate"])
    return plain(channels, groups * r.randint(1, 3), kernel, stride, padding, padding_mode=mode, **shared)


def between(r: random.Random, x: torch.Tensor) -> object:
    """A function between convolutions: norms, pools, pads, and functions that depend on the order of dimensions."""
    dims = x.ndim - 2
    pads = [r.randint(-1, 2) for _ in range(2 * dims)]
    return r.choice(
        [
            nn.GELU(),
            lambda x: F.batch_norm(x, None, None, training=True),
            nn.GroupNorm(1, x.shape[1]),
            lambda x: F.pad(x, pads, value=1.5),
            lambda x: x.transpose(1, -1).sin().transpose(1, -1),
            lambda x: torch.cat([x, x.cos()], 1),
            lambda x: x * torch.sigmoid(x.mean(list(range(2, x.ndim)), keepdim=True)),
            lambda x: x + x.flip([-1]),
            lambda x: x.softmax(1)[..., ::2],
            lambda x: x.flatten(2).unflatten(2, x.shape[2:]).amax(1, keepdim=True) - x,
        ]
    )


def network(seed: int) -> tuple[list[object], torch.Tensor]:
    """Layers, and an input for them."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    dims = r.choice([1, 2, 2, 3])
    x = torch.randn(r.randint(1, 3), r.choice([1, 2, 3, 4, 6]), *(r.randint(1, 7) for _ in range(dims)))
    layers: list[object] = []
    y = x
    while len(layers) < 4:
        layer = convolution(r, y) if r.random() < 0.6 else between(r, y)
        try:
            z = layer(y)
        except (RuntimeError, ValueError):
            continue
        if 0 < z.numel() <= 5000 and z.isfinite().all():
            layers.append(layer)
            y = z.detach()
    return layers, x


@pytest.mark.parametrize("seed", range(6))
def test_random_networks_keep_their_numbers(seed, step_of, monkeypatch):
    layers, x = network(seed)
    body = nn.ModuleList([layer for layer in layers if isinstance(layer, nn.Module)])
    names = [name for name, _ in body.named_parameters()]

    def outputs(x, *parameters):
        def loss(x, *parameters):
            given = iter(dict(zip(names, parameters, strict=True)).items())
            y = x
            for layer in layers:
                own = len(list(layer.parameters())) if isinstance(layer, nn.Module) else 0
                weights = {name.partition(".")[2]: value for name, value in (next(given) for _ in range(own))}
                y = torch.func.functional_call(layer, weights, (y,)) if isinstance(layer, nn.Module) else layer(y)
            return y.sin().sum(), y

        value, gradients, y = torch.func.vjp(loss, x, *parameters, has_aux=True)
        return [value, y, *gradients(torch.ones_like(value))]

    examples = [x, *(p.detach() for p in body.parameters())]
    step = step_of(torch.func.functionalize(outputs), *examples)
    graph = step.functions["call"].graph
    exact = outputs(*(e.double() for e in examples))
    captured = run_in_float64(graph, examples)
    assert max(differences(exact, captured, magnitudes(graph, examples, captured))) < 1e-6

    r = random.Random(seed)
    monkeypatch.setattr(convolutions, "fastest", lambda costs, problems: {p: r.choice([*costs[p]]) for p in costs})
    found = bisect(step, passes_at(3))
    assert not [f for f in found if f.changes_numbers]

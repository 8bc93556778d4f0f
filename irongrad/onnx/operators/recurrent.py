"""Recurrent layers: PyTorch's own if it has the layer, else an unrolled loop over the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from irongrad.onnx.registry import Call, Value, operator, tensor

# For each gate in PyTorch's order (i f g o, and r z n), its position in ONNX's order (i o f c, and z r h).
_GATES = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
_DEFAULTS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "Relu": torch.relu}

Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@operator("LSTM", "GRU", "RNN")
def recurrent(
    call: Call,
    x: Value,
    w: Value,
    r: Value,
    b: Value | None = None,
    lengths: Value | None = None,
    h: Value | None = None,
    c: Value | None = None,
    p: Value | None = None,
) -> list[Tensor]:
    """Return the outputs of all steps, the last hidden state and, for an LSTM, the last cell state."""
    value, weight = tensor(x), tensor(w)
    if call.get("layout", 0):
        value = value.transpose(0, 1)
    _check(call, lengths, value)
    directions, hidden = weight.shape[0], call.get("hidden_size")
    shape = (directions, value.shape[1], hidden)
    initial = [torch.zeros(shape, dtype=value.dtype) if s is None else _batch_second(call, tensor(s)) for s in (h, c)]
    if _has_torch_layer(call, p):
        outputs = _by_torch(call, value, initial, _flat_weights(call, weight, tensor(r), b))
    else:
        outputs = _by_steps(call, value, initial, _weights(weight, tensor(r), b), tensor(p) if p is not None else None)
    steps, *last = outputs
    steps = steps.reshape(*steps.shape[:2], directions, hidden)
    if call.get("layout", 0):
        return [steps.transpose(0, 1), *(s.transpose(0, 1) for s in last)]
    return [steps.transpose(1, 2), *last]


def _check(call: Call, lengths: Value | None, x: Tensor) -> None:
    if lengths is not None and any(n != x.shape[0] for n in call.ints(lengths, "lengths")):
        raise call.node.unsupported("has sequences of several lengths, which is not supported")
    if call.get("clip") is not None:
        raise call.node.unsupported("clips its gates, which is not supported")
    if call.get("input_forget", 0):
        raise call.node.unsupported("couples its input and forget gates, which is not supported")
    if unknown := [a for a in call.get("activations", []) if a not in _FUNCTIONS]:
        raise call.node.unsupported(f"uses the activation {unknown[0]}, which is not supported")


def _batch_second(call: Call, state: Tensor) -> Tensor:
    return state.transpose(0, 1) if call.get("layout", 0) else state


def _activations(call: Call) -> list[str]:
    directions = 2 if call.get("direction", "forward") == "bidirectional" else 1
    return list(call.get("activations") or _DEFAULTS[call.node.operator] * directions)


def _has_torch_layer(call: Call, peepholes: Value | None) -> bool:
    """Return whether PyTorch has exactly this layer."""
    layer, names = call.node.operator, _activations(call)
    if peepholes is not None:
        return False
    if layer == "GRU" and not call.get("linear_before_reset", 0):
        return False
    usual = _DEFAULTS[layer] * (len(names) // len(_DEFAULTS[layer]))
    return names == usual or (layer == "RNN" and set(names) == {"Relu"})


def _reordered(weight: Tensor, layer: str) -> Tensor:
    """Return a weight with its gates in PyTorch's order."""
    order = _GATES[layer]
    parts = weight.chunk(len(order))
    return torch.cat([parts[i] for i in order]) if len(order) > 1 else weight


def _weights(w: Tensor, r: Tensor, b: Value | None) -> list[Weights]:
    """Return the weights of each direction."""
    biases = tensor(b).chunk(2, 1) if b is not None else None
    return [
        (w[d], r[d], biases[0][d] if biases is not None else None, biases[1][d] if biases is not None else None)
        for d in range(w.shape[0])
    ]


def _flat_weights(call: Call, w: Tensor, r: Tensor, b: Value | None) -> list[Tensor]:
    layer = call.node.operator
    return [_reordered(t, layer) for weights in _weights(w, r, b) for t in weights if t is not None]


def _by_torch(call: Call, x: Tensor, initial: Sequence[Tensor], weights: list[Tensor]) -> Sequence[Tensor]:
    """Call PyTorch's layer as `nn.LSTM` does, so that capture finds it; from the last step to the first if reversed."""
    if call.get("direction", "forward") == "reverse":
        steps, *last = _forwards(call, x.flip(0), initial, weights)
        return [steps.flip(0), *last]
    return _forwards(call, x, initial, weights)


def _forwards(call: Call, x: Tensor, initial: Sequence[Tensor], weights: list[Tensor]) -> Sequence[Tensor]:
    layer, directions = call.node.operator, initial[0].shape[0]
    options = (len(weights) == 4 * directions, 1, 0.0, call.training, directions == 2, False)
    if layer == "LSTM":
        outputs: Sequence[Tensor] = torch._VF.lstm(x, list(initial), weights, *options)
        return outputs
    function: Any = torch._VF.gru
    if layer == "RNN":
        function = torch._VF.rnn_relu if "Relu" in _activations(call) else torch._VF.rnn_tanh
    outputs = function(x, initial[0], weights, *options)
    return outputs


def _by_steps(
    call: Call, x: Tensor, initial: Sequence[Tensor], weights: Sequence[Weights], peepholes: Tensor | None
) -> Sequence[Tensor]:
    layer = call.node.operator
    names = _activations(call)
    count = len(_DEFAULTS[layer])
    rows: list[list[Tensor]] = []
    ends: list[list[Tensor]] = []
    for d, each in enumerate(weights):
        functions = [_FUNCTIONS[n] for n in names[d * count : (d + 1) * count]]
        backwards = call.get("direction", "forward") == "reverse" or d == 1
        state = [s[d] for s in initial[: 2 if layer == "LSTM" else 1]]
        outputs = []
        for step in reversed(range(x.shape[0])) if backwards else range(x.shape[0]):
            state = _CELLS[layer](
                call, x[step], state, each, functions, peepholes[d] if peepholes is not None else None
            )
            outputs.append(state[0])
        rows.append(list(reversed(outputs)) if backwards else outputs)
        ends.append(state)
    steps = torch.stack([torch.cat(parts, -1) for parts in zip(*rows, strict=True)])
    return [steps, *(torch.stack(parts) for parts in zip(*ends, strict=True))]


Cell = Callable[..., list[Tensor]]


def _linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, w, b)


def _rnn_cell(call: Call, x: Tensor, state: Any, weights: Weights, functions: Any, peepholes: Any) -> list[Tensor]:
    w, r, wb, rb = weights
    return [functions[0](_linear(x, w, wb) + _linear(state[0], r, rb))]


def _gru_cell(call: Call, x: Tensor, state: Any, weights: Weights, functions: Any, peepholes: Any) -> list[Tensor]:
    w, r, wb, rb = weights
    gate, act = functions
    (h,) = state
    xz, xr, xh = _linear(x, w, wb).chunk(3, -1)
    rz, rr, rh = r.chunk(3)
    bz, br, bh = rb.chunk(3) if rb is not None else (None, None, None)
    update, reset = gate(xz + _linear(h, rz, bz)), gate(xr + _linear(h, rr, br))
    if call.get("linear_before_reset", 0):
        new = act(xh + reset * _linear(h, rh, bh))
    else:
        new = act(xh + _linear(reset * h, rh, bh))
    return [(1 - update) * new + update * h]


def _lstm_cell(call: Call, x: Tensor, state: Any, weights: Weights, functions: Any, peepholes: Any) -> list[Tensor]:
    w, r, wb, rb = weights
    gate, act, out = functions
    h, c = state
    i, o, f, g = (_linear(x, w, wb) + _linear(h, r, rb)).chunk(4, -1)
    pi, po, pf = peepholes.chunk(3) if peepholes is not None else (None, None, None)
    i, f = (i, f) if pi is None else (i + pi * c, f + pf * c)
    new = gate(f) * c + gate(i) * act(g)
    return [gate(o if po is None else o + po * new) * out(new), new]


_CELLS: dict[str, Cell] = {"RNN": _rnn_cell, "GRU": _gru_cell, "LSTM": _lstm_cell}

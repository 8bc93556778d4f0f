"""Padding rules of softmax: padding along its dimension gets no weight."""

from __future__ import annotations

from irongrad.padding.layout import solid
from irongrad.padding.padded import LOWEST, Padded
from irongrad.padding.registry import Call, aten, rule


@rule(aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default)
def _softmax(call: Call) -> Padded:
    value = call["self"]
    result = call.run(self=call.padding.fill(value, LOWEST, call["dim"]))
    return Padded(result, tuple(map(solid, value.layout)))


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax_backward(call: Call) -> Padded:
    call.like("grad_output", call["output"].layout)
    filled = {n: call.padding.fill(call[n], 0, call["dim"]) for n in ("grad_output", "output")}
    return Padded(call.run(**filled), tuple(map(solid, call.broadcast(call["grad_output"], call["output"]))))

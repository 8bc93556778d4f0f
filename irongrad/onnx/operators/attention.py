"""Attention, and rotary position embedding."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from irongrad.onnx.registry import Call, Value, operator, tensor


@operator("Attention")
def attention(
    call: Call,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None = None,
    past_key: Value | None = None,
    past_value: Value | None = None,
    lengths: Value | None = None,
) -> Any:
    """Compute scaled dot-product attention; several query heads may share a key and a value head."""
    if lengths is not None:
        raise call.node.unsupported("has sequences of several lengths in its cache, which is not supported")
    flat = q.ndim == 3
    query = _heads(tensor(q), call.get("q_num_heads"))
    key, value = (_heads(tensor(t), call.get("kv_num_heads")) for t in (k, v))
    if past_key is not None and past_value is not None:
        key, value = torch.cat([tensor(past_key), key], 2), torch.cat([tensor(past_value), value], 2)
    present = [key, value]
    if (shared := query.shape[1] // key.shape[1]) > 1:
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    root = math.sqrt(call.get("scale") or 1 / math.sqrt(query.shape[-1]))
    scores = (query * root) @ (key * root).transpose(-1, -2)
    cap = call.get("softcap", 0.0)
    capped = cap * torch.tanh(scores / cap) if cap else scores
    added = _bias(call, query, key, mask, past_key.shape[2] if past_key is not None else 0)
    masked = capped if added is None else capped + added
    weights = _weights(masked, added if mask is not None else None)
    output = weights @ value
    output = output.transpose(1, 2).flatten(2) if flat else output
    shown = (scores, capped if cap else masked, masked, weights)
    return [output, *present, shown[call.get("qk_matmul_output_mode", 0)]]


def _weights(masked: Tensor, added: Tensor | None) -> Tensor:
    """Return the softmax; zeros for a query whose keys are all masked."""
    if added is None:
        return torch.softmax(masked, -1)
    blind = (added == float("-inf")).all(-1, keepdim=True)
    return torch.where(blind, 0.0, torch.softmax(torch.where(blind, 0.0, masked), -1))


def _heads(x: Tensor, count: int | None) -> Tensor:
    return x if x.ndim == 4 else x.unflatten(2, (count, -1)).transpose(1, 2)


def _bias(call: Call, query: Tensor, key: Tensor, mask: Value | None, past: int) -> Tensor | None:
    """Return the tensor that is added to the scores: minus infinity for masked keys."""
    added = None
    if mask is not None:
        mask_values = tensor(mask)
        if mask_values.shape[-1] < key.shape[2]:
            rest = key.shape[2] - mask_values.shape[-1]
            fill = False if mask_values.dtype == torch.bool else float("-inf")
            mask_values = torch.nn.functional.pad(mask_values, (0, rest), value=fill)
        added = _minus_infinity(mask_values, query) if mask_values.dtype == torch.bool else mask_values
    # The distance of each key before its query.
    ahead = past + torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])
    seen = [ahead >= 0] if call.get("is_causal", 0) else []
    if (left := call.get("left_window_size", -1)) >= 0:
        seen.append(ahead <= left)
    if (right := call.get("right_window_size", -1)) >= 0:
        seen.append(-ahead <= right)
    for each in seen:
        outside = _minus_infinity(each, query)
        added = outside if added is None else added + outside
    return added


def _minus_infinity(seen: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(seen.shape, dtype=like.dtype).masked_fill(~seen, float("-inf"))


@operator("RotaryEmbedding")
def rotary_embedding(call: Call, x: Value, cos: Value, sin: Value, positions: Value | None = None) -> Tensor:
    """Rotate pairs of elements by the angle of their position."""
    value = tensor(x)
    flat = value.ndim == 3
    heads = value.unflatten(2, (call.get("num_heads"), -1)) if flat else value.transpose(1, 2)
    width = call.get("rotary_embedding_dim", 0) or heads.shape[-1]
    turned, rest = heads[..., :width], heads[..., width:]
    cosines, sines = tensor(cos), tensor(sin)
    if positions is not None:
        place = tensor(positions).long()
        cosines, sines = cosines[place], sines[place]
    cosines, sines = (t[..., : width // 2].unsqueeze(2) for t in (cosines, sines))
    if call.get("interleaved", 0):
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned.chunk(2, -1)
    real, imaginary = cosines * a - sines * b, sines * a + cosines * b
    if call.get("interleaved", 0):
        output = torch.stack([real, imaginary], -1).flatten(-2)
    else:
        output = torch.cat([real, imaginary], -1)
    output = torch.cat([output, rest], -1)
    return output.flatten(2) if flat else output.transpose(1, 2)

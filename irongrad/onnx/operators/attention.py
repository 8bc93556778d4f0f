"""Attention and what goes with it: rotary positions, gated activations."""

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
    """Scaled dot products of heads, of which several queries may share a key and a value."""
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
    made = weights @ value
    made = made.transpose(1, 2).flatten(2) if flat else made
    shown = (scores, capped if cap else masked, masked, weights)
    return [made, *present, shown[call.get("qk_matmul_output_mode", 0)]]


def _weights(masked: Tensor, added: Tensor | None) -> Tensor:
    """Softmax; zeros for a query that a mask lets see no key."""
    if added is None:
        return torch.softmax(masked, -1)
    blind = (added == float("-inf")).all(-1, keepdim=True)
    return torch.where(blind, 0.0, torch.softmax(torch.where(blind, 0.0, masked), -1))


def _heads(x: Tensor, count: int | None) -> Tensor:
    return x if x.ndim == 4 else x.unflatten(2, (count, -1)).transpose(1, 2)


def _bias(call: Call, query: Tensor, key: Tensor, mask: Value | None, past: int) -> Tensor | None:
    """What is added to the scores: minus infinity where a key is not looked at."""
    added = None
    if mask is not None:
        given = tensor(mask)
        if given.shape[-1] < key.shape[2]:
            rest = key.shape[2] - given.shape[-1]
            fill = False if given.dtype == torch.bool else float("-inf")
            given = torch.nn.functional.pad(given, (0, rest), value=fill)
        added = _minus_infinity(given, query) if given.dtype == torch.bool else given
    # How far each key lies before its query.
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
    """Pairs of elements turned by the angle of their position."""
    value = tensor(x)
    flat = value.ndim == 3
    heads = value.unflatten(2, (call.get("num_heads"), -1)) if flat else value.transpose(1, 2)
    width = call.get("rotary_embedding_dim", 0) or heads.shape[-1]
    turned, rest = heads[..., :width], heads[..., width:]
    of_cos, of_sin = tensor(cos), tensor(sin)
    if positions is not None:
        place = tensor(positions).long()
        of_cos, of_sin = of_cos[place], of_sin[place]
    of_cos, of_sin = (t[..., : width // 2].unsqueeze(2) for t in (of_cos, of_sin))
    if call.get("interleaved", 0):
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned.chunk(2, -1)
    real, imaginary = of_cos * a - of_sin * b, of_sin * a + of_cos * b
    if call.get("interleaved", 0):
        made = torch.stack([real, imaginary], -1).flatten(-2)
    else:
        made = torch.cat([real, imaginary], -1)
    made = torch.cat([made, rest], -1)
    return made.flatten(2) if flat else made.transpose(1, 2)

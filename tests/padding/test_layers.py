"""Layers over padded dimensions: products, attention, convolutions, pooling, normalisations, recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

_WEIGHT = torch.linspace(-1, 1, 72, dtype=torch.float64).view(4, 6, 3)


def _heads(h: Tensor) -> Tensor:
    q = h.unflatten(2, (2, 3)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q.flip(-1), q).transpose(1, 2).flatten(2)


def _causal(h: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(h, h, h, is_causal=True)


def _masked(h: Tensor, i: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(h, h, h, attn_mask=(i > 0).unsqueeze(1) | torch.eye(h.shape[1]).bool())


def _conv(stride: int, padding: int, dilation: int):
    return lambda h: F.conv1d(h.mT, _WEIGHT, stride=stride, padding=padding, dilation=dilation)


def _images(h: Tensor) -> Tensor:
    return h.permute(0, 3, 1, 2)


def _pools(h: Tensor) -> list[Tensor]:
    x = _images(h)
    return [
        F.avg_pool2d(x, 3, 1, 1),
        F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        F.avg_pool2d(x, 2, divisor_override=3),
        *F.max_pool2d(x, 2, 1, 1, return_indices=True),
        F.adaptive_avg_pool2d(x, (2, 3)),
        *F.adaptive_max_pool2d(x, (2, 3), return_indices=True),
    ]


def _conv2d(h: Tensor) -> Tensor:
    return F.conv2d(_images(h), _WEIGHT.unsqueeze(2).expand(-1, -1, 3, -1), stride=2, padding=1)


def _framed(h: Tensor) -> list[Tensor]:
    row, image, volume = h.unflatten(1, (2, 3)), h.unflatten(1, (1, 2, 3)), h.unflatten(1, (1, 1, 2, 3))
    padded = [F.pad(x, [1] * 2 * (x.ndim - 2), mode="replicate") for x in (row, image, volume)]
    return [*padded, F.pad(row, (2, 1), mode="reflect"), F.pad(image, (1, 2, 1, 0), mode="reflect")]


def _blocks(h: Tensor) -> list[Tensor]:
    image = h.unflatten(1, (1, 2, 3)).expand(-1, 4, -1, -1)
    large = F.pixel_shuffle(image, 2)
    windows = F.unfold(large, 2, stride=2)
    return [large, F.pixel_unshuffle(large.sin(), 2), F.channel_shuffle(image * h[:, :4, None, None], 2), windows,
            F.fold(windows.sin(), (4, 6), 2, stride=2)]  # fmt: skip


def _resampled(h: Tensor) -> list[Tensor]:
    image = h.unflatten(1, (1, 2, 3))
    modes = ("nearest", "bilinear", "bicubic")
    points = F.affine_grid(h.unflatten(1, (2, 3)), [h.shape[0], 1, 4, 4], align_corners=False)
    row = F.interpolate(image.flatten(2), size=4, mode="linear")
    return [*(F.interpolate(image, size=(3, 5), mode=m) for m in modes), row,
            F.grid_sample(image, points, align_corners=False)]  # fmt: skip


def _matrices(h: Tensor) -> list[Tensor]:
    a = h[:, :4].clone(memory_format=torch.contiguous_format).unflatten(1, (2, 2))
    b = a @ a.mT + torch.eye(2, dtype=h.dtype)
    factors = torch.linalg.qr(a)
    return [torch.linalg.inv(b), torch.linalg.det(a), torch.logdet(b), torch.linalg.cholesky(b), *factors,
            torch.linalg.eigvalsh(b), torch.linalg.solve(b, a), torch.linalg.solve(b, h[:, :2])]  # fmt: skip


class _Recurrent(nn.Module):
    def __init__(self, kind: str, **options: bool | int) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(6, 5, batch_first=True, **options)

    def forward(self, h: Tensor) -> list[Tensor]:
        outputs, last = self.layer(h)
        return [outputs, *(last if isinstance(last, tuple) else (last,))]


class _Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(6, 3), nn.GRUCell(3, 3)

    def forward(self, h: Tensor) -> Tensor:
        out, _ = self.lstm(h[:, 0])
        return self.gru(out)


FUNCTIONS: dict[str, Any] = {
    "products": (lambda h: (h.mT @ h, torch.einsum("btc,btd->cd", h, h), h @ torch.ones(6, 2).double()), "BTC"),
    "merged products": (lambda h: h.flatten(0, 1).t() @ h.flatten(0, 1), "BTC"),
    "vectors": (lambda h: (torch.outer(h[:, 0], h[:, 1]), h.t() @ h[:, 0], h[:, 0] @ h[:, 1]), "BC"),
    "distances": (lambda h: (torch.cdist(h, h + 1), (h.unsqueeze(1) - h.unsqueeze(2)).square().sum(-1)), "BTC"),
    "softmax": (lambda h: (h.softmax(1), h.log_softmax(0), h.softmax(2), F.softmin(h, 1)), "BTC"),
    "attention": (_heads, "BTC"),
    "causal attention": (_causal, "BTC"),
    "masked attention": (_masked, "BTC", ("BT", 3)),
    "convolution": (lambda h: (_conv(1, 0, 1)(h), _conv(2, 1, 1)(h), _conv(1, 2, 2)(h)), "BTC"),
    "convolution of images": (_conv2d, "BTUC"),
    "depthwise": (lambda h: F.conv1d(h.mT, _WEIGHT[:, :1].repeat(3, 1, 1)[:6], padding=1, groups=6), "BTC"),
    "transposed": (lambda h: F.conv_transpose1d(h.mT, _WEIGHT.transpose(0, 1), stride=2, padding=1), "BTC"),
    "pools in time": (lambda h: (F.max_pool1d(h.mT, 2), F.avg_pool1d(h.mT, 3, 1, 1), F.max_pool1d(h.mT, 3, 2)), "BTC"),
    "pools of everything": (lambda h: (F.adaptive_avg_pool1d(h.mT, 1), F.adaptive_max_pool1d(h.mT, 1)), "BTC"),
    "pools of images": (_pools, "BTUC"),
    "batch norm": (lambda h: F.batch_norm(h.mT, None, None, training=True), "BTC"),
    "layer norm": (lambda h: (F.layer_norm(h, h.shape[1:]), F.layer_norm(h, (6,), h[0, 0])), "BTC"),
    "group norm": (lambda h: (F.group_norm(h.mT, 2, torch.ones(6).double()), F.group_norm(h[:, 0], 3)), "BTC"),
    "instance norm": (lambda h: F.instance_norm(h.mT), "BTC"),
    "rms norm": (lambda h: (F.rms_norm(h, (6,)), F.rms_norm(h, h.shape[1:]), F.normalize(h, dim=1)), "BTC"),
    "activations": (lambda h: (F.glu(h), F.gelu(h), F.silu(h), F.softplus(h), F.logsigmoid(h)), "BTC"),
    "more activations": (lambda h: (F.hardswish(h), F.elu(h), F.prelu(h, h[0, 0, :1]), F.leaky_relu(h)), "BTC"),
    "lstm": (_Recurrent("LSTM"), "BTC"),
    "bidirectional lstm": (_Recurrent("LSTM", bidirectional=True), "BTC"),
    "gru": (_Recurrent("GRU"), "BTC"),
    "rnn": (_Recurrent("RNN", bidirectional=True), "BTC"),
    "layers of lstm": (_Recurrent("LSTM", num_layers=2), "BTC"),
    "frames of images": (_framed, "BC"),
    "blocks of images": (_blocks, "BC"),
    "resampled images": (_resampled, "BC"),
    "matrices": (_matrices, "BC"),
    "diagonals": (
        lambda h: (
            (h @ h.mT).diagonal(),
            h.unflatten(1, (2, 3)).diagonal(1, 1, 2),
            (h @ h.mT).diagonal(dim1=1, dim2=0).diag(),
            torch.diag_embed(h.t()),
            torch.diag_embed(h, 1, 0, 2),
        ),
        "BC",
    ),
    "cells": (_Cells(), "BTC"),
    "random draws": (lambda h: (F.dropout(h, 0.5), F.dropout(h.flatten(0, 1), 0.5), F.alpha_dropout(h, 0.3)), "BTC"),
    "random tensors": (lambda h: (h * torch.rand_like(h) + torch.randn(*h.shape[:2], 1), F.dropout1d(h, 0.5)), "BTC"),
    "random slopes": (lambda h: F.rrelu(h, training=True), "BTC"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_true_elements_do_not_depend_on_padding(name: str, holds: Callable[..., None]):
    holds(*FUNCTIONS[name])

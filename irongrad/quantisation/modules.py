"""Layers with quantised weights, in place of `nn.Linear` and `nn.Embedding`."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from irongrad.quantisation.weights import QuantizedWeight, dequantised


class _Quantized(nn.Module):
    """The tensors of a quantised weight, as parameters that are not trained."""

    packed: Tensor
    scale: Tensor | None
    offset: Tensor | None

    def _hold(self, weight: QuantizedWeight) -> None:
        self.form = weight.form
        for name in ("packed", "scale", "offset"):
            tensor = getattr(weight, name)
            self.register_parameter(name, None if tensor is None else _frozen(tensor))

    def dequantised(self) -> Tensor:
        """The weight's values, float32 [rows, columns]."""
        return dequantised(self.packed, self.scale, self.offset)

    @property
    def weight(self) -> Tensor:
        """The packed numbers: PEFT reads their device, and cannot merge an adapter into integers."""
        return self.packed


class QuantizedLinear(_Quantized, nn.Linear):
    """`nn.Linear` with a quantised weight: x [..., columns] -> [..., rows], in the dtype of x.

    The weight's values are computed in float32 and rounded to the dtype of x. It is an `nn.Linear` so that PEFT adapts
    it.
    """

    def __init__(self, weight: QuantizedWeight, bias: nn.Parameter | None = None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = weight.columns, weight.rows
        self._hold(weight)
        self.register_parameter("bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply by the weight's values, and add the bias.

        Raises:
            TypeError: x is not floating-point.
        """
        if not input.is_floating_point():
            raise TypeError(f"a quantised linear layer takes floating-point values, and got {input.dtype}")
        return F.linear(input, self.dequantised().to(input.dtype), self.bias)

    def extra_repr(self) -> str:
        """What `print` shows of the layer."""
        return f"{super().extra_repr()}, form={self.form}"


class QuantizedEmbedding(_Quantized, nn.Embedding):
    """`nn.Embedding` with a quantised table: only the rows that are looked up are dequantised, to float32."""

    def __init__(self, weight: QuantizedWeight, padding_idx: int | None = None) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = weight.rows, weight.columns
        self.padding_idx, self.max_norm, self.norm_type = padding_idx, None, 2.0
        self.scale_grad_by_freq = self.sparse = False
        self._hold(weight)

    def forward(self, input: Tensor) -> Tensor:
        """Look rows up: integers [...] -> float32 [..., columns]."""
        parts = (None if t is None else t[input] for t in (self.packed, self.scale, self.offset))
        return dequantised(*parts)

    def extra_repr(self) -> str:
        """What `print` shows of the layer."""
        return f"{super().extra_repr()}, form={self.form}"


def _frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter that is not trained; the same one for a tensor that is one already, which keeps tied weights tied."""
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)

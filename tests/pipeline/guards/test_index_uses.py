"""Every operator of ATen with an argument that is an index is known to the guards, or needs none."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import irongrad as ig
from irongrad.pipeline.guards.index_uses import _USES
from irongrad.runtime import load
from irongrad.runtime.errors import GuardError

INDEX = re.compile("ind(ex|ices)|sorter|offset|lengths|batch_sizes|pivots|repeats")

# Arguments that are no indices, or that no compiled step can have out of range.
WITHOUT = {
    "results of a search that a gradient hands back": """
        cummaxmin_backward value_selecting_reduction_backward adaptive_max_pool2d_backward adaptive_max_pool3d_backward
        fractional_max_pool2d_backward fractional_max_pool3d_backward max_pool2d_with_indices_backward
        max_pool3d_with_indices_backward""",
    "made of others, which are known": "gather_backward index_select_backward embedding_renorm",
    "clamped by their decomposition": "lu_unpack linalg_lu_solve lu_solve",
    "read as numbers, or refused": "repeat_interleave tensor_split",
    "refused: they have no decomposition": """
        linalg_ldl_solve segment_reduce _segment_reduce_backward _pack_padded_sequence _pack_padded_sequence_backward
        _pad_packed_sequence _pack_sequence gru lstm rnn_tanh rnn_relu _gather_sparse_backward _spdiags
        _unsafe_masked_index _unsafe_masked_index_put_accumulate _ctc_loss_backward""",
}
# Of other devices, sparse or nested tensors, and helpers that write results.
FOREIGN = re.compile("sparse|nested|jagged|cudnn|attention|miopen|quantized|fbgemm|_csr_|_helper$|_use_")


def operators() -> set[str]:
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        arguments = [a for a in schema.arguments if not a.is_out and "Tensor" in str(a.type) and INDEX.search(a.name)]
        if schema.name.startswith("aten::") and arguments and not FOREIGN.search(schema.name):
            found.add(schema.name.removeprefix("aten::").removesuffix("_"))
    return found


def test_every_operator_with_an_index_is_known():
    without = {name for names in WITHOUT.values() for name in names.split()}
    assert operators() - _USES.keys() - without == set()
    assert without & _USES.keys() == set()


class Unpooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return functional.max_unpool2d(x * self.scale, i, 2)


class Searched(Unpooled):
    def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x * self.scale * torch.searchsorted(x[0, 0, 0].detach(), x.detach(), sorter=i[0, 0, 0])


@pytest.mark.parametrize("model", [Unpooled, Searched])
def test_an_index_out_of_range_is_refused(model, tmp_path):
    torch.manual_seed(0)
    inputs = {"x": torch.randn(1, 2, 3, 3).sort().values, "i": torch.tensor([[[0, 1, 2]] * 3] * 2).unsqueeze(0)}
    made = model()
    step = ig.TrainStep(made, lambda y: y.square().sum(), torch.optim.SGD(made.parameters(), lr=0.1), inputs)
    ig.compile(step, tmp_path / "net", entry_points=["train_step"])
    session = load(tmp_path / "net")
    arrays = {name: t.numpy() for name, t in inputs.items()}
    assert session.train_step(**arrays) == pytest.approx(model()(**inputs).square().sum().item(), rel=1e-5)
    for wrong in (36 if model is Unpooled else 3, -1):
        out = inputs["i"].clone()
        out[0, 0, 0, 2] = wrong
        with pytest.raises(RuntimeError):
            model()(inputs["x"], out)
        with pytest.raises(GuardError, match="every value must be in"):
            session.train_step(x=arrays["x"], i=out.numpy())

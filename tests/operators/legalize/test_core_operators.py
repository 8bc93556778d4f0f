"""Every core operator compiles: one smallest call of each, 50 in a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from irongrad.graph.step_graph import Function, StepGraph
from irongrad.mlir.tools import run_tool
from irongrad.operators.legalize.core_operators import CORE
from irongrad.pipeline.iree.compile import COMMON_FLAGS
from irongrad.pipeline.lower.importer import import_functions
from irongrad.targets import parse_target

X, Y = torch.rand(2, 3), torch.rand(2, 3)
BITS, SHIFTS = torch.randint(0, 2, (2, 3)), torch.randint(1, 3, (2, 3))
MASK, ROWS, SCALAR = X > 0.5, torch.tensor([0, 1]), torch.tensor(1.0)
LINE, IMAGE, VOLUME = torch.rand(1, 4, 4), torch.rand(1, 4, 4, 4), torch.rand(1, 4, 4, 4, 4)
KERNEL, WIDE = torch.rand(2, 4, 3, 3), torch.rand(2, 4)
POOLED, PLACES = torch.ops.aten.max_pool2d_with_indices(IMAGE, [2, 2])
CONV = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
SQUARE = torch.rand(3, 3)

# The arguments of the operators that take anything else than one or two float tensors.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "irongrad.over_ranks.default": (torch.rand(5), "moments"),
    "aten.clamp.default": (X, 0.1, 0.5),
    "aten.clamp.Tensor": (X, Y, Y + 1),
    "aten.clamp_max.default": (X, 0.5),
    "aten.clamp_min.default": (X, 0.5),
    "aten.threshold.default": (X, 0.1, 0.2),
    "aten.bitwise_not.default": (BITS,),
    "aten.__rshift__.Scalar": (BITS, 1),
    "aten.glu.default": (WIDE,),
    "aten.pow.Scalar": (2.5, X),
    "aten.ldexp.Tensor": (X, BITS),
    "aten.lerp.Scalar": (X, Y, 0.5),
    "aten.lerp.Tensor": (X, Y, X),
    "aten.addcmul.default": (X, X, Y),
    "aten.addcdiv.default": (X, X, Y),
    "aten.where.self": (MASK, X, Y),
    "aten.masked_fill.Scalar": (X, MASK, 1.0),
    "aten.masked_fill.Tensor": (X, MASK, SCALAR),
    "aten.masked_scatter.default": (X, MASK, Y),
    "aten.elu_backward.default": (X, 1.0, 1.0, 1.0, False, Y),
    "aten.hardtanh_backward.default": (X, Y, -1.0, 1.0),
    "aten.leaky_relu_backward.default": (X, Y, 0.1, False),
    "aten.softplus_backward.default": (X, Y, 1.0, 20.0),
    "aten.threshold_backward.default": (X, Y, 0.1),
    "aten.sum.dim_IntList": (X, [1]),
    "aten.mean.dim": (X, [1]),
    "aten.prod.dim_int": (X, 1),
    "aten.max.dim": (X, 1),
    "aten.min.dim": (X, 1),
    "aten.all.dim": (MASK, 1),
    "aten.any.dim": (MASK, 1),
    "aten.any.dims": (MASK, [0, 1]),
    "aten.count_nonzero.dim_IntList": (X, [1]),
    "aten.norm.Scalar": (X, 2.0),
    "aten.norm.ScalarOpt_dim": (X, 2.0, [1]),
    "aten.linalg_vector_norm.default": (X, 2.0, [1]),
    "aten.trace.default": (SQUARE,),
    "aten.renorm.default": (X, 2.0, 0, 1.0),
    "aten.cumsum.default": (X, 1),
    "aten.cumprod.default": (X, 1),
    "aten.sort.default": (X, 1),
    "aten.topk.default": (X, 2),
    "aten.bucketize.Tensor": (X, torch.tensor([0.1, 0.5])),
    "aten._softmax.default": (X, 1, False),
    "aten._log_softmax.default": (X, 1, False),
    "aten._softmax_backward_data.default": (X, Y, 1, torch.float32),
    "aten._log_softmax_backward_data.default": (X, Y, 1, torch.float32),
    "aten.native_layer_norm.default": (X, [3], None, None, 1e-5),
    "aten.native_group_norm.default": (IMAGE, None, None, 1, 4, 16, 2, 1e-5),
    "aten.view.default": (X, [3, 2]),
    "aten._unsafe_view.default": (X, [3, 2]),
    "aten._reshape_alias.default": (X, [3, 2], [2, 1]),
    "aten.unsqueeze.default": (X, 0),
    "aten.squeeze.dim": (X[:1], 0),
    "aten.transpose.int": (X, 0, 1),
    "aten.permute.default": (X, [1, 0]),
    "aten.expand.default": (X[:1], [4, 3]),
    "aten.repeat.default": (X, [2, 1]),
    "aten.slice.Tensor": (X, 1, 0, 2),
    "aten.select.int": (X, 0, 1),
    "aten.split.Tensor": (X, 1),
    "aten.split_with_sizes.default": (X, [1, 2], 1),
    "aten.cat.default": ([X, Y], 1),
    "aten.stack.default": ([X, Y],),
    "aten.slice_scatter.default": (X, Y[:, :2], 1, 0, 2),
    "aten.select_scatter.default": (X, Y[0], 0, 1),
    "aten.unfold.default": (X, 1, 2, 1),
    "aten.as_strided.default": (X, [2, 2], [1, 1]),
    "aten.flip.default": (X, [0, 1]),
    "aten.roll.default": (X, [1], [0]),
    "aten.constant_pad_nd.default": (X, [1, 1]),
    "aten.reflection_pad1d.default": (LINE, [1, 1]),
    "aten.reflection_pad2d.default": (IMAGE, [1] * 4),
    "aten.replication_pad1d.default": (LINE, [1, 1]),
    "aten.replication_pad2d.default": (IMAGE, [1] * 4),
    "aten.replication_pad3d.default": (VOLUME, [1] * 6),
    "aten.pixel_shuffle.default": (IMAGE, 2),
    "aten.channel_shuffle.default": (IMAGE, 2),
    "aten.upsample_nearest2d.default": (IMAGE, [8, 8]),
    "aten.full.default": ([2, 3], 1.0),
    "aten.full_like.default": (X, 1.0),
    "aten.zeros.default": ([2, 3],),
    "aten.ones.default": ([2, 3],),
    "aten.fill.Scalar": (X, 1.0),
    "aten.fill.Tensor": (X, SCALAR),
    "aten.new_full.default": (X, [2], 1.0),
    "aten.new_zeros.default": (X, [2]),
    "aten.new_ones.default": (X, [2]),
    "aten.new_empty.default": (X, [2]),
    "aten.new_empty_strided.default": (X, [2], [1]),
    "aten.empty.memory_format": ([2, 3],),
    "aten.empty_strided.default": ([2, 3], [3, 1]),
    "aten.scalar_tensor.default": (1.0,),
    "aten.arange.default": (5,),
    "aten.arange.start": (1, 5),
    "aten.arange.start_step": (0, 5, 2),
    "aten.linspace.default": (0, 1, 5),
    "aten.eye.default": (3,),
    "aten.eye.m": (3, 2),
    "aten.tril_indices.default": (3, 3),
    "aten.triu_indices.default": (3, 3),
    "aten.gather.default": (X, 1, BITS),
    "aten.scatter.src": (X, 1, BITS, Y),
    "aten.scatter.value": (X, 1, BITS, 1.0),
    "aten.scatter_add.default": (X, 1, BITS, Y),
    "aten.scatter_reduce.two": (X, 1, BITS, Y, "sum"),
    "aten.index.Tensor": (X, [ROWS]),
    "aten.index_put.default": (X, [ROWS], Y, True),
    "aten._index_put_impl.default": (X, [ROWS], Y),
    "aten._unsafe_index_put.default": (X, [ROWS], Y),
    "aten.index_select.default": (X, 0, ROWS),
    "aten.embedding.default": (X, ROWS),
    "aten._embedding_bag.default": (X, ROWS, torch.tensor([0])),
    "aten.mm.default": (X, SQUARE),
    "aten.bmm.default": (X[None], SQUARE[None]),
    "aten.mv.default": (X, SQUARE[0]),
    "aten.dot.default": (X[0], Y[0]),
    "aten.addmm.default": (Y, X, SQUARE),
    "aten.addbmm.default": (Y, X[None], SQUARE[None]),
    "aten.baddbmm.default": (Y[None], X[None], SQUARE[None]),
    "aten._trilinear.default": (X, X, X, [], [], [], [0]),
    "aten.convolution.default": (IMAGE, KERNEL, None, *CONV),
    "aten._convolution.default": (IMAGE, KERNEL, None, *CONV, False, False, False, False),
    "aten.convolution_backward.default": (torch.rand(1, 2, 4, 4), IMAGE, KERNEL, [0], *CONV, [True] * 3),
    "aten.max_pool2d_with_indices.default": (IMAGE, [2, 2]),
    "aten.max_pool2d_with_indices_backward.default": (POOLED, IMAGE, [2, 2], [2, 2], [0, 0], [1, 1], False, PLACES),
    "aten.max_pool3d_with_indices.default": (VOLUME, [2, 2, 2]),
    "aten.max_unpool2d.default": (POOLED, PLACES, [4, 4]),
    "aten.adaptive_max_pool2d.default": (IMAGE, [2, 2]),
    "aten.adaptive_max_pool3d.default": (VOLUME, [2, 2, 2]),
    "aten.avg_pool2d.default": (IMAGE, [2, 2]),
    "aten.avg_pool3d.default": (VOLUME, [2, 2, 2]),
    "aten._adaptive_avg_pool2d.default": (IMAGE, [2, 2]),
    "aten._adaptive_avg_pool3d.default": (VOLUME, [2, 2, 2]),
    "prims.convert_element_type.default": (X, torch.float64),
    "prims.squeeze.default": (X[:1], [0]),
    "prims.collapse.default": (X, 0, 1),
    "prims.split_dim.default": (X, 1, 3),
    "prims.sum.default": (X, [0]),
    "prims.iota.default": (5,),
}
KEYWORDS: dict[str, dict[str, Any]] = {
    "aten.round.decimals": {"decimals": 2},
    "aten.div.Scalar_mode": {"rounding_mode": "floor"},
    "aten.div.Tensor_mode": {"rounding_mode": "floor"},
    "aten.aminmax.default": {"dim": 1},
    "aten.var.correction": {"dim": [1]},
    "aten.var_mean.correction": {"dim": [1]},
    "aten.std.correction": {"dim": [1]},
    "aten._to_copy.default": {"dtype": torch.float64},
    "prims.iota.default": {
        "start": 0, "step": 1, "dtype": torch.int64, "device": torch.device("cpu"), "requires_grad": False,
    },
}  # fmt: skip


def overload_of(name: str) -> torch._ops.OpOverload:
    namespace, operator, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), operator), overload)


def arguments_of(name: str) -> tuple[Any, ...]:
    if name in ARGUMENTS:
        return ARGUMENTS[name]
    if "bitwise" in name:
        return (BITS, 2) if name.endswith("Scalar") else (BITS, SHIFTS)
    positional = [a for a in overload_of(name)._schema.arguments if not a.kwarg_only and not a.has_default_value()]
    return (X, Y if "Tensor" in str(positional[-1].type) else 2.0)[: len(positional)]


def function_of(name: str) -> Function:
    leaves, structure = tree_flatten((arguments_of(name), KEYWORDS.get(name, {})))

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        given = iter(tensors)
        args, kwargs = tree_unflatten([next(given) if isinstance(v, torch.Tensor) else v for v in leaves], structure)
        return [t for t in tree_leaves(overload_of(name)(*args, **kwargs)) if isinstance(t, torch.Tensor)]

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = [torch.empty(v.shape, dtype=v.dtype) for v in leaves if isinstance(v, torch.Tensor)]
        graph = make_fx(run, tracing_mode="real")(*fakes)
    assert name in {str(n.target) for n in graph.graph.nodes}, name
    return Function(graph, (), ())


def batches() -> Iterator[list[str]]:
    names = sorted(CORE)
    for start in range(0, len(names), 50):
        yield names[start : start + 50]


@pytest.mark.slow
@pytest.mark.parametrize("names", list(batches()), ids=lambda names: names[0])
def test_core_operators_compile(names: list[str], tmp_path: Path) -> None:
    functions = {name.replace(".", "_"): function_of(name) for name in names}
    imported = import_functions(StepGraph((), (), {}, {}, functions=functions), tmp_path)
    source = tmp_path / "operators.mlirbc"
    source.write_bytes(imported.modules.linalg)
    flags = [*COMMON_FLAGS, *parse_target("llvm-cpu").flags]
    result = run_tool("iree-compile", [*flags, str(source), "-o", str(tmp_path / "operators.vmfb")])
    assert result.returncode == 0, result.stderr[:2000]


def test_core_operators_have_no_side_effects() -> None:
    for name in CORE:
        assert not overload_of(name)._schema.is_mutable, name
        assert torch.Tag.nondeterministic_seeded not in overload_of(name).tags, name

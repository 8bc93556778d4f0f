"""The pass gradient-norm: one sum of squares for gradients that lie next to each other in a pack."""

from __future__ import annotations

import pytest
import torch

from irongrad.graph.float64_runs import differences, run_in_float64
from irongrad.passes import run_passes
from irongrad.passes.graph.common_subexpressions import CommonSubexpressions
from irongrad.passes.graph.gradient_norm import GradientNorm
from irongrad.passes.graph.multi_tensor import MultiTensor

aten = torch.ops.aten


def random(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape)


def norm(*tensors: torch.Tensor) -> torch.Tensor:
    """The norm of the norms, as torch.nn.utils.get_total_norm computes it."""
    return norm_of(*((t * t).sum() for t in tensors))


def norm_of(*totals: torch.Tensor) -> torch.Tensor:
    """The norm of tensors whose sums of squares are `totals`."""
    roots = torch.stack(totals).sqrt()
    return (roots * roots).sum().sqrt()


def test_neighbours_are_summed_at_once(apply):
    done = apply(GradientNorm(), lambda t: norm(t[:16], t[16:48].view(4, 8), t[48:]), random(64))
    assert done.stats == {"joined": 3}
    assert done.operators["aten.sum.dim_IntList"] == 2


def test_a_gap_is_never_read(apply):
    done = apply(GradientNorm(), lambda t: norm(t[:16], t[16:30], t[32:64], t[64:]), random(80))
    assert done.stats == {"joined": 4}
    slices = [n.args[2:] for n in done.after.graph.nodes if n.target is aten.slice.Tensor]
    assert sorted(slices) == [(0, 30), (32, 80)]


def test_sums_are_stacked_as_a_backward_computes_gradients_and_packs_last(apply):
    done = apply(GradientNorm(), lambda a, b, t: norm(t[:4], a, t[4:], b), random(3), random(5), random(8))
    (stack,) = [n for n in done.after.graph.nodes if n.target is aten.stack.default]
    assert [total.all_input_nodes[0].meta["val"].numel() for total in stack.args[0]] == [5, 3, 8]
    again = apply(GradientNorm(), lambda a, b: norm(b, a), random(3), random(5))
    assert not again.changed


@pytest.mark.parametrize(
    "fn",
    [
        lambda t: norm(t[:16], t[32:48]),  # with a gap
        lambda t: norm(t[:16] * 2, t[16:32]),  # a part is computed
        lambda t: (lambda a, b: norm_of(a, a, b))((t[:16] * t[:16]).sum(), (t[16:] * t[16:]).sum()),  # one twice
        lambda t: torch.stack([(t[:16] ** 2).sum(), (t[16:] ** 2).sum()]).sqrt().sum(),  # the sum of norms
        lambda t: torch.stack([(t[:16] * t[16:32]).sum(), (t[16:32] * t[:16]).sum()]).sqrt(),  # other products
    ],
)
def test_other_sums_stay(apply, fn):
    assert not apply(GradientNorm(), fn, random(64)).changed


def test_sums_that_are_read_stay(apply):
    def fn(t):
        a, b = (t[:16] * t[:16]).sum(), (t[16:] * t[16:]).sum()
        roots = torch.stack([a, b]).sqrt()
        return (roots * roots).sum(), a, b

    assert not apply(GradientNorm(), fn, random(64)).changed


def clipped(rate, *tensors):
    """SGD with weight decay, with gradients scaled to a norm of one."""
    parameters, gradients = tensors[::2], tensors[1::2]
    scale = 1 / norm(*gradients)
    return [p * 0.9 - g * scale * rate for p, g in zip(parameters, gradients, strict=True)]


def test_clipped_updates_are_packed_and_their_norm_is_read_from_the_pack(step_of):
    """Weight decay does not depend on the norm; the rest of the update does."""
    shapes = [(16,), (10,), (4, 8), (7,), (32,)]
    examples = [torch.tensor(0.1), *(random(*s) + i for s in shapes for i in range(2))]
    step = step_of(clipped, *examples, function="update")
    records = []
    passes = [CommonSubexpressions(), MultiTensor(), GradientNorm()]
    done = run_passes(step, passes, on_pass=lambda number, record, function: records.append(record))
    assert [r.stats for r in records[1:]] == [{"tensors": 5, "updates": 1}, {"joined": 4}]
    before, after = (run_in_float64(s.functions["update"].graph, examples) for s in (step, done))
    difference = max(differences(before, after))
    assert difference < 1e-12
    concatenated = [n for n in done.functions["update"].graph.graph.nodes if n.target is aten.cat.default]
    for node in concatenated:  # a pack can store a concatenation if each part has no other reader
        assert all(len(_source(part).users) == 1 for part in node.args[0])


def _source(part):
    while part.op != "placeholder":
        (part,) = part.all_input_nodes
    return part

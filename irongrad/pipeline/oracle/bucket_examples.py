"""Inputs for every function of a step, made from the example: each is verified before an artifact is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from irongrad.graph.step_graph import StepGraph
from irongrad.pipeline.capture.capture import CapturedStep
from irongrad.runtime.errors import CaptureError
from irongrad.sizes.buckets import Bucket, smallest
from irongrad.sizes.expressions import symbol
from irongrad.sizes.limits import Limits, spelled
from irongrad.step.train_step import TrainStep, sizes_of


def at_other_sizes(captured: CapturedStep, graph: StepGraph) -> list[CapturedStep]:
    """`captured` with inputs for each bucket but the one that the example runs in, and for functions of any size."""
    step = captured.step
    taken = smallest(step.bucket_list, sizes_of(step, step.inputs))
    others = [_sizes(graph, bucket) for bucket in step.bucket_list if bucket != taken]
    if graph.limits is not None:
        others += _of_any_size(sizes_of(step, step.inputs), graph, graph.limits)
    # Steps of these sizes alone: a size of 1 serves as an example there, though not of a size that varies.
    fixed = replace(step, dynamic={}, buckets=(), bucket_fallback="", constraints=())
    return [replace(captured, step=replace(fixed, inputs=_inputs(step, graph, sizes))) for sizes in others]


def _sizes(graph: StepGraph, bucket: Bucket) -> Bucket:
    """Sizes that run in `bucket`: a little less than it has, to have padding, where no smaller bucket takes those.

    Raises:
        CaptureError: none were found that the step takes.
    """
    for less in range(1, max(bucket.values())):
        fewer = {name: max(size - less, graph.bucket_limits.interval(name)[0]) for name, size in bucket.items()}
        alone = [{**bucket, name: fewer[name]} for name in bucket]
        for sizes in [fewer, *alone]:
            if graph.bucket_limits.allow(sizes) and smallest(graph.buckets, sizes) == bucket:
                return sizes
    if graph.bucket_limits.allow(bucket):
        return bucket
    needs = ", ".join(map(spelled, graph.bucket_limits.conditions))
    raise CaptureError(
        f"no sizes were found that run in the bucket {dict(bucket)} and satisfy {needs}. Leave it out: buckets= takes "
        "a list of combinations too"
    )


def _of_any_size(example: Bucket, graph: StepGraph, limits: Limits) -> list[Bucket]:
    """Smaller and larger sizes than the example's; where there are buckets, larger ones than they hold.

    Raises:
        CaptureError: there are no larger ones.
    """
    if not graph.buckets:
        small = next(_allowed([dict.fromkeys(example, s) for s in (2, 3, 4, 8, 16)], limits), example)
        large = next(_allowed(({n: s * f + o for n, s in example.items()} for f in (2, 1) for o in (1, 0)), limits))
        return [sizes for sizes in (small, large) if sizes != example]
    largest = {n: max(b[n] for b in graph.buckets) for n in example}
    sizes: list[Bucket] = [{n: s + extra for n, s in largest.items()} for extra in range(1, 65)]
    sizes += [{**largest, n: s + extra} for n, s in largest.items() for extra in range(1, 65)]
    found = next(_allowed(sizes, limits), None)
    if found is None:
        raise CaptureError(
            "bucket_fallback='dynamic' is for sizes above the largest bucket, and this model or loss takes none: the "
            f"largest are {dict(limits.largest)}. Leave bucket_fallback out"
        )
    return [found]


def _allowed(sizes: Iterable[Bucket], limits: Limits) -> Iterator[Bucket]:
    return (s for s in sizes if limits.allow(s))


def _inputs(step: TrainStep, graph: StepGraph, sizes: Bucket) -> dict[str, torch.Tensor]:
    """The example's first elements, or the example again and again; no index larger than these sizes allow."""
    inputs = {name: _resized(tensor, step.dynamic.get(name, {}), sizes) for name, tensor in step.inputs.items()}
    known = {symbol(name): size for name, size in sizes.items()}
    for name, limits in graph.value_limits.items():
        inputs[name] = inputs[name].clamp(max=min(int(limit.xreplace(known)) for limit in limits))
    return inputs


def _resized(tensor: torch.Tensor, dims: Mapping[int, str], sizes: Bucket) -> torch.Tensor:
    result = tensor
    for d, name in dims.items():
        result = result.index_select(d, torch.arange(sizes[name]) % tensor.shape[d])
    if not result.is_floating_point() or result.numel() <= tensor.numel():
        return result
    # A little smaller, each by another factor: equal elements would tie in maxima, and the sign and range are kept.
    return result * torch.linspace(0.99, 1.0, result.numel(), dtype=result.dtype).reshape(result.shape)

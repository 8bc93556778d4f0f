"""Inputs for every bucket, made from the example, so that each is verified before an artifact is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from irongrad.buckets import Bucket, smallest
from irongrad.pipeline.capture import CapturedStep
from irongrad.pipeline.graphs import StepGraph
from irongrad.step import TrainStep, sizes_of


def in_other_buckets(captured: CapturedStep, graph: StepGraph) -> list[CapturedStep]:
    """`captured` with inputs for each bucket but the one that the example runs in."""
    step = captured.step
    taken = smallest(step.bucket_list, sizes_of(step, step.inputs))
    others = [bucket for bucket in step.bucket_list if bucket != taken]
    return [replace(captured, step=replace(step, inputs=_inputs(step, _sizes(graph, bucket)))) for bucket in others]


def _sizes(graph: StepGraph, bucket: Bucket) -> Bucket:
    """Sizes that run in `bucket`: one less than it has, to have padding, where no smaller bucket takes those."""
    fewer = {name: max(size - 1, graph.smallest[name]) for name, size in bucket.items()}
    return fewer if smallest(graph.buckets, fewer) == bucket else bucket


def _inputs(step: TrainStep, sizes: Bucket) -> dict[str, torch.Tensor]:
    """The example's first elements, or the example again and again."""
    return {name: _resized(tensor, step.dynamic.get(name, {}), sizes) for name, tensor in step.inputs.items()}


def _resized(tensor: torch.Tensor, dims: Mapping[int, str], sizes: Bucket) -> torch.Tensor:
    result = tensor
    for d, name in dims.items():
        result = result.index_select(d, torch.arange(sizes[name]) % tensor.shape[d])
    if not result.is_floating_point() or result.numel() <= tensor.numel():
        return result
    # A little smaller, each by another factor: equal elements would tie in maxima, and the sign and range are kept.
    return result * torch.linspace(0.99, 1.0, result.numel(), dtype=result.dtype).reshape(result.shape)

"""Make inputs for every function of a step from the example: each function is verified before it is packaged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod

import torch

from irongrad.graph.step_graph import Function, StepGraph, base_name, sizes_like
from irongrad.operators.legalize.retrace import interpret
from irongrad.pipeline.capture.capture import CapturedStep
from irongrad.runtime.errors import CaptureError
from irongrad.sizes.buckets import Bucket, open_dimensions, smallest
from irongrad.sizes.expressions import symbol
from irongrad.sizes.limits import Limits, spelled
from irongrad.step.train_step import TrainStep, sizes_of

# The most rows or columns of IREE's tiles on a CPU, and how many times as many elements as those of the large sizes may
# be verified, to have more than one tile.
_TILE, _LONGER = 64, 4


def at_other_sizes(captured: CapturedStep, graph: StepGraph) -> list[CapturedStep]:
    """Return `captured` with inputs for each bucket except the example's own, and for any-size functions."""
    step = captured.step
    example = sizes_of(step, step.inputs)
    taken = smallest(step.bucket_list, example)
    others = [_sizes_in_bucket(graph, bucket, example) for bucket in step.bucket_list if bucket != taken]
    others += [sizes for bucket in step.bucket_list for sizes in _other_open_sizes(graph, bucket, example)]
    if graph.limits is not None:
        others += _sizes_for_any_size(sizes_of(step, step.inputs), graph, graph.limits)
    # These steps have fixed sizes, because a size of 1 is a valid example of a fixed size only.
    fixed = replace(step, dynamic={}, buckets=(), bucket_fallback="", constraints=())
    return [replace(captured, step=fixed.with_examples(_inputs(step, graph, sizes))) for sizes in others]


def _sizes_in_bucket(graph: StepGraph, bucket: Bucket, example: Bucket) -> Bucket:
    """Sizes that run in `bucket`, and are slightly smaller than it if possible, so that there is padding.

    Open dimensions have the example's size.

    Raises:
        CaptureError: no such sizes were found that the step accepts.
    """
    found = _padded_sizes(graph, bucket, {n: example[n] for n in open_dimensions(graph.dynamic, bucket)})
    if found is not None:
        return found
    needs = ", ".join(map(spelled, graph.bucket_limits.conditions))
    raise CaptureError(
        f"no sizes were found that run in the bucket {dict(bucket)} and satisfy {needs}. Leave the bucket out: "
        "buckets= takes a list of combinations too"
    )


def _padded_sizes(graph: StepGraph, bucket: Bucket, open_sizes: Bucket) -> Bucket | None:
    """As `_sizes_in_bucket`, with `open_sizes` for the open dimensions; None if the step accepts no such sizes."""
    for less in range(1, max(bucket.values())):
        fewer = {name: max(size - less, graph.bucket_limits.interval(name)[0]) for name, size in bucket.items()}
        alone = [{**bucket, name: fewer[name]} for name in bucket]
        for sizes in [{**tried, **open_sizes} for tried in (fewer, *alone)]:
            if graph.bucket_limits.allow(sizes) and smallest(graph.buckets, sizes) == bucket:
                return sizes
    whole = {**bucket, **open_sizes}
    return whole if graph.bucket_limits.allow(whole) else None


def _other_open_sizes(graph: StepGraph, bucket: Bucket, example: Bucket) -> Iterator[Bucket]:
    """Sizes that run in `bucket` with the smallest size of each open dimension, and with one larger than the example's.

    Sizes that the step does not accept are left out.
    """
    names = open_dimensions(graph.dynamic, bucket)
    least = {name: graph.bucket_limits.interval(name)[0] for name in names}
    small = ({name: max(least[name], size) for name in names} for size in range(1, 9))
    large = ({name: example[name] * factor + more for name in names} for factor in (2, 1) for more in (1, 0, 2, 3))
    for open_sizes in (small, large) if names else ():
        tried = (_padded_sizes(graph, bucket, s) for s in open_sizes if any(s[n] != example[n] for n in names))
        found = next((sizes for sizes in tried if sizes is not None), None)
        if found is not None:
            yield found


def _sizes_for_any_size(example: Bucket, graph: StepGraph, limits: Limits) -> list[Bucket]:
    """Sizes smaller and larger than the example's; if there are buckets, only sizes larger than the largest bucket.

    Raises:
        CaptureError: the step accepts no sizes larger than the largest bucket.
    """
    if not graph.buckets:
        small = next(_allowed([dict.fromkeys(example, s) for s in (1, 2, 3, 4, 8, 16)], limits), example)
        large = next(_allowed(({n: s * f + o for n, s in example.items()} for f in (2, 1) for o in (1, 0)), limits))
        return [*(sizes for sizes in (small, large) if sizes != example), *_sizes_over_tiles(small, large, limits)]
    largest = {n: max(b.get(n, s) for b in graph.buckets) for n, s in example.items()}
    sizes: list[Bucket] = [{n: s + extra for n, s in largest.items()} for extra in range(1, 65)]
    sizes += [{**largest, n: largest[n] + extra} for n in graph.buckets[0] for extra in range(1, 65)]
    found = next(_allowed(sizes, limits), None)
    if found is None:
        raise CaptureError(
            "bucket_fallback='dynamic' is for sizes above the largest bucket, but this model or loss takes none: the "
            f"largest sizes it takes are {dict(limits.largest)}. Leave bucket_fallback out"
        )
    return [found]


def _sizes_over_tiles(small: Bucket, large: Bucket, limits: Limits) -> Iterator[Bucket]:
    """For each dimension without a size over that of IREE's tiles: such a size, with few of the others.

    What IREE divides into tiles can be right for one tile and wrong behind it. Left out are sizes of which a step would
    take far longer than those of `large`.
    """
    for name in small:
        if large[name] <= _TILE:
            tried = ({**small, name: size} for size in range(2 * _TILE + 3, _TILE, -1))
            found = next(_allowed(tried, limits), None)
            if found is not None and prod(found.values()) <= _LONGER * prod(large.values()):
                yield found


def _allowed(sizes: Iterable[Bucket], limits: Limits) -> Iterator[Bucket]:
    return (s for s in sizes if limits.allow(s))


def _inputs(step: TrainStep, graph: StepGraph, sizes: Bucket) -> dict[str, torch.Tensor]:
    """The example, cut or repeated to these sizes; indices are clamped to the range that these sizes allow.

    If an index that is computed from inputs is out of range then, other integers are tried.

    Raises:
        CaptureError: no integers were found for which all computed indices are in range.
    """
    own = _resized_inputs(step, graph, sizes)
    whole = {name for name, tensor in own.items() if not tensor.is_floating_point() and tensor.numel()}
    lowest = {n: torch.full_like(t, int(t.min())) if n in whole else t for n, t in own.items()}
    zeros = {n: torch.zeros_like(t) if n in whole else t for n, t in own.items()}
    found = next((i for i in (own, lowest, zeros) if all_in_range(graph, i, sizes)), None)
    if found is None:
        places = "; ".join(limit.place for limit in graph.computed)
        raise CaptureError(
            f"no inputs of the sizes {dict(sizes)} were found for which every index is in range: {places}. Give an "
            "example whose indices fit into smaller sizes too"
        )
    return found


def all_in_range(graph: StepGraph, inputs: Mapping[str, torch.Tensor], sizes: Bucket) -> bool:
    """Whether all indices that are computed from inputs are in range."""
    bucket = smallest(graph.buckets, sizes)
    ranges = {limit.input: limit for limit in graph.computed}
    known = {symbol(name): size for name, size in sizes.items()}
    for name in {base_name(n) for n in graph.functions if n.startswith("check.")}:
        check = graph.functions[graph.in_bucket(name, bucket)]
        if not ranges.keys() & {r.name for r in check.results}:
            continue
        values = [_argument(graph, check, i, inputs, sizes) for i in range(len(check.arguments))]
        for result, distance in zip(check.results, interpret(check.graph, values), strict=True):
            limit = ranges.get(result.name)
            if limit is None:
                continue
            most = min([limit.maximum, *(int(further.xreplace(known)) for further in limit.limits)])
            if not 0 <= int(distance) <= most - limit.minimum:
                return False
    return True


def _argument(
    graph: StepGraph, check: Function, number: int, inputs: Mapping[str, torch.Tensor], sizes: Bucket
) -> torch.Tensor:
    """An argument of a check; inputs are padded with zeros."""
    argument = check.arguments[number]
    if argument.kind == "state":
        return graph.tensor(argument.name).initial
    if argument.kind == "size":
        return torch.tensor(sizes[argument.name])
    value, like = inputs[argument.name], check.example(number)
    padded = torch.zeros(sizes_like(value, like), dtype=like.dtype)
    padded[tuple(slice(size) for size in value.shape)] = value
    return padded


def _resized_inputs(step: TrainStep, graph: StepGraph, sizes: Bucket) -> dict[str, torch.Tensor]:
    inputs = {name: _resized(tensor, step.dynamic.get(name, {}), sizes) for name, tensor in step.examples.items()}
    known = {symbol(name): size for name, size in sizes.items()}
    for found in graph.ranges:
        if found.limits:
            most = min(int(limit.xreplace(known)) for limit in found.limits)
            inputs[found.input] = inputs[found.input].clamp(max=most)
    return inputs


def _resized(tensor: torch.Tensor, dims: Mapping[int, str], sizes: Bucket) -> torch.Tensor:
    result = tensor
    for d, name in dims.items():
        result = result.index_select(d, torch.arange(sizes[name]) % tensor.shape[d])
    if not result.is_floating_point() or result.numel() <= tensor.numel():
        return result
    # Repeated elements would tie in maxima, so each is scaled by another factor below one. That keeps sign and range.
    return result * torch.linspace(0.99, 1.0, result.numel(), dtype=result.dtype).reshape(result.shape)

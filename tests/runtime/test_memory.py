"""A call finds the memory of the call before."""

from __future__ import annotations

import resource

import torch

import irongrad as ig

PAGE = resource.getpagesize()


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_transient_memory_is_kept_between_calls():
    """128 MiB in between; when this holds without `keep_freed_memory`, that can go."""

    def through_a_large_product(a, b, c):
        return (a @ b) @ c

    shapes = ((8192, 16), (16, 4096), (4096, 16))
    arguments = tuple(torch.ones(shape) for shape in shapes)
    function = ig.compile_function(through_a_large_product, arguments)
    arrays = [a.numpy() for a in arguments]
    for _ in range(3):
        function(*arrays)
    before = page_faults()
    function(*arrays)
    assert (page_faults() - before) * PAGE < 2**24

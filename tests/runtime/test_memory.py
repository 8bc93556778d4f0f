"""A call finds the memory of the call before."""

from __future__ import annotations

import resource
import subprocess
import sys

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


IN_A_THREAD = """
import ctypes, resource
from concurrent.futures import ThreadPoolExecutor
from irongrad.runtime.memory import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.memset.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
keep_freed_memory()

def fill():
    size = 2**26  # more than the arena of a thread holds
    block = libc.malloc(size)
    libc.memset(block, 1, size)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

with ThreadPoolExecutor(1) as pool:
    first, second = pool.submit(fill).result(), pool.submit(fill).result()
print((second - first) * resource.getpagesize())
"""


def test_memory_is_kept_between_calls_in_other_threads_too():
    run = subprocess.run([sys.executable, "-c", IN_A_THREAD], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 2**24

"""A call reuses the memory of the call before it."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.runtime.memory import clear_early, prefer_large_pages

PAGE = resource.getpagesize()
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
LEFT_TO_PROCESSES = LARGE_PAGES.exists() and "[madvise]" in LARGE_PAGES.read_text()


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_transient_memory_is_kept_between_calls():
    """The intermediate value takes 128 MiB. When this passes without `keep_freed_memory`, that can be removed."""

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


ON_LARGE_PAGES = """
import ctypes, sys
from irongrad.runtime.memory import keep_freed_memory, prefer_large_pages

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.memset.restype = ctypes.c_void_p
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
keep_freed_memory()
if sys.argv[1:]:
    prefer_large_pages(2**26)
libc.memset(libc.malloc(2**25), 1, 2**25)
with open("/proc/self/smaps") as file:
    print(sum(int(line.split()[1]) for line in file if line.startswith("AnonHugePages")) * 2**10)
"""


@pytest.mark.skipif(not LEFT_TO_PROCESSES, reason="processes cannot choose large pages here")
def test_malloc_places_memory_on_preferred_large_pages():
    found = [
        int(subprocess.run([sys.executable, "-c", ON_LARGE_PAGES, *preferred], capture_output=True, check=True).stdout)
        for preferred in ([], ["preferred"])
    ]
    assert found[1] - found[0] >= 2**24


def test_preferring_large_pages_for_more_memory_than_exists_does_nothing():
    prefer_large_pages(2**60)


CLEARED = """
import ctypes, resource, sys
from irongrad.runtime.memory import clear_early, keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.memset.restype = ctypes.c_void_p
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
libc.prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: with large pages there would be few faults anyway
keep_freed_memory()
size = 2**27
if sys.argv[1:]:
    clear_early(size)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(2):
    libc.memset(libc.malloc(size // 2), 1, size // 2)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's malloc")
def test_memory_that_is_cleared_early_causes_no_later_page_faults() -> None:
    def faults(*arguments: str) -> int:
        command = [sys.executable, "-c", CLEARED, *arguments]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert faults("early") < 16
    assert faults() * PAGE > 2**26  # a fault for every page


def test_clearing_more_memory_than_exists_does_nothing() -> None:
    clear_early(2**60)


LOADED = """
import sys
import numpy as np
import irongrad.runtime

def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 2**10 for line in file if line.startswith("RssAnon"))

before = resident()
session = irongrad.runtime.load(sys.argv[1], device="local-task")
session.train_step(x=np.zeros((4, 256), np.float32), y=np.zeros(4, np.int64))
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's malloc")
def test_a_step_does_not_touch_the_whole_pool_of_its_device(tmp_path: Path) -> None:
    """IREE's local-task makes a pool of 64 MiB, of which a step touches what its intermediate values take."""
    model = nn.Sequential(nn.Linear(256, 2**14), nn.Linear(2**14, 10))
    inputs = {"x": torch.randn(4, 256), "y": torch.zeros(4, dtype=torch.long)}
    step = ig.TrainStep(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters()), inputs)
    artifact = ig.compile(step, tmp_path / "net", entry_points=["train_step"])
    run = subprocess.run([sys.executable, "-c", LOADED, artifact.directory], capture_output=True, text=True, check=True)
    state = sum(p.numel() * p.element_size() for p in model.parameters())
    imports = 2**25  # Python's modules and their garbage: 21 MB where no bytecode is cached
    assert int(run.stdout) < state + artifact.manifest.targets[0].transients["train_step"] + imports

"""Compile modules, unless the cache has the same module for the same target."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import msgspec

from irongrad.cache.machine import host, sha256, sources
from irongrad.cache.store import Store
from irongrad.pipeline.iree.compile import Check, CompiledModule, compile_module, unchecked
from irongrad.pipeline.iree.phases import ModuleObserver, unobserved
from irongrad.pipeline.iree.portable_module import PortableModule
from irongrad.runtime.errors import IronGradError
from irongrad.targets import Target

MODULE = "module"

_COMPILED = "module.msgpack"


def compile_once(
    store: Store | None,
    module: PortableModule,
    target: Target,
    scratch: Path,
    check: Check = unchecked,
    observer: ModuleObserver = unobserved,
) -> CompiledModule:
    """Compile `module` for `target`, or take the result from the cache; arguments as in `compile_module`."""
    if store is None:
        return compile_module(module, target, scratch, check, observer)
    key = module_key(module.bytecode, target)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        if store.get(MODULE, key, Path(folder)):
            with suppress(msgspec.DecodeError):
                found = msgspec.msgpack.decode((Path(folder) / _COMPILED).read_bytes(), type=CompiledModule)
                check(found.statistics.transients)
                return found
    result = compile_module(module, target, scratch, check, observer)
    store.put(MODULE, key, {_COMPILED: msgspec.msgpack.encode(result)})
    return result


def compile_all(
    store: Store | None,
    module: PortableModule,
    targets: Sequence[Target],
    scratch: Path,
    check: Check = unchecked,
    observer_of: Callable[[str], ModuleObserver] = lambda target: unobserved,
) -> list[CompiledModule]:
    """Compile `module` for several targets, as `compile_each`."""
    return compile_each(store, [(module, target) for target in targets], scratch, check, observer_of)


def compile_each(
    store: Store | None,
    pairs: Sequence[tuple[PortableModule, Target]],
    scratch: Path,
    check: Check = unchecked,
    observer_of: Callable[[str], ModuleObserver] = lambda target: unobserved,
) -> list[CompiledModule]:
    """Compile modules for targets in parallel, each with its own files; return results in order of `pairs`.

    Raises:
        IronGradError: a target failed; the message names the first one in order.
    """

    def compiled(number: int, pair: tuple[PortableModule, Target]) -> CompiledModule:
        module, target = pair
        folder = scratch / f"target{number}"
        folder.mkdir(exist_ok=True)
        try:
            return compile_once(store, module, target, folder, check, observer_of(target.name))
        except IronGradError as error:
            raise type(error)(f"for the target {target.name!r}: {error}") from error

    # Threads suffice, because the work happens in processes of iree-compile.
    with ThreadPoolExecutor(min(len(pairs), os.cpu_count() or 1), "target") as pool:
        return list(pool.map(compiled, range(len(pairs)), pairs))


def module_key(bytecode: bytes, target: Target) -> str:
    """The cache key of a compiled module."""
    return sha256(hashlib.sha256(bytecode).hexdigest(), target, version("iree-base-compiler"), host(), sources())

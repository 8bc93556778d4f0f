"""Write new state into the buffer of the old state.

IREE 3.13.0 allocates a new buffer for each value that a function stores in a global, because the buffer of the old
value may have an alias. The state then takes its size again, or twice that if buffers are kept between calls. An
optimizer's update also writes to cache lines that it has not just read. This pass writes the new value into the buffer
of the old value if that cannot change a result:

* The buffer has no alias: the value that is loaded from the global becomes part of nothing else.
* Every reader of the old value ends before the new value is written, in this call and in earlier calls. The kernel that
  writes the new value may read the old one, if it reads each element only for the same element of its result. A
  function that another one calls may write if the caller has waited for all readers.
* Nothing can fail between the first write and the end of the function, so a refused call leaves the state unchanged.
  A function that calls others must itself see to it that nothing refuses after the first of them has written.

Kernels may then access one buffer under two names. So the pass is for devices whose code reads and writes memory in
program order. On a CPU, IREE 3.13.0 tells LLVM nothing about which buffers are disjoint
(compiler/plugins/target/LLVMCPU/LLVMCPUTarget.cpp).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.memory_model.placement import aligned
from irongrad.mlir.stream import LARGEST_ALLOCATION, RUN, Access, accesses, keeps_places
from irongrad.mlir.walk import LOAD, STORE, around, constant_of, global_of, inside, joined, loaded, name_of, owner_of
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModuleContext, ModulePass

_AWAIT, _CHAIN, _AWAIT_FENCE = "stream.timepoint.await", "stream.timepoint.chain_external", "hal.fence.await"
_CALL = "util.call"
_ALLOCATION, _PART, _PACK = "stream.resource.alloca", "stream.resource.subview", "stream.resource.pack"
_NEW = frozenset({_ALLOCATION, "stream.resource.alloc"})
_CONSTANTS, _PARAMETER = "stream.resource.constants", "#stream.parameter"
_KERNEL = "stream.executable"
_STATE, _TIMEPOINT, _FENCE = "!stream.resource<variable>", "!stream.timepoint", "!hal.fence"

# Prefixes of operations that cannot fail, so they may follow the first write of state.
_SAFE = ("stream.cmd.", "stream.resource.", "stream.timepoint.", "stream.tensor.export", "util.global.", "arith.")
_END = "util.return"

_OFFSET_OF_PART = 2


@dataclass(frozen=True)
class _Memory:
    """The uses of a global that holds a buffer.

    Attributes:
        loads: the operations that load it.
        stores: the operations that store it.
    """

    loads: list[Any] = field(default_factory=list)
    stores: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class _Analyses:
    """Cached analyses of a module, shared by all globals; the module must not change while they are in use.

    Attributes:
        kernels: the executables, by name.
        gathered: `_gathered`, cached.
        nothing_fails_after: `_nothing_fails_after`, cached.
        ends_before: `_ends_before`, cached.
    """

    kernels: Mapping[str, Any]
    gathered: Callable[[Any], set[int]]
    nothing_fails_after: Callable[[Any], bool]
    ends_before: Callable[[Any, Any], bool]


@dataclass(frozen=True)
class StateInPlace(ModulePass):
    """Write new state into the buffer of the old state.

    Before:
        %old = util.global.load @w; %new = stream.resource.alloca; stream.cmd.dispatch @update(%old, %new)
        util.global.store %new, @w
    After:
        %old = util.global.load @w; stream.cmd.dispatch @update(%old, %old)
    """

    name: ClassVar[str] = "state-in-place"

    def applies(self, context: ModuleContext) -> bool:
        """On devices whose code reads and writes memory in program order."""
        return context.target.state_in_place

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        kernels = {name_of(op.operation): op.operation for op in module.body.operations if op.operation.name == _KERNEL}
        ends_before = cache(partial(_ends_before, calls=_calls_of(module)))
        analyses = _Analyses(kernels, cache(_gathered), cache(_nothing_fails_after), ends_before)
        own = [memory for memory in _globals_of(module).values() if _is_unaliased(memory, analyses)]
        replaced = [
            (store, _in_same_function(store, memory.loads), memory) for memory in own for store in memory.stores
        ]
        updates = [
            (store, loads) for store, loads, memory in replaced if _can_overwrite(store, loads, memory, analyses)
        ]
        for store, loads in updates:
            _overwrite(store, *loads)
        return PassResult(bool(updates), {"overwritten": len(updates)})


def _globals_of(module: ir.Module) -> Mapping[str, _Memory]:
    found: dict[str, _Memory] = defaultdict(_Memory)
    for outer in module.body.operations:
        if outer.operation.name in ("util.func", "util.initializer"):
            for operation in inside(outer.operation):
                if operation.name == LOAD and str(operation.results[0].type) == _STATE:
                    found[global_of(operation)].loads.append(operation)
                elif operation.name == STORE and str(operation.operands[0].type) == _STATE:
                    found[global_of(operation)].stores.append(operation)
    return found


def _is_unaliased(memory: _Memory, analyses: _Analyses) -> bool:
    """Whether the buffer of a global has no alias after the function that loads or stores it has ended."""
    loaded = all(_only_computes(load.results[0], memory) for load in memory.loads)
    return loaded and all(_is_own_buffer(store.operands[0], memory, analyses) for store in memory.stores)


def _only_computes(value: Any, memory: _Memory) -> bool:
    """Whether a value is only used by submissions, and by stores in its own global."""
    users = [(use.owner.operation, use.operand_number) for use in value.uses]
    return all(
        user.name == RUN
        or user in memory.stores
        or (user.name == _AWAIT and _only_computes(user.results[place], memory))
        for user, place in users
    )


def _is_own_buffer(value: Any, memory: _Memory, analyses: _Analyses) -> bool:
    """Whether a stored value is a new buffer that is stored nowhere else, or the old value of the same global."""
    owner = owner_of(value)
    if owner in memory.loads:
        return True
    if len([use for use in value.uses if use.owner.operation.name == STORE]) > 1:
        return False
    if owner.name == _AWAIT:
        return _is_own_buffer(owner.operands[list(owner.results).index(value)], memory, analyses)
    if owner.name == _CONSTANTS:
        return list(owner.results).index(value) in analyses.gathered(owner)
    return owner_of(_buffer_of(value)).name in _NEW


def _gathered(constants: Any) -> set[int]:
    """The indices of the values of a `stream.resource.constants` that IREE copies to memory of its own.

    IREE 3.13.0 copies parameters that it packs into one allocation. A parameter that it packs alone may be mapped from
    its file, which cannot be written (compiler/src/iree/compiler/Dialect/Stream/Transforms/PackConstants.cpp).
    """
    packs: list[list[int]] = [[]]
    end = 0
    for index, value in enumerate(ir.ArrayAttr(constants.attributes["values"])):
        if not str(value).startswith(_PARAMETER):
            continue
        if (length := constant_of(constants.operands[index])) is None:
            return set()
        if aligned(end) + length > LARGEST_ALLOCATION:
            packs.append([])
            end = 0
        packs[-1].append(index)
        end = aligned(end) + length
    return {index for pack in packs if len(pack) > 1 for index in pack}


def _buffer_of(value: Any) -> Any:
    """The buffer that `value` is, or is a part of."""
    return value.owner.operands[0] if owner_of(value).name == _PART else value


def _in_same_function(store: Any, operations: list[Any]) -> list[Any]:
    """The operations among `operations` that are in the same function as `store`."""
    function = list(around(store.block))[-2]
    return [operation for operation in operations if function in around(operation.block)]


def _can_overwrite(store: Any, loads: list[Any], memory: _Memory, analyses: _Analyses) -> bool:
    """Whether the value that `store` stores can be written to the buffer that `loads` load."""
    if len(loads) > 1 or len(_in_same_function(store, memory.stores)) > 1:
        return False
    if not all(load.block == store.block and load.is_before_in_block(store) for load in loads):
        return False
    new = store.operands[0]
    if owner_of(_buffer_of(new)).name != _ALLOCATION:
        return False
    olds = [load.results[0] for load in loads]
    if not all(_is_expected_use(use, store) for value in (*olds, new) for use in value.uses):
        return False
    reads = [access for old in olds for access in accesses(old)]
    writes = [access for access in accesses(new) if access.writes]
    if any(access.writes for access in reads):
        return False
    runs = _runs_of(memory)
    return all(_may_follow(write, read, analyses.kernels) for write in writes for read in reads) and all(
        analyses.nothing_fails_after(writing) and all(analyses.ends_before(run, writing) for run in runs)
        for writing in {write.run for write in writes}
    )


def _is_expected_use(use: Any, store: Any) -> bool:
    """Whether a use is `store` itself, a submission in the same block, or an await whose result is unused."""
    user = use.owner.operation
    if user.name == _AWAIT:
        return not list(user.results[use.operand_number].uses)
    return bool(user == store or (user.name == RUN and user.block == store.block))


def _runs_of(memory: _Memory) -> set[Any]:
    """The submissions that read or write the value of a global."""
    values = [load.results[0] for load in memory.loads] + [store.operands[0] for store in memory.stores]
    return {use.owner.operation for value in values for use in value.uses if use.owner.operation.name == RUN}


def _may_follow(write: Access, read: Access, kernels: Mapping[str, Any]) -> bool:
    """Whether `write` may write the new value into the buffer from which `read` reads the old value."""
    if read.is_apart(write):
        return True
    if read.command == write.command:
        return (read.start, read.bytes) == (write.start, write.bytes) and keeps_places(read, write, kernels)
    if read.run == write.run:
        return bool(read.group.is_before_in_block(write.group))
    return bool(read.run.block == write.run.block and read.run.is_before_in_block(write.run))


def _nothing_fails_after(run: Any) -> bool:
    """Whether the function returns without failure once `run` has begun."""
    operations = [op.operation for op in run.block]
    after = operations[operations.index(run) :]
    return all(op.name.startswith(_SAFE) or op.name == _END for op in after) and after[-1].name == _END


def _calls_of(module: ir.Module) -> Mapping[Any, list[tuple[Any, set[str]]]]:
    """By function, the calls in it, each with the names of the functions that run in it."""
    outer = [op.operation for op in module.body.operations if op.operation.name in ("util.func", "util.initializer")]
    calls = {f: [op for op in inside(f) if op.name == _CALL] for f in outer}
    callees = {name_of(f): {_callee(c) for c in calls[f]} for f in outer if f.name == "util.func"}

    def reached(name: str) -> set[str]:
        found, waiting = {name}, [name]
        while waiting:
            new = callees.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return found

    runs = {name: reached(name) for name in callees}
    return {f: [(c, runs.get(_callee(c), set())) for c in calls[f]] for f in outer}


def _callee(call: Any) -> str:
    return str(ir.FlatSymbolRefAttr(call.attributes["callee"]).value)


def _ends_before(run: Any, writing: Any, calls: Mapping[Any, list[tuple[Any, set[str]]]]) -> bool:
    """Whether `run` has always ended when `writing` begins, later in the same call or in a later call.

    Args:
        run: a submission.
        writing: a submission.
        calls: as `_calls_of` returns them.
    """
    reached = list(_reached(run.results[0]))
    in_this_call = run.block == writing.block and run != writing
    if in_this_call and not any(op == writing or _waits_before(op, writing) for op in reached):
        return False
    function, other = (list(around(op.block))[-2] for op in (run, writing))
    within = [call for call, names in calls[function] if function != other and _is_named(other, names)]
    if not all(any(_waits_before_call(op, call) for op in reached) for call in within):
        return False  # `writing` may begin while the function of `run` is not at its end
    if any(_is_wait(op) for op in reached):
        return True
    stored = {global_of(op) for op in reached if op.name == STORE}
    loads = _loads_in(writing.block, stored)
    if any(op == writing or _waits_before(op, writing) for load in loads for op in _reached(load.results[0])):
        return True
    direct = ([call for call, _ in inner if _is_named(other, {_callee(call)})] for inner in calls.values())
    callers = [found for found in direct if found]
    return bool(callers) and all(len(found) == 1 and _waits_for_any(stored, found[0]) for found in callers)


def _is_named(function: Any, names: set[str]) -> bool:
    return function.name == "util.func" and name_of(function) in names


def _loads_in(block: Any, names: set[str]) -> list[Any]:
    return [op.operation for op in block if op.operation.name == LOAD and global_of(op.operation) in names]


def _waits_for_any(timepoints: set[str], call: Any) -> bool:
    """Whether the host waits for one of the globals `timepoints`, or for what follows it, before each run of `call`."""
    loads = _loads_in(call.block, timepoints)
    return any(_waits_before(op, call) for load in loads for op in _reached(load.results[0]))


def _is_wait(operation: Any) -> bool:
    """Whether an operation makes the host wait, for as long as it takes."""
    if operation.name == _AWAIT_FENCE:
        return constant_of(operation.operands[0]) == -1
    return bool(operation.name == _AWAIT)


def _waits_before(operation: Any, writing: Any) -> bool:
    """Whether an operation makes the host wait before `writing` begins."""
    is_before = operation.block == writing.block and operation.is_before_in_block(writing)
    return bool(is_before and _is_wait(operation))


def _waits_before_call(operation: Any, call: Any) -> bool:
    """Whether an operation makes the host wait before `call`, which may be in a branch or a loop."""
    return any(_waits_before(operation, outer) for outer in (call, *list(around(call.block))[:-2]))


def _reached(timepoint: Any) -> Iterator[Any]:
    """The operations that wait for or store a timepoint, directly or through other timepoints and fences."""
    waiting, seen = [timepoint], set()
    while waiting:
        for use in waiting.pop().uses:
            operation = use.owner.operation
            if operation in seen or (
                str(use.owner.operands[use.operand_number].type) == _FENCE and not _is_wait(operation)
            ):
                continue
            seen.add(operation)
            yield operation
            waiting += [result for result in operation.results if str(result.type) == _TIMEPOINT]
            if operation.name == _CHAIN:
                waiting += [fence for fence in operation.operands if str(fence.type) == _FENCE]


def _overwrite(store: Any, load: Any | None = None) -> None:
    """Write the value of `store` into the buffer that `load` loads; without a load, insert one."""
    new = store.operands[0]
    part, allocation = owner_of(new), owner_of(_buffer_of(new))
    if load is None:
        with store.location, ir.InsertionPoint(allocation):
            old = loaded(global_of(store), new.type)
    else:
        old = load.results[0]
        if allocation.is_before_in_block(load):
            load.move_before(allocation)
    store.erase()
    new.replace_all_uses_with(old)
    if part != allocation:
        offset = part.operands[_OFFSET_OF_PART]
        part.erase()
        _drop_slice(offset)
    if not list(allocation.results[0].uses):
        _drop_allocation(allocation)


def _drop_slice(offset: Any) -> None:
    """Remove the value at `offset` from the `stream.resource.pack` that places it."""
    pack = owner_of(offset)
    if pack.name != _PACK or list(offset.uses):
        return
    left = [i for i, result in enumerate(list(pack.results)[1:]) if result != offset]
    moments = list(ir.ArrayAttr(pack.attributes["lifetime_intervals"]))
    attributes = {
        "lifetime_intervals": ir.ArrayAttr.get([m for i in left for m in moments[2 * i : 2 * i + 2]]),
        "operandSegmentSizes": ir.DenseI32ArrayAttr.get([0, len(left)]),
    }
    kept = {n: pack.attributes[n] for n in pack.attributes}
    with pack.location, ir.InsertionPoint(pack):
        smaller = ir.Operation.create(
            _PACK,
            [pack.results[0].type] * (len(left) + 1),
            [pack.operands[i] for i in left],
            kept | attributes,
        )
    for before, after in zip([0, *(i + 1 for i in left)], smaller.results, strict=True):
        pack.results[before].replace_all_uses_with(after)
    pack.erase()


def _drop_allocation(allocation: Any) -> None:
    awaited = [value for value in allocation.operands if str(value.type) == _TIMEPOINT]
    with allocation.location, ir.InsertionPoint(allocation):
        allocation.results[1].replace_all_uses_with(joined(awaited, allocation.results[1].type))
    allocation.erase()


PASS = StateInPlace

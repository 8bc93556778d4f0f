"""Keep large buffers from one call to the next.

IREE 3.13.0's devices keep memory that a call on a CPU frees, but not blocks above 64 MiB (`default_oversized_pool` in
local_task/task_device.c). Each call allocates such a block again. One thread clears it while the others wait: that is a
tenth of the step of a GPT of 7 million parameters. Splitting the buffer does not help: above 64 MiB the pool rarely
reuses freed blocks, so memory grows every step. So this pass allocates larger buffers when the module is loaded:

* Intermediate values: all functions share their buffers, because the functions run one after the other.
* New state: it overwrites the last but one state, which nothing reads any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from iree.compiler import ir

from irongrad.mlir.walk import STORE, constant_of, functions_of, inside, joined, loaded, name_of
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModuleContext, ModulePass
from irongrad.runtime.manifest import OF_STATE

_ALLOCATED, _FREED, _RUN = "stream.resource.alloca", "stream.resource.dealloca", "stream.cmd.execute"
_TRANSIENT, _STATE = "!stream.resource<transient>", "!stream.resource<variable>"


@dataclass(frozen=True)
class _Lifetime:
    """The lifetime of a buffer for a function's intermediate values.

    Attributes:
        allocated: the operation that allocates the buffer.
        freed: the operation that frees it.
    """

    allocated: Any
    freed: Any


@dataclass(frozen=True)
class _State:
    """A buffer for new state.

    Attributes:
        allocated: the operation that allocates the buffer.
        stores: the operations that store it in globals, in program order.
    """

    allocated: Any
    stores: tuple[Any, ...]

    @property
    def globals(self) -> str:
        """The names of the globals that hold the state."""
        return ", ".join(sorted(str(store.attributes["global"]) for store in self.stores))


@dataclass(frozen=True)
class KeepBuffers(ModulePass):
    """Allocate large buffers when a module is loaded, and keep them from call to call.

    Before:
        %memory, %ready = stream.resource.alloca : !stream.resource<transient>{%c100000000} ... stream.resource.dealloca
    After:
        %memory = util.global.load @__kept_0 ...       // allocated by an initializer

    Attributes:
        least: the size in bytes up to which the device itself keeps buffers that a call frees.
    """

    name: ClassVar[str] = "keep-buffers"

    least: int = 1 << 26

    @classmethod
    def of_context(cls, context: ModuleContext) -> Self:
        """The pass with the size limit of the target's device."""
        return cls() if context.target.largest_freed is None else cls(context.target.largest_freed)

    def applies(self, context: ModuleContext) -> bool:
        """On devices that return large buffers to the system after each call."""
        return context.target.largest_freed is not None

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        kept: dict[str, tuple[int, str]] = {}
        states: dict[str, str] = {}
        for function in functions_of(module):
            large = [
                op
                for op in inside(function)
                if op.name == _ALLOCATED and (constant_of(op.operands[0]) or 0) > self.least
            ]
            uses = list(filter(None, map(_lifetime_of, large)))
            found = list(filter(None, map(_state_of, large))) if name_of(function) not in OF_STATE else []
            for index, use in enumerate(uses):
                _grow(kept, f"__kept_{index}", use.allocated)
                _replace_by_kept(use, f"__kept_{index}")
            for state in found:
                name = states.setdefault(state.globals, f"__kept_state_{len(states)}")
                for memory in (name, _other(name)):
                    _grow(kept, memory, state.allocated)
                _alternate(state, name)
        for name, (size, kind) in kept.items():
            _declare(module, name, size, kind)
        return PassResult(bool(kept), {"kept": len(kept)})


def _lifetime_of(allocated: Any) -> _Lifetime | None:
    """The lifetime of an intermediate buffer; None unless only submissions use it, and no function is called within."""
    memory = allocated.results[0]
    users = [use.owner.operation for use in memory.uses]
    freed = [user for user in users if user.name == _FREED and user.block == allocated.block]
    if str(memory.type) != _TRANSIENT or len(freed) != 1 or _calls(allocated, freed[0]):
        return None
    return _Lifetime(allocated, freed[0]) if all(user.name == _RUN for user in users if user not in freed) else None


def _calls(first: Any, last: Any) -> bool:
    """Whether a function is called between two operations of a block."""
    operations = [op.operation for op in first.block]
    between = operations[operations.index(first) : operations.index(last)]
    return any(op.name == "util.call" for outer in between for op in (outer, *inside(outer)))


def _state_of(allocated: Any) -> _State | None:
    """The buffer of new state; None unless its only users are submissions and stores in its block."""
    users = [use.owner.operation for use in allocated.results[0].uses]
    stores = [op.operation for op in allocated.block if op.operation in users and op.operation.name == STORE]
    if str(allocated.results[0].type) != _STATE or not stores:
        return None
    return _State(allocated, tuple(stores)) if all(u.name == _RUN or u in stores for u in users) else None


def _grow(kept: dict[str, tuple[int, str]], name: str, allocated: Any) -> None:
    """Make the kept buffer `name` at least as large as the allocation."""
    size, _ = kept.get(name, (0, ""))
    kept[name] = max(size, constant_of(allocated.operands[0]) or 0), str(allocated.results[0].type)


def _replace_by_kept(use: _Lifetime, name: str) -> None:
    """Use the kept buffer `name` instead of the allocation, once its previous user has finished."""
    allocated, freed = use.allocated, use.freed
    _, ready = allocated.results
    with allocated.location, ir.InsertionPoint(allocated):
        _replace(allocated, loaded(name, allocated.results[0].type), loaded(_ready(name), ready.type))
    *_, done = freed.operands
    with freed.location, ir.InsertionPoint(freed):
        _store(done, _ready(name))
    freed.results[0].replace_all_uses_with(done)
    freed.erase()


def _alternate(state: _State, name: str) -> None:
    """Write new state to the one of two kept buffers that does not hold the state; swap both after the last store."""
    kind = state.allocated.results[0].type
    with state.allocated.location, ir.InsertionPoint(state.allocated):
        new, last = loaded(name, kind), loaded(_other(name), kind)
        _replace(state.allocated, new, None)
    with ir.InsertionPoint.after(state.stores[-1]), ir.Location.unknown():
        _store(last, name)
        _store(new, _other(name))


def _replace(allocated: Any, memory: Any, ready: Any | None) -> None:
    """Replace an allocation by `memory`, available after `ready` and all timepoints that the allocation awaited."""
    awaited = [*list(allocated.operands)[1:], *([ready] if ready is not None else [])]
    allocated.results[0].replace_all_uses_with(memory)
    allocated.results[1].replace_all_uses_with(joined(awaited, allocated.results[1].type))
    allocated.erase()


def _store(value: Any, name: str) -> None:
    ir.Operation.create(STORE, [], [value], {"global": ir.FlatSymbolRefAttr.get(name)})


def _declare(module: ir.Module, name: str, size: int, kind: str) -> None:
    """Declare the global `name`, and allocate its buffer when `module` is loaded."""
    ready = f"util.global private mutable @{_ready(name)} = #stream.timepoint<immediate> : !stream.timepoint"
    declared = ir.Module.parse(f"""
        {ready if kind == _TRANSIENT else ""}
        util.global private mutable @{name} : {kind}
        util.initializer {{
          %size = arith.constant {size} : index
          %memory = stream.resource.alloc uninitialized : {kind}{{%size}}
          util.global.store %memory, @{name} : {kind}
          util.return
        }}
    """)
    # Before the functions: IREE prepares parts of them at load time, and these parts refer to the buffer.
    first = functions_of(module)[0]
    for operation in list(declared.body.operations):
        operation.operation.clone(ir.InsertionPoint(first))


def _ready(name: str) -> str:
    return f"{name}__ready"


def _other(name: str) -> str:
    return f"{name}__other"


PASS = KeepBuffers

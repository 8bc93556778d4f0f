"""Memory that is kept from one call to the next.

IREE 3.13.0's devices keep what a call on a CPU frees, but not what is over 64 MiB (`default_oversized_pool` in
local_task/task_device.c). That is allocated anew in every call, and cleared, by one thread while the others wait: a
tenth of the step of a GPT of 7 million parameters. In several allocations that are each less, memory grows from step to
step, as pools of more than 64 MiB seldom find what was freed. So what is over that here is allocated when the module is
loaded:

* Intermediate values have memory that is the same for all functions, which run one after the other.
* New state is written where the last but one lies, which nothing reads any more.
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
class _Use:
    """From when to when a function has memory for intermediate values.

    Attributes:
        allocated: the operation that allocates it.
        freed: the one that frees it.
    """

    allocated: Any
    freed: Any


@dataclass(frozen=True)
class _State:
    """Memory for new state.

    Attributes:
        allocated: the operation that allocates it.
        stores: those that make it the state, in order.
    """

    allocated: Any
    stores: tuple[Any, ...]

    @property
    def globals(self) -> str:
        """The globals that hold that state."""
        return ", ".join(sorted(str(store.attributes["global"]) for store in self.stores))


@dataclass(frozen=True)
class KeepBuffers(ModulePass):
    """Allocate large buffers when a module is loaded, and keep them from call to call.

    Before:
        %memory, %ready = stream.resource.alloca : !stream.resource<transient>{%c100000000} ... stream.resource.dealloca
    After:
        %memory = util.global.load @__kept_0 ...       // allocated by an initializer

    Attributes:
        least: the size in bytes up to which the device itself keeps what a call frees.
    """

    name: ClassVar[str] = "keep-buffers"

    least: int = 1 << 26

    @classmethod
    def of_context(cls, context: ModuleContext) -> Self:
        """The pass with the limit of the target's device."""
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
            uses = list(filter(None, map(_use_of, large)))
            found = list(filter(None, map(_state_of, large))) if name_of(function) not in OF_STATE else []
            for index, use in enumerate(uses):
                _grow(kept, f"__kept_{index}", use.allocated)
                _use_kept(use, f"__kept_{index}")
            for state in found:
                name = states.setdefault(state.globals, f"__kept_state_{len(states)}")
                for memory in (name, _other(name)):
                    _grow(kept, memory, state.allocated)
                _alternate(state, name)
        for name, (size, kind) in kept.items():
            _declare(module, name, size, kind)
        return PassResult(bool(kept), {"kept": len(kept)})


def _use_of(allocated: Any) -> _Use | None:
    """The use of memory for intermediate values, where no other function can use it meanwhile."""
    memory = allocated.results[0]
    users = [use.owner.operation for use in memory.uses]
    freed = [user for user in users if user.name == _FREED and user.block == allocated.block]
    if str(memory.type) != _TRANSIENT or len(freed) != 1 or _calls(allocated, freed[0]):
        return None
    return _Use(allocated, freed[0]) if all(user.name == _RUN for user in users if user not in freed) else None


def _calls(first: Any, last: Any) -> bool:
    """Whether a function is called between two operations of a block."""
    operations = [op.operation for op in first.block]
    between = operations[operations.index(first) : operations.index(last)]
    return any(op.name == "util.call" for outer in between for op in (outer, *inside(outer)))


def _state_of(allocated: Any) -> _State | None:
    """Memory for new state that becomes the state whenever it is written."""
    users = [use.owner.operation for use in allocated.results[0].uses]
    stores = [op.operation for op in allocated.block if op.operation in users and op.operation.name == STORE]
    if str(allocated.results[0].type) != _STATE or not stores:
        return None
    return _State(allocated, tuple(stores)) if all(u.name == _RUN or u in stores for u in users) else None


def _grow(kept: dict[str, tuple[int, str]], name: str, allocated: Any) -> None:
    """Have what is kept as `name` be as large as what is allocated."""
    size, _ = kept.get(name, (0, ""))
    kept[name] = max(size, constant_of(allocated.operands[0]) or 0), str(allocated.results[0].type)


def _use_kept(use: _Use, name: str) -> None:
    """Use the memory that is kept, from when on the last call is through with it."""
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
    """Write new state to the one of two memories that has not the last one, once that is complete."""
    kind = state.allocated.results[0].type
    with state.allocated.location, ir.InsertionPoint(state.allocated):
        new, last = loaded(name, kind), loaded(_other(name), kind)
        _replace(state.allocated, new, None)
    with ir.InsertionPoint.after(state.stores[-1]), ir.Location.unknown():
        _store(last, name)
        _store(new, _other(name))


def _replace(allocated: Any, memory: Any, ready: Any | None) -> None:
    """Have `memory` be there in place of what is allocated, when `ready` is reached and all that was awaited."""
    awaited = [*list(allocated.operands)[1:], *([ready] if ready is not None else [])]
    allocated.results[0].replace_all_uses_with(memory)
    allocated.results[1].replace_all_uses_with(joined(awaited, allocated.results[1].type))
    allocated.erase()


def _store(value: Any, name: str) -> None:
    ir.Operation.create(STORE, [], [value], {"global": ir.FlatSymbolRefAttr.get(name)})


def _declare(module: ir.Module, name: str, size: int, kind: str) -> None:
    """Allocate memory when `module` is loaded."""
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
    # Before functions: what IREE prepares of one when the module is loaded has the memory in it.
    first = functions_of(module)[0]
    for operation in list(declared.body.operations):
        operation.operation.clone(ir.InsertionPoint(first))


def _ready(name: str) -> str:
    return f"{name}__ready"


def _other(name: str) -> str:
    return f"{name}__other"


PASS = KeepBuffers

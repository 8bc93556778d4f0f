"""New state lies where the old one did where nothing can tell, and elsewhere where something could."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from iree.compiler import ir
from torch import nn

import irongrad as ig
from irongrad.mlir.walk import inside, name_of, parsed
from irongrad.passes.module.state_in_place import write_state_in_place
from irongrad.pipeline.iree import compile as compilation
from irongrad.runtime.errors import GuardError

READ, WRITTEN = (f"!iree_tensor_ext.dispatch.tensor<{kind}:tensor<8x8xf32>>" for kind in ("readonly", "writeonly"))

# A kernel that computes of an old and of a new value; `{map}` is where it reads the old one.
MODULE = """
util.global private mutable @a : !stream.resource<variable>
util.global private mutable @b : !stream.resource<variable>
util.global private mutable @ready : !stream.timepoint
stream.executable private @kernel {{
  stream.executable.export public @kernel
  builtin.module {{
    func.func @kernel(%old: !stream.binding, %given: !stream.binding, %new: !stream.binding) {{
      %c0 = arith.constant 0 : index
      %o = stream.binding.subspan %old[%c0] : !stream.binding -> {read}
      %g = stream.binding.subspan %given[%c0] : !stream.binding -> {read}
      %n = stream.binding.subspan %new[%c0] : !stream.binding -> {written}
      %was = iree_tensor_ext.dispatch.tensor.load %o, offsets = [0, 0], sizes = [8, 8], strides = [1, 1]
        : {read} -> tensor<8x8xf32>
      %by = iree_tensor_ext.dispatch.tensor.load %g, offsets = [0, 0], sizes = [8, 8], strides = [1, 1]
        : {read} -> tensor<8x8xf32>
      %room = tensor.empty() : tensor<8x8xf32>
      %is = linalg.generic {{
          indexing_maps = [{map}, affine_map<({loops}) -> ({given})>, affine_map<({loops}) -> (i, j)>],
          iterator_types = [{kinds}]}}
          ins(%was, %by : tensor<8x8xf32>, tensor<8x8xf32>) outs(%room : tensor<8x8xf32>) {{
      ^bb0(%one: f32, %other: f32, %out: f32):
        %sum = arith.addf %one, %other : f32
        linalg.yield %sum : f32
      }} -> tensor<8x8xf32>
      iree_tensor_ext.dispatch.tensor.store %is, %n, offsets = [0, 0], sizes = [8, 8], strides = [1, 1]
        : tensor<8x8xf32> -> {written}
      return
    }}
  }}
}}
util.initializer {{
  %size = arith.constant 256 : index
  {begin}
  util.global.store %one, @a : !stream.resource<variable>
  util.global.store {other}, @b : !stream.resource<variable>
  util.return
}}
util.func public @f(%given: !stream.resource<external>, %chosen: i1) {{
  %zero = arith.constant 0 : index
  %size = arith.constant 256 : index
  %before = util.global.load @ready : !stream.timepoint
  %a = util.global.load @a : !stream.resource<variable>
  %total, %first, %second = stream.resource.pack slices({{ [0, 1] = %size, [0, 1] = %size }}) : index
  %memory, %there = stream.resource.alloca uninitialized await(%before) => !stream.resource<variable>{{%total}}
      => !stream.timepoint
  %new = stream.resource.subview %memory[%first] : !stream.resource<variable>{{%total}}
      -> !stream.resource<variable>{{%size}}
  %kept = stream.resource.subview %memory[%second] : !stream.resource<variable>{{%total}}
      -> !stream.resource<variable>{{%size}}
  %room, %made = stream.resource.alloca uninitialized await({ready}) => !stream.resource<transient>{{%size}}
      => !stream.timepoint
  %all = stream.timepoint.join max(%there, %made) => !stream.timepoint
  %done = stream.cmd.execute await({awaited}) => with(%a as %x: !stream.resource<variable>{{%size}},
      %given as %g: !stream.resource<external>{{%size}}, %new as %n: !stream.resource<variable>{{%size}},
      %kept as %k: !stream.resource<variable>{{%size}}, %room as %r: !stream.resource<transient>{{%size}}) {{
    stream.cmd.concurrent {{
      stream.cmd.copy %x[%zero], %r[%zero], %size
          : !stream.resource<variable>{{%size}} -> !stream.resource<transient>{{%size}}
      {beside}
    }}
    stream.cmd.dispatch @kernel::@kernel {{
      ro %x[%zero for %size] : !stream.resource<variable>{{%size}},
      ro %{by}[%zero for %size] : !stream.resource<{kind}>{{%size}},
      wo %n[%zero for %size] : !stream.resource<variable>{{%size}}
    }}
    {after}
    stream.cmd.copy %n[%zero], %k[%zero], %size
        : !stream.resource<variable>{{%size}} -> !stream.resource<variable>{{%size}}
  }} => !stream.timepoint
  {then}
  util.global.store %new, @a : !stream.resource<variable>
  util.global.store %kept, @b : !stream.resource<variable>
  util.global.store %done, @ready : !stream.timepoint
  util.return
}}
util.func public @g(%memory: !stream.resource<external>) {{
  %zero = arith.constant 0 : index
  %size = arith.constant 256 : index
  %a = util.global.load @a : !stream.resource<variable>
  %before = util.global.load @ready : !stream.timepoint
  %read = stream.cmd.execute await(%before) => with(%a as %x: !stream.resource<variable>{{%size}},
      %memory as %m: !stream.resource<external>{{%size}}) {{
    stream.cmd.copy %x[%zero], %m[%zero], %size
        : !stream.resource<variable>{{%size}} -> !stream.resource<external>{{%size}}
  }} => !stream.timepoint
  {waits}
  {more}
  util.return
}}
"""
ALLOCATED = """%one = stream.resource.alloc uninitialized : !stream.resource<variable>{%size}
  %other = stream.resource.alloc uninitialized : !stream.resource<variable>{%size}"""
FROM_FILE = """%one, %read = stream.resource.constants :
    !stream.resource<variable>{%size} = #stream.parameter.named<"state"::"one"> : tensor<8x8xf32> => !stream.timepoint
  %other = stream.resource.alloc uninitialized : !stream.resource<variable>{%size}"""
BOTH_FROM_FILE = """%one, %other, %read = stream.resource.constants :
    !stream.resource<variable>{%size} = #stream.parameter.named<"state"::"one"> : tensor<8x8xf32>,
    !stream.resource<variable>{%size} = #stream.parameter.named<"state"::"other"> : tensor<8x8xf32>
    => !stream.timepoint"""
FINE = {
    "begin": ALLOCATED,
    "read": READ,
    "written": WRITTEN,
    "map": "affine_map<(i, j) -> (i, j)>",
    "loops": "i, j",
    "given": "j, i",
    "kinds": '"parallel", "parallel"',
    "other": "%other",
    "ready": "%before",
    "awaited": "%all",
    "beside": "",
    "by": "g",
    "kind": "external",
    "after": "",
    "then": "",
    "more": "",
    "waits": "%m = stream.timepoint.await %read => %memory : !stream.resource<external>{%size}",
}
COPIED = """stream.cmd.copy %x[%zero], %r[%zero], %size
    : !stream.resource<variable>{%size} -> !stream.resource<transient>{%size}"""

READ_B = """
  %b = util.global.load @b : !stream.resource<variable>
  %also = stream.cmd.execute await(%before) => with(%b as %x: !stream.resource<variable>{%size},
      %memory as %y: !stream.resource<external>{%size}) {
    stream.cmd.copy %x[%zero], %y[%zero], %size
        : !stream.resource<variable>{%size} -> !stream.resource<external>{%size}
  } => !stream.timepoint"""


def stored_and_allocated(module: ir.Module) -> tuple[list[str], list[int]]:
    """What `f` stores in globals, and of how many values what it allocates for state is."""
    (function,) = [op for op in inside(module.operation) if op.name == "util.func" and name_of(op) == "f"]
    stored = [str(op.attributes["global"]) for op in inside(function) if op.name == "util.global.store"]
    slices = [op for op in inside(function) if op.name == "stream.resource.pack"]
    return stored, [len(op.operands) for op in slices]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"begin": BOTH_FROM_FILE},
        {"waits": "util.global.store %read, @ready : !stream.timepoint"},
        {"then": "%freed = stream.resource.dealloca await(%done) => %room : !stream.resource<transient>{%size} "
                 "=> !stream.timepoint"},
        {"then": "%held = stream.timepoint.await %done => %new : !stream.resource<variable>{%size}"},
    ],
    ids=[
        "as it is",
        "parameters are copied",
        "a later call waits for a reader",
        "memory is freed afterwards",
        "it is awaited",
    ],
)  # fmt: skip
def test_new_state_lies_where_the_old_one_did(changed: dict[str, str]) -> None:
    with parsed(MODULE.format(**FINE | changed).encode()) as module:
        write_state_in_place(module)
        assert module.operation.verify()
        # `b` too, which is stored without having been loaded.
        assert stored_and_allocated(module) == (["@ready"], [0])


@pytest.mark.parametrize(
    "changed",
    [
        {"map": "affine_map<(i, j) -> (j, i)>"},
        {"map": "affine_map<(i, j) -> (i, 0)>"},
        {
            "map": "affine_map<(i, j, k) -> (i, j)>",
            "loops": "i, j, k",
            "given": "j, k",
            "kinds": '"parallel", "parallel", "reduction"',
        },
        {"by": "x", "kind": "variable"},
        {"after": COPIED},
        {"beside": "stream.cmd.copy %g[%zero], %n[%zero], %size : !stream.resource<external>{%size} "
                   "-> !stream.resource<variable>{%size}"},
        {"other": "%one"},
        {"begin": FROM_FILE},
        {"then": 'cf.assert %chosen, "refused"'},
        {"then": "util.global.store %a, @b : !stream.resource<variable>"},
        {"waits": FINE["waits"] + "util.global.store %a, @b : !stream.resource<variable>"},
        {"waits": ""},
        {"awaited": "%made", "ready": "%never"},
        {"then": "%held = stream.timepoint.await %done => %new : !stream.resource<variable>{%size}\n"
                 "util.optimization_barrier %held : !stream.resource<variable>"},
    ],
    ids=[
        "read elsewhere",
        "read for several results",
        "read while it is summed",
        "read twice",
        "read afterwards",
        "read and written at once",
        "two globals begin as one",
        "a lone parameter is not copied",
        "refused afterwards",
        "the old value is kept",
        "another function keeps the old value",
        "nobody waits for a reader",
        "it waits for nothing",
        "it is awaited for more",
    ],
)  # fmt: skip
def test_what_could_be_seen_is_left(changed: dict[str, str]) -> None:
    """`b`, too, which nobody waits for a reader of."""
    text = MODULE.format(**FINE | changed | {"more": READ_B})
    if "%never" in text:
        text = text.replace("  %before =", "  %never = stream.timepoint.immediate => !stream.timepoint\n  %before =", 1)
    with parsed(text.encode()) as module:
        assert module.operation.verify()
        before = str(module)
        write_state_in_place(module)
        assert str(module) == before


def test_what_is_read_elsewhere_is_left_alone() -> None:
    with parsed(MODULE.format(**FINE | {"more": READ_B}).encode()) as module:
        write_state_in_place(module)
        assert module.operation.verify()
        assert stored_and_allocated(module) == (["@b", "@ready"], [1])


def make_step() -> ig.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 3))
    return ig.TrainStep(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        inputs={"x": torch.arange(32).reshape(8, 4), "y": torch.arange(8) % 3},
    )


def state_stored(stream: bytes, function: str) -> int:
    """How many globals with memory a function stores."""
    with parsed(stream) as module:
        (found,) = [op for op in inside(module.operation) if op.name == "util.func" and name_of(op) == function]
        stores = [op for op in inside(found) if op.name == "util.global.store"]
        return sum("resource<variable>" in str(op.operands[0].type) for op in stores)


def streams(directory: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> bytes:
    """A step's module as it is after IREE's phase `stream`."""
    found: list[bytes] = []
    run = compilation._compile_to_stream

    def kept(*arguments: Any) -> bytes:
        found.append(run(*arguments))
        return found[-1]

    monkeypatch.setattr(compilation, "_compile_to_stream", kept)
    ig.compile(make_step(), directory, cache=False, **options)
    return found[0]


def test_a_step_stores_no_state_and_iree_still_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the second fails, IREE writes state in place, and need not be helped."""
    alone = {"entry_points": ("train_step",)}
    assert state_stored(streams(tmp_path / "a", monkeypatch, **alone), "train_step") == 0
    monkeypatch.setattr(compilation, "write_state_in_place", lambda module: None)
    assert state_stored(streams(tmp_path / "b", monkeypatch, **alone), "train_step") > 0


def test_every_function_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ig.compile(make_step(), tmp_path / "in_place", cache=False)
    monkeypatch.setattr(compilation, "write_state_in_place", lambda module: None)
    ig.compile(make_step(), tmp_path / "apart", cache=False)
    in_place, apart = (results(ig.runtime.load(tmp_path / name), tmp_path / name) for name in ("in_place", "apart"))
    assert in_place.keys() == apart.keys()
    for name, value in apart.items():
        np.testing.assert_array_equal(in_place[name], value, err_msg=name)


def results(session: ig.runtime.Session, directory: Path) -> dict[str, Any]:
    """What functions give in turn, the state among it as it was when they gave it."""
    x, y = (v.numpy() for v in make_step().inputs.values())
    found: dict[str, Any] = {}

    def note(when: str) -> None:
        found.update({f"{when} {name}": value for name, value in session.state().items()})

    for turn in range(2):
        found[f"train {turn}"] = session.train_step(x=x, y=y)
        note(f"trained {turn}")
        session.grad_step(x=x, y=y)
        session.grad_step(x=x[::-1].copy(), y=y)
        found[f"predict {turn}"] = session.predict(x=x)
        session.apply_step()
        note(f"applied {turn}")
        found[f"steps {turn}"] = session.train_steps(x=np.stack([x, x]), y=np.stack([y, y]))
    note("trained on")
    session.save(directory / "saved.safetensors")
    with pytest.raises(GuardError):
        session.train_step(x=x + 50, y=y)
    note("refused")
    session.reset()
    note("reset")
    found["after a reset"] = session.train_step(x=x, y=y)
    session.restore(directory / "saved.safetensors")
    found["after a restore"] = session.train_step(x=x, y=y)
    note("at last")
    return found


def test_a_refused_step_leaves_the_state(tmp_path: Path) -> None:
    ig.compile(make_step(), tmp_path / "step", cache=False)
    session = ig.runtime.load(tmp_path / "step")
    x, y = (v.numpy() for v in make_step().inputs.values())
    session.train_step(x=x, y=y)
    before = session.state()
    with pytest.raises(GuardError):
        session.train_step(x=x + 50, y=y)
    for name, value in session.state().items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)

"""Reading modules of IREE."""

from __future__ import annotations

import ast

from iree.compiler import ir

from irongrad.mlir.walk import new_context
from irongrad.runtime.installed import PACKAGE

# torch-mlir's dialects, whose operations are created in its own context.
TORCH = ("torch.", "torch_c.")


def test_every_operation_that_our_code_names_is_registered_in_a_new_context():
    """An operation of a dialect that is not loaded would be created without its traits and its verifier."""
    some, every = new_context(), ir.Context()
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    texts = {n.value for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    named = {text for text in texts if isinstance(text, str) and every.is_registered_operation(text)}
    assert {"arith.constant", "flow.dispatch", "stream.timepoint.join", "util.global.load"} <= named
    assert {name for name in named if not some.is_registered_operation(name)} == {
        name for name in named if name.startswith(TORCH)
    }

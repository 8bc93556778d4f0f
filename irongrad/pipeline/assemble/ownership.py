"""Run a part of the module only on the rank that holds a shard of the optimizer's state; alone, a rank holds all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

OWNS = "@comm.owns"


def if_owned(result: str, shard: int, bucket: str | None, body: Iterable[str]) -> Iterator[str]:
    """Run `body` if this rank holds the shard number `shard`.

    Args:
        result: the SSA name of the result, a buffer view. On other ranks its values are not defined.
        shard: the number of the shard.
        bucket: the MLIR type of the result's tensor; None if there is no result.
        body: lines of MLIR; if there is a result, they yield it at the end.
    """
    yield f"{result}.shard = arith.constant {shard} : i32"
    yield f"{result}.owned = util.call {OWNS}({result}.shard) : (i32) -> i32"
    yield f"{result}.one = arith.constant 1 : i32"
    yield f"{result}.mine = arith.cmpi eq, {result}.owned, {result}.one : i32"
    yield f"{result} = scf.if {result}.mine -> (!hal.buffer_view) {{" if bucket else f"scf.if {result}.mine {{"
    yield from (f"  {line}" for line in body)
    if bucket:
        yield "} else {"
        yield f"  {result}.none = flow.tensor.empty : {bucket}"
        yield f"  {result}.empty = hal.tensor.export {result}.none : {bucket} -> !hal.buffer_view"
        yield f"  scf.yield {result}.empty : !hal.buffer_view"
    yield "}"

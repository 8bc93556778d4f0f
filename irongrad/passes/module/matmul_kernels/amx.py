"""Products of pairs in the tile registers of Intel's AMX: eight registers of 16 rows of 64 bytes.

Linux lets a process use these registers only after it has asked for them. Before that, their first use ends it with
SIGILL. Any program may run a kernel, so each workgroup asks, by a system call of about 0.1 µs. Where Linux denies the
registers, and on other systems, the kernel multiplies without them.

Sources: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18; Linux,
Documentation/arch/x86/xstate.rst.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from iree.compiler import ir
from iree.compiler.dialects import arith, llvm, memref, scf, vector

from irongrad.memory_model.product_tiles import AMX_ROWS, Tile
from irongrad.mlir.loop_code import constant

# A register has `ROWS` rows of `BYTES` bytes.
ROWS, BYTES = AMX_ROWS, 64

# arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18

# The registers, and the bytes of a row of four of them.
_REGISTERS, _BYTES_OF_FOUR = 8, BYTES * 0x0001000100010001

# The segment register DS is zero in a 64-bit process of Linux. It is not on Windows and macOS, where the number of the
# system call stands for another one.
_ASK = f"""
    mov eax, ds
    test eax, eax
    jne 2f
    mov eax, {_ARCH_PRCTL}
    mov edi, {_REQUEST}
    mov esi, {_TILE_DATA}
    syscall
    test rax, rax
    jne 2f
    ldtilecfg [$1]
2:
"""


@dataclass(frozen=True)
class Rows:
    """A strip of the left operand, each number an i64.

    Attributes:
        begin: the address of its first summand, in bfloat16.
        stride: the bytes from one row to the next.
        steps: the number of registers that the summands of a row fill, which may be zero.
    """

    begin: Any
    stride: Any
    steps: Any


def asked(tile: Tile) -> Any:
    """Write code that asks for the tile registers and configures them for tiles of results.

    Args:
        tile: the tile, of all rows of registers, or of one register with fewer rows.

    Returns:
        An i1, whether the kernel has the registers.
    """
    number, configuration = _number(), _configuration(tile)
    kind = ir.VectorType.get([len(configuration)], number)
    values = [ir.IntegerAttr.get(number, value) for value in configuration]
    room = memref.alloca(ir.MemRefType.get([len(configuration)], number), [], [], alignment=BYTES)
    vector.store(arith.constant(kind, ir.DenseElementsAttr.get(values, kind)), room, [constant(0)])
    denied = _assembly(_ASK, "=&{rax},r,~{rdi},~{rsi},~{rcx},~{r11}", [address(room)], number)
    return arith.cmpi(arith.CmpIPredicate.eq, denied, arith.constant(number, 0))


def _configuration(tile: Tile) -> tuple[int, ...]:
    """What LDTILECFG reads: palette 1, then the bytes of a row and the number of rows of each register."""
    down = _registers_down(tile)
    of_rows = down * tile.vectors + down
    rows = [min(tile.rows, ROWS)] * of_rows + [ROWS] * (_REGISTERS - of_rows)
    return 1, 0, _BYTES_OF_FOUR, _BYTES_OF_FOUR, 0, 0, int.from_bytes(rows, "little"), 0


def _registers_down(tile: Tile) -> int:
    """In how many registers the rows of a tile are."""
    return -(-tile.rows // ROWS)


def release(has_tiles: Any) -> None:
    """Write code that gives the tile registers back, if there are any: with them a thread takes longer to switch.

    Args:
        has_tiles: what `asked` returned.
    """
    with ir.InsertionPoint(scf.IfOp(has_tiles).then_block):
        _assembly("tilerelease", "", [])
        scf.yield_([])


def add_product(tile: Tile, left: Rows, right: Any, sums: Any, is_first: Any, rest: Any | None) -> None:
    """Write code that adds the product of a strip and a block to the sums of a tile of results.

    Args:
        tile: the tile: at most two registers of rows, and two of columns.
        left: the strip.
        right: the address of the block, in bfloat16: for each pair of summands the pairs of the tile's columns.
        sums: the address of the sums, float32, a row of the tile after the other.
        is_first: an i1, whether the sums begin at zero; they are not read then.
        rest: the address of one more register of summands of each row, rows of 64 bytes apart; it may be zero.
    """
    begin = arith.extui(_number(), is_first)
    operands = [left.begin, left.stride, right, left.steps, sums, begin, *([] if rest is None else [rest])]
    constraints = ["r"] * len(operands) + [f"~{{{name}}}" for name in ("rax", "rdi", "rdx", "rcx", "rsi")]
    _assembly(_product(tile, has_rest=rest is not None), ",".join(constraints), operands)


def _product(tile: Tile, *, has_rest: bool) -> str:
    """The assembly of `add_product`.

    The registers from tmm0 on have the sums, the next ones the rows, and the last ones the columns (`_configuration`).
    """
    down, across = _registers_down(tile), tile.vectors
    row = across * BYTES  # of the block, and of the sums
    places = list(product(range(down), range(across)))
    sums = {n: f"[$4 + rsi + {i * ROWS * row + j * BYTES}]" for n, (i, j) in enumerate(places)}
    lines = ["mov rax, $0", "mov rdi, $1", "shl rdi, 4", "add rdi, rax", "mov rdx, $2", "mov rcx, $3"]
    lines += [f"mov rsi, {row}", "test $5, $5", "jne 2f"]
    lines += [f"tileloadd tmm{n}, {place}" for n, place in sums.items()]
    lines += ["jmp 3f", "2:"]
    lines += [f"tilezero tmm{n}" for n in sums]
    lines += ["3:", "test rcx, rcx", "je 5f", "4:", *_step(tile, ("[rax + $1]", "[rdi + $1]"))]
    lines += [f"add rax, {BYTES}", f"add rdi, {BYTES}", f"add rdx, {ROWS * row}", "dec rcx", "jne 4b", "5:"]
    if has_rest:
        rows = tuple(f"[$6 + rcx + {i * ROWS * BYTES}]" for i in range(down))
        lines += ["test $6, $6", "je 6f", f"mov rcx, {BYTES}", *_step(tile, rows), "6:"]
    lines += [f"tilestored {place}, tmm{n}" for n, place in sums.items()]
    return "\n".join(lines)


def _step(tile: Tile, rows: Sequence[str]) -> list[str]:
    """Add the product of one register of summands of each row and column."""
    down, across = _registers_down(tile), tile.vectors
    left, right = down * across, down * across + down
    lines = [f"tileloadd tmm{right + j}, [rdx + rsi + {j * BYTES}]" for j in range(across)]
    for i, place in zip(range(down), rows, strict=False):
        lines += [f"tileloadd tmm{left + i}, {place}"]
        lines += [f"tdpbf16ps tmm{i * across + j}, tmm{left + i}, tmm{right + j}" for j in range(across)]
    return lines


def address(memory: Any, offset: Any | None = None) -> Any:
    """The address of `memory`, a memref of rank 1 in the order of its elements, plus `offset` bytes, as an i64."""
    begin = memref.extract_aligned_pointer_as_index(memory)
    return arith.index_cast(_number(), begin if offset is None else arith.addi(begin, offset))


def _assembly(text: str, constraints: str, operands: Sequence[Any], result: ir.Type | None = None) -> Any:
    """Inline assembly in Intel's syntax, which may read and write any memory."""
    clobbers = "~{memory},~{dirflag},~{fpsr},~{flags}"
    everything = f"{constraints},{clobbers}" if constraints else clobbers
    intel = ir.IntegerAttr.get(_number(), 1)
    written = llvm.InlineAsmOp(result, operands, text, everything, has_side_effects=True, asm_dialect=intel)
    return written.results[0] if result is not None else None


def _number() -> ir.Type:
    return ir.IntegerType.get_signless(64)

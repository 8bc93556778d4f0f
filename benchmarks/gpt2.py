"""GPT-2 of 124 million parameters beside eager, torch.compile and JAX: time, memory, start and compilation.

    python benchmarks/gpt2.py [--size 4x64] [--rounds 7] [--artifact DIR] [--llmc FILE] [--json]

Sizes are batch x tokens. Every backend trains the GPT of examples/gpt.py with AdamW in float32; eager's is fused.
Each trains in a process of its own, and they take turns. IronGrad's process holds no PyTorch: it loads the artifact.
The peak of resident memory is that of training, without the compilation before it. `start` is the time from a new
process to the end of its first step, right after another such process has filled the caches, and the operating
system's cache of files; JAX has no such cache here.

`--llmc` is the program `train_gpt2` of https://github.com/karpathy/llm.c, which has 4x64 built in.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SIZES = ("4x64", "4x256", "1x1024")
BACKENDS = ("irongrad", "eager", "torch.compile", "jax")
VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 50257, 1024, 768, 12, 12
_STATUS = re.compile(r"VmHWM:\s*(\d+) kB")


@dataclass(frozen=True)
class Row:
    """One backend at one size.

    Attributes:
        backend: its name.
        size: batch x tokens.
        least: seconds of a step, the least of the rounds.
        median: seconds of a step, the median of the rounds.
        peak_mb: the most resident memory while it trains, in MB; None if it is not measured.
        start: seconds from a new process to the end of its first step; None if there is no cache to start from.
        compilation: seconds of the compilation with the first step, from empty caches; None for eager.
    """

    backend: str
    size: str
    least: float
    median: float
    peak_mb: float | None
    start: float | None
    compilation: float | None


def make_step(size: str = SIZES[0]) -> Any:
    """The training step of GPT-2 124M at a size."""
    sys.path.insert(0, str(ROOT / "examples"))
    import torch
    from gpt import GPT, loss

    import irongrad as ig

    batch, length = map(int, size.split("x"))
    torch.manual_seed(0)
    model = GPT(CONTEXT, WIDTH, HEADS, LAYERS, VOCABULARY)
    tokens = torch.randint(VOCABULARY, (batch, length + 1))
    inputs = {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    return ig.TrainStep(model, loss, optimizer, inputs)


def prepared(backend: str, size: str, folder: Path) -> Callable[[], object]:
    """What takes a step; `folder` holds the artifact, or the caches."""
    if backend == "irongrad":
        from irongrad.runtime import load
        from irongrad.runtime.golden import read_golden

        session, golden = load(folder / "artifact"), read_golden(folder / "artifact" / "golden.safetensors")
        return lambda: session.train_step(**golden.inputs)
    if backend == "jax":
        from irongrad.peers.xla import compiled

        return compiled(make_step(size), folder, one_thread=False)[1]
    from step_time import fuse

    from irongrad.peers.torch_steps import torch_step

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    step = make_step(size)
    if backend == "eager":
        fuse(step)
    return torch_step(step, compiled=backend == "torch.compile").run


def serve(backend: str, size: str, folder: Path) -> None:
    """Take a step, then as many as each line of the input asks for; print seconds, and at the end the peak memory."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers print
    run = prepared(backend, size, folder)
    run()
    print("ready", file=out, flush=True)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew (proc(5))
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            run()
        print((time.perf_counter() - start) / int(line), file=out, flush=True)
    found = _STATUS.search(Path("/proc/self/status").read_text())
    print(int(found[1]) * 1024 / 1e6 if found else 0, file=out, flush=True)


def started(backend: str, size: str, folder: Path) -> tuple[subprocess.Popen[str], float]:
    """A process that has taken its first step, and the seconds until then."""
    start = time.perf_counter()
    command = [sys.executable, __file__, "--serve", backend, "--size", size, "--folder", str(folder)]
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise SystemExit(f"{backend} failed:\n{(folder / 'log').read_text()[-2000:]}")
    return process, time.perf_counter() - start


def ended(process: subprocess.Popen[str]) -> float:
    """End a process; return its peak of resident memory, in MB."""
    peak, _ = process.communicate()
    return float(peak)


def compile_artifact(size: str, folder: Path) -> None:
    """Compile and verify the step with IronGrad, without its caches."""
    import irongrad as ig

    ig.compile(make_step(size), folder / "artifact", entry_points=("train_step",), cache=False)


def compilation(backend: str, size: str, folder: Path) -> float | None:
    """Fill the caches of a backend; return the seconds that it took."""
    if backend == "eager":
        return None
    if backend == "irongrad":
        start = time.perf_counter()
        subprocess.run([sys.executable, __file__, "--compile", "--size", size, "--folder", str(folder)], check=True)
        return time.perf_counter() - start
    process, seconds = started(backend, size, folder)
    ended(process)
    return seconds


def measure(size: str, rounds: int, root: Path, llmc: Path | None, say: Callable[[str], object]) -> list[Row]:
    """Compile with every backend, then let them train in turn."""
    compiled: dict[str, float | None] = {}
    for backend in BACKENDS:
        say(f"{size}: {backend} compiles")
        (root / backend).mkdir(parents=True, exist_ok=True)
        compiled[backend] = compilation(backend, size, root / backend)
    running: dict[str, subprocess.Popen[str]] = {}
    starts: dict[str, float] = {}
    for backend in BACKENDS:
        say(f"{size}: {backend} starts")
        if backend != "jax":
            ended(started(backend, size, root / backend)[0])
        running[backend], starts[backend] = started(backend, size, root / backend)
    times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for number in range(rounds):
        for backend, process in running.items():
            say(f"{size}: round {number + 1} of {rounds}, {backend}")
            times[backend].append(_ask(process, 2))
    rows = []
    for backend, process in running.items():
        start = None if backend == "jax" else starts[backend]
        seconds, peak = times[backend], ended(process)
        rows.append(Row(backend, size, min(seconds), statistics.median(seconds), peak, start, compiled[backend]))
    if llmc is not None and size == SIZES[0]:
        say(f"{size}: llm.c")
        rows.append(_llmc(llmc))
    return rows


def _ask(process: subprocess.Popen[str], count: int) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    print(count, file=process.stdin, flush=True)
    return float(process.stdout.readline())


def _llmc(program: Path) -> Row:
    """The steps that llm.c's own program prints: `step 0: train loss 5.3 (took 7500.1 ms)`."""
    process = subprocess.Popen([program.resolve()], cwd=program.parent, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    seconds = [float(found) / 1e3 for found in re.findall(r"took ([\d.]+) ms", process.stdout.read())]
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{program} failed: status {status}")
    return Row("llm.c", SIZES[0], min(seconds), statistics.median(seconds), usage.ru_maxrss * 1024 / 1e6, None, None)


def main() -> None:
    """Measure the chosen sizes and print a table, or JSON."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, action="append")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--artifact", type=Path, help="keep the artifacts and caches in this folder")
    parser.add_argument("--llmc", type=Path, help="llm.c's program train_gpt2, beside its data")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", choices=BACKENDS, help=argparse.SUPPRESS)
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.size[0], options.folder)
        return
    if options.compile:
        compile_artifact(options.size[0], options.folder)
        return
    console, rows = Console(stderr=True), []
    with tempfile.TemporaryDirectory() as scratch, console.status("") as status:
        for size in options.size or SIZES[:1]:
            root = (options.artifact or Path(scratch)) / size
            rows += measure(size, options.rounds, root, options.llmc, status.update)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    table = Table("size", "backend", "step s, least", "median", "peak MB", "start s", "compile s")
    for row in rows:
        figures = (row.least, row.median, row.peak_mb, row.start, row.compilation)
        table.add_row(row.size, row.backend, *("-" if f is None else f"{f:.4g}" for f in figures))
    Console().print(table)


if __name__ == "__main__":
    main()

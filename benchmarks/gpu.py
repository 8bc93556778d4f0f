"""Training steps on an NVIDIA GPU: IronGrad verified there, and its step time beside eager's and torch.compile's.

    python benchmarks/gpu.py [--family gpt] [--size small] [--precision bf16] [--backend eager] [--rounds 7] [--json]

Five model families, each in float32, with TF32 and in bfloat16. Every backend lives in a process of its own, all take
turns round by round, and times are medians. IronGrad's artifact has every entry point and is verified on the GPU
against eager float64 first; IREE has no TF32, so that is measured for PyTorch alone. It needs a PyTorch built for CUDA.

`--device local-task` runs the same on the CPU, which shows that the script works and nothing about GPUs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection

from step_time import CASES, make_step, serve, times_in_turn

from irongrad.runtime.devices import find_device

BACKENDS = ("eager", "torch.compile", "irongrad")
PRECISIONS = ("f32", "tf32", "bf16")
SIZES = ("small", "medium")


@dataclass(frozen=True)
class Case:
    """What a worker measures.

    Attributes:
        backend: one of `BACKENDS`.
        family: an example.
        size: one of `SIZES`.
        precision: one of `PRECISIONS`.
        device: IREE's name of the device.
    """

    backend: str
    family: str
    size: str
    precision: str
    device: str


@dataclass(frozen=True)
class Row:
    """A case's result.

    Attributes:
        case: what was measured.
        milliseconds: of one training step, the median over the rounds.
        ratio: to eager's step time in the same precision, the median of the rounds' own; None where eager was left out.
        worst: the largest error of the verification as a share of what is allowed; None for PyTorch.
    """

    case: Case
    milliseconds: float
    ratio: float | None
    worst: float | None


def target_of(device: str) -> str:
    """What to compile for; of CUDA's architectures the latest that the GPU runs."""
    if device != "cuda":
        return "llvm-cpu"
    import torch

    from irongrad.targets.cuda import ARCHITECTURES

    major, minor = torch.cuda.get_device_capability()
    return f"cuda:arch={max(a for a in ARCHITECTURES if a <= f'sm_{major}{minor}')}"


def irongrad_step(case: Case, directory: str) -> tuple[Callable[[], object], float]:
    """A function that takes one compiled step, and the worst error of the verification on the device."""
    import irongrad as ig
    from irongrad.runtime.golden import read_golden
    from irongrad.runtime.manifest import GOLDEN
    from irongrad.runtime.verification import verify

    step = replace(make_step(case.family, CASES[case.family][case.size]), precision=case.precision)
    inputs = {n: t.numpy() for n, t in step.inputs.items()}
    artifact = ig.compile(step, directory, target_of(case.device), cache=False)
    session = artifact.load(device=case.device)
    report = verify(session, {"": read_golden(artifact.directory / GOLDEN)})
    if not report.passed:
        raise SystemExit(f"{case.family} in {case.precision} is wrong on {case.device}: {report.worst}")
    held = {n: session.to_device(a) for n, a in inputs.items()}
    return lambda: session.train_step(**held), report.worst.ratio


def torch_step(case: Case) -> Callable[[], object]:
    """A function that takes one step of PyTorch, eager or compiled."""
    import torch

    from irongrad.peers.torch_steps import stepper
    from irongrad.pipeline.capture.step_modules import StepModule

    device = "cuda" if case.device == "cuda" else "cpu"
    torch.set_float32_matmul_precision("high" if case.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = case.precision == "tf32"
    step = make_step(case.family, CASES[case.family][case.size])
    module = StepModule(step).to(device).train()
    values = tuple(v.to(device) for v in step.inputs.values())
    half = torch.autocast(device, torch.bfloat16, enabled=case.precision == "bf16")

    def loss() -> torch.Tensor:
        with half:
            return module(*values)

    return stepper(step, loss, compiled=case.backend == "torch.compile").run


def worker(connection: Connection, case: Case) -> None:
    """Serve requests to run so many steps, answering with the seconds they took; first says the worst error."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as directory:
        worst: float | None = None
        if case.backend == "irongrad":
            run, worst = irongrad_step(case, os.path.join(directory, "artifact"))
        else:
            run = torch_step(case)
        run()
        connection.send(worst)
        serve(connection, run)


def measure(cases: list[Case], rounds: int) -> list[Row]:
    """Measure cases side by side: all processes are started, one after the other, and then take turns.

    Raises:
        SystemExit: one of them ended; what is wrong stands in its own output.
    """
    context = multiprocessing.get_context("spawn")
    pipes: dict[Case, Connection] = {}
    processes = []
    try:
        worst: dict[Case, float | None] = {}
        for case in cases:
            pipes[case], theirs = context.Pipe()
            processes.append(context.Process(target=worker, args=(theirs, case)))
            processes[-1].start()
            theirs.close()
            worst[case] = pipes[case].recv()
        times = times_in_turn(pipes, rounds)
    except EOFError:
        raise SystemExit(f"a process of {cases[0].family} ended early") from None
    finally:
        for pipe in pipes.values():
            pipe.close()
        for process in processes:
            process.join()
    return [_row(c, times, worst[c]) for c in cases]


def _row(case: Case, times: dict[Case, list[float]], worst: float | None) -> Row:
    eager = times.get(replace(case, backend="eager"))
    ratio = statistics.median(t / e for t, e in zip(times[case], eager, strict=True)) if eager else None
    return Row(case, 1e3 * statistics.median(times[case]), ratio, worst)


def check(device: str) -> str:
    """The name of the device.

    Raises:
        SystemExit: it is not there, or PyTorch cannot use it.
    """
    found = find_device(device)
    if found is None:
        raise SystemExit(
            f"no device {device!r} was found: this benchmark needs an NVIDIA GPU with its driver. "
            "'--device local-task' tries the script on the CPU"
        )
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise SystemExit(
                f"IREE finds {found.name}, but this PyTorch ({torch.__version__}) does not: install one for CUDA"
            )
    return found.name


def main() -> None:
    """Measure every chosen case and print a table, or JSON."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "local-task"), default="cuda")
    parser.add_argument("--family", choices=CASES, action="append")
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--precision", choices=PRECISIONS, action="append")
    parser.add_argument("--backend", choices=BACKENDS, action="append")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    name = check(options.device)
    rows: list[Row] = []
    for family in options.family or CASES:
        cases = [
            Case(backend, family, options.size, precision, options.device)
            for precision in options.precision or PRECISIONS
            for backend in options.backend or BACKENDS
            if (precision, backend) != ("tf32", "irongrad")
        ]
        print(f"{family}: {len(cases)} processes", file=sys.stderr)
        rows += measure(cases, options.rounds)
    if options.json:
        print(json.dumps({"device": name, "rows": [asdict(r) for r in rows]}, indent=2))
        return
    table = Table("family", "precision", "backend", "step, ms", "to eager", "worst error", title=name)
    for row in rows:
        ratio = f"{row.ratio:.2f}" if row.ratio is not None else ""
        worst = f"{row.worst:.0%} of what is allowed" if row.worst is not None else ""
        table.add_row(row.case.family, row.case.precision, row.case.backend, f"{row.milliseconds:.2f}", ratio, worst)
    Console().print(table)


if __name__ == "__main__":
    main()

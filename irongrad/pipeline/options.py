"""A caller's options for the compiler, checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Unpack

from irongrad.cache import Store, default_store
from irongrad.passes import Pass, chosen_passes, is_known_pass, registered
from irongrad.pipeline.base_file import base_path
from irongrad.pipeline.capture.sync_batch_norm import Synchronised
from irongrad.pipeline.choices import Choices, completed, declared
from irongrad.pipeline.iree.phases import check_disabled, module_passes
from irongrad.pipeline.lower.routes import known_route
from irongrad.pipeline.memory_budget import asked_budget, check_budget
from irongrad.pipeline.place.parts import Part, check_parts, parts_of
from irongrad.runtime.byte_sizes import bytes_in
from irongrad.runtime.errors import UserError
from irongrad.runtime.manifest import STACKED
from irongrad.runtime.staging import check_output
from irongrad.runtime.suggestion import suggestion
from irongrad.sizes.buckets import open_dimensions
from irongrad.step.train_step import TrainStep, sizes_of
from irongrad.targets import Target, parse_targets

STAGES = (
    "capture",
    "differentiate",
    "optimizer",
    "guards",
    "passes",
    "import",
    "assemble",
    "oracle",
    "compile",
    "package",
)


@dataclass(frozen=True)
class Options:
    """How to compile.

    Attributes:
        output: the artifact's directory.
        targets: the targets to compile for.
        asked: each target as the user wrote it.
        passes: the passes over the step graph, in order.
        tune: whether passes choose by measurement on the targets, not by cost tables.
        tune_seconds: the time in seconds that these measurements may take.
        route: how PyTorch's operators become linalg: `linalg` (directly) or `stablehlo`.
        bucket_bytes: the most bytes of a bucket of gradients that ranks exchange; 0 if the step runs on one rank alone.
        shard: whether ranks divide the optimizer's state among them.
        synchronised: which batch normalisations take the statistics of all ranks' batches.
        parts: the parts of the model that have a target of their own each; empty to compile the whole for each target.
        entry_points: the entry points to include; None for all. Fewer compile faster, and without `grad_step` no memory
            is reserved for accumulated gradients.
        base: the file of the frozen parameters and buffers; None to keep them in the artifact.
        dump_dir: the directory for every stage's readable form; None to dump nothing.
        stop_after: the last stage to run, a name in `STAGES`; None for all.
        cache: the cache for earlier and new results; None for no cache.
        disabled_module_passes: names of passes over IREE's module to leave out.
        on_stage: called with a stage's name; returns a context manager that is open while the stage runs.
        on_measuring: called before each measurement, with a description of the computation.
    """

    output: Path
    targets: tuple[Target, ...]
    asked: tuple[str, ...]
    passes: tuple[Pass, ...]
    tune: bool = False
    tune_seconds: int = 60
    route: str = "linalg"
    bucket_bytes: int = 0
    shard: bool = False
    synchronised: Synchronised = Synchronised.NONE
    parts: tuple[Part, ...] = ()
    entry_points: tuple[str, ...] | None = None
    base: Path | None = None
    dump_dir: Path | None = None
    stop_after: str | None = None
    cache: Store | None = None
    disabled_module_passes: tuple[str, ...] = ()
    on_stage: Callable[[str], AbstractContextManager[object]] = field(default=lambda name: nullcontext())
    on_measuring: Callable[[str], None] = field(default=lambda what: None)

    @property
    def module_cache(self) -> Store | None:
        """The cache of compiled modules; None if passes are dumped, because none would run on a cached module."""
        return self.cache if self.dump_dir is None else None

    @property
    def backends(self) -> list[str]:
        """IREE's name of each target's backend."""
        return [target.backend for target in self.targets]


def make_options(
    output: str | os.PathLike[str],
    target: str | Sequence[str] = "llvm-cpu",
    *,
    stop_after: str | None = None,
    on_stage: Callable[[str], AbstractContextManager[object]] | None = None,
    on_measuring: Callable[[str], None] = lambda what: None,
    **choices: Unpack[Choices],
) -> Options:
    """Check and convert what a caller gives.

    Raises:
        UserError: an unknown target, pass, route or stage; a budget that is not a size, or that no enabled pass
            enforces; a size of buckets that is none; or an output that cannot hold an artifact.
    """
    chosen = completed(choices)
    check_output(Path(output))
    if stop_after is not None and stop_after not in STAGES:
        raise UserError(f"there is no stage {stop_after!r}; the stages are {', '.join(STAGES)}")
    parts = parts_of(chosen["place"])
    _check_placed(parts, chosen)
    names = [part.asked for part in parts] or ([target] if isinstance(target, str) else list(target))
    disabled = tuple(name for name in chosen["disable_passes"] if name in module_passes())
    check_disabled(disabled)
    dump_dir, entry_points = chosen["dump_dir"], chosen["entry_points"]
    return Options(
        output=Path(output),
        targets=tuple(
            replace(t, disabled_passes=disabled) for t in ([p.target for p in parts] or parse_targets(names))
        ),
        asked=tuple(names),
        passes=passes_over_graph(chosen),
        disabled_module_passes=disabled,
        tune=chosen["tune"],
        tune_seconds=_tuning_seconds(chosen),
        route=chosen["route"],
        bucket_bytes=_bucket_bytes(chosen["bucket_size"]) if chosen["communicate"] else 0,
        shard=_is_sharded(chosen),
        synchronised=_synchronised(chosen),
        parts=parts,
        entry_points=tuple(entry_points) if entry_points is not None else None,
        base=base_path(chosen["base"]),
        dump_dir=Path(dump_dir) if dump_dir is not None else None,
        stop_after=stop_after,
        cache=default_store() if chosen["cache"] else None,
        on_stage=on_stage or (lambda name: nullcontext()),
        on_measuring=on_measuring,
    )


def _bucket_bytes(text: str) -> int:
    if text.strip().endswith("%") or (size := bytes_in(text, 0)) <= 0:
        raise UserError(f"bucket_size is {text!r}; it must be a size above zero, such as 25MiB")
    return size


def _check_placed(parts: Sequence[Part], chosen: Choices) -> None:
    refused = ("communicate", "max_memory", "base", "tune")
    if parts and (given := next((name for name in refused if chosen[name]), None)):  # type: ignore[literal-required]
        raise UserError(f"place does not work with {given}: leave one of them out")
    if parts and (looped := [name for name in chosen["entry_points"] or () if name in STACKED]):
        raise UserError(f"place does not work with {looped[0]}, which loops inside a module: leave it out")


def _tuning_seconds(chosen: Choices) -> int:
    if not chosen["tune"] and chosen["tune_seconds"] != declared()["tune_seconds"].default:
        raise UserError("tune_seconds says how long tune may measure: add tune")
    return chosen["tune_seconds"]


def _is_sharded(chosen: Choices) -> bool:
    if chosen["shard"] not in ("", "optimizer"):
        raise UserError(f"shard is {chosen['shard']!r}; only the state of the optimizer can be divided: give optimizer")
    if chosen["shard"] and not chosen["communicate"]:
        raise UserError("shard divides the optimizer's state among ranks that exchange gradients: add communicate")
    return bool(chosen["shard"])


def _synchronised(chosen: Choices) -> Synchronised:
    if chosen["sync_batch_norm"] and not chosen["communicate"]:
        raise UserError("sync_batch_norm exchanges the statistics of ranks that exchange gradients: add communicate")
    if not chosen["communicate"]:
        return Synchronised.NONE
    return Synchronised.ALL if chosen["sync_batch_norm"] else Synchronised.LAYERS


def passes_over_graph(choices: Choices) -> tuple[Pass, ...]:
    """The passes over the step graph that complete `choices` ask for, in order.

    Raises:
        UserError: an unknown pass or route, or a budget that is not a size, or that no enabled pass enforces.
    """
    disabled = [name for name in choices["disable_passes"] if name not in module_passes()]
    if unknown := [name for name in disabled if not is_known_pass(name)]:
        hint = suggestion(unknown[0], [*registered(), *module_passes()])
        raise UserError(
            f"there is no pass {unknown[0]!r}{hint}; the passes over the step graph are {', '.join(registered())}, and "
            f"those over IREE's module are {', '.join(module_passes())}"
        )
    route = known_route(choices["route"])
    return chosen_passes(choices["opt_level"], choices["passes"], disabled, choices["max_memory"], route)


def check_options(steps: Mapping[str, TrainStep], options: Options) -> None:
    """Refuse options that do not go with the steps.

    Raises:
        UserError: one of the steps does not allow them, or several steps together do not.
    """
    for one in steps.values():
        check_choices(one, options.passes, options.route)
        if options.parts:
            check_parts(options.parts, one)
    if options.parts and len(steps) > 1:
        raise UserError("place does not work with several steps over one state: compile each step by itself")
    check_budget(steps, options.passes)


def check_choices(step: TrainStep, passes: Sequence[Pass], route: str) -> None:
    """Refuse choices that this step does not allow.

    Raises:
        UserError: a memory budget for a step in pieces; or a budget or the StableHLO route for functions of any size.
    """
    budget = asked_budget(passes) is not None
    if budget and step.between:
        raise UserError("max_memory needs forward and backward in one piece, and this step has two: leave it out")
    named = open_dimensions(step.dynamic, step.bucket_list[0] if step.bucket_list else {})
    of_any_size = bool(named or step.bucket_fallback)
    names = ", ".join(sizes_of(step, step.inputs) if step.bucket_fallback else named)
    remedies = ["leave out bucket_fallback"] if step.bucket_fallback else []
    remedies += [f"give buckets for {', '.join(named)}"] if named else []
    remedy = " and ".join(remedies)
    if budget and of_any_size:
        raise UserError(f"max_memory needs known sizes, and functions of any size leave {names} open: {remedy}")
    if route == "stablehlo" and of_any_size:
        raise UserError(
            "the route over StableHLO needs known sizes, for torch-mlir refines every shape to numbers on the way, and "
            f"functions of any size leave {names} open: {remedy}, or take the route linalg"
        )

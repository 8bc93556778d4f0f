"""The session's entry points: their results, the calls that they refuse, and the state that they do not change."""

from __future__ import annotations

import os
import re
import shutil

import iree.runtime as ireert
import numpy as np
import pytest
import torch

from irongrad.runtime import Session, load
from irongrad.runtime.arguments import as_array
from irongrad.runtime.errors import ArtifactError, GuardError, UserError
from irongrad.runtime.status import reason as reason_of


def snapshot(session: Session) -> dict[str, np.ndarray]:
    return session.state()


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_train_steps_is_train_step_in_a_loop(session, batches):
    alone = [session.train_step(**b) for b in batches]
    after = snapshot(session)
    session.reset()
    stacked = {n: np.stack([b[n] for b in batches]) for n in batches[0]}
    losses = session.train_steps(**stacked)
    np.testing.assert_array_equal(losses, np.float32(alone))
    assert_same(snapshot(session), after)


def test_train_steps_takes_a_schedule(session, batches):
    rates = np.geomspace(1e-2, 1e-4, len(batches))
    alone = [session.train_step(**b, lr=lr) for b, lr in zip(batches, rates, strict=True)]
    session.reset()
    stacked = {n: np.stack([b[n] for b in batches]) for n in batches[0]}
    np.testing.assert_array_equal(session.train_steps(**stacked, lr=rates), np.float32(alone))


def test_grad_step_then_apply_step_is_train_step(session, batches):
    for batch in batches[:3]:
        session.train_step(**batch)
    expected = snapshot(session)
    session.reset()
    for batch in batches[:3]:
        session.grad_step(**batch)
        session.apply_step()
    for name, value in snapshot(session).items():
        np.testing.assert_allclose(value, expected[name], rtol=2e-6, atol=1e-8, err_msg=name)


def test_accumulators_hold_sums_and_can_be_set(session, batches):
    session.grad_step(**batches[0])
    first, count = session.gradients()
    assert count == 1
    session.grad_step(**batches[0])
    both, count = session.gradients()
    assert count == 2
    for name in first:
        np.testing.assert_array_equal(both[name], first[name] + first[name], err_msg=name)
    with pytest.raises(GuardError, match=r"every trained parameter needs a sum, and 0\.weight have none"):
        session.load_gradients({n: g for n, g in first.items() if n != "0.weight"}, 1)
    session.load_gradients(first, 1)
    session.apply_step()
    after = snapshot(session)
    zeroed, count = session.gradients()
    assert count == 0
    assert not any(g.any() for g in zeroed.values())
    session.reset()
    session.train_step(**batches[0])
    expected = snapshot(session)
    np.testing.assert_allclose(after["0.weight"], expected["0.weight"], rtol=1e-6)


def test_evaluation_changes_nothing(session, batches):
    before = snapshot(session)
    session.eval_step(**batches[0])
    session.predict(x=batches[0]["x"])
    assert_same(snapshot(session), before)


def test_reset_restores_the_loaded_state(mlp_artifact, batches, tmp_path):
    session = Session(mlp_artifact)
    start = snapshot(session)
    session.train_step(**batches[0])
    session.save(tmp_path / "one.safetensors")
    one = snapshot(session)
    session.reset()
    assert_same(snapshot(session), start)
    resumed = Session(mlp_artifact, checkpoint=tmp_path / "one.safetensors")
    assert_same(snapshot(resumed), one)
    resumed.train_step(**batches[1])
    resumed.reset()
    assert_same(snapshot(resumed), one)


def test_reset_needs_the_file_as_it_was(mlp_artifact, batches, tmp_path):
    path = tmp_path / "one.safetensors"
    session = Session(mlp_artifact)
    session.save(path)
    session.train_step(**batches[0])
    session.save(tmp_path / "two.safetensors")
    resumed = Session(mlp_artifact, checkpoint=path)
    one = snapshot(resumed)
    resumed.train_step(**batches[1])
    shutil.copy(path, tmp_path / "copy.safetensors")
    os.replace(tmp_path / "copy.safetensors", path)  # another file of this name
    resumed.reset()
    assert_same(snapshot(resumed), one)
    resumed = Session(mlp_artifact, checkpoint=path)
    resumed.train_step(**batches[1])
    trained = snapshot(resumed)
    path.write_bytes((tmp_path / "two.safetensors").read_bytes())
    with pytest.raises(ArtifactError, match="one.safetensors was written to since it was loaded"):
        resumed.reset()
    assert_same(snapshot(resumed), trained)


def test_dlpack_and_device_inputs_give_the_same_result(session, batches):
    batch = batches[0]
    expected = session.eval_step(**batch)
    assert session.eval_step(**{n: torch.from_numpy(a) for n, a in batch.items()}) == expected
    assert session.eval_step(**{n: session.to_device(a) for n, a in batch.items()}) == expected
    with pytest.raises(GuardError, match="DLPack"):
        session.eval_step(x=torch.from_numpy(batch["x"]).requires_grad_(), y=batch["y"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_tensor_that_numpy_cannot_read_is_copied(dtype):
    read = as_array(
        torch.tensor([[1.5, -0.0], [float("inf") if dtype is torch.bfloat16 else 448.0, 2**-6]], dtype=dtype)
    )
    assert read.dtype.name == str(dtype).removeprefix("torch.")
    assert read.astype(np.float32)[:, 1].tolist() == [0.0, 2**-6]
    assert np.signbit(read.astype(np.float32)[0, 1])


def test_arguments_of_the_wrong_kind_are_refused(session, mlp_artifact):
    calls = {
        "the directory of an artifact must be a path, not None": lambda: load(None),
        "a key in trusted must be a path, not 3": lambda: load(mlp_artifact, trusted=[3]),
        "checkpoint must be a path, not 3": lambda: load(mlp_artifact, checkpoint=3),
        "device must be the URI of a device, such as 'local-task', not 3": lambda: load(mlp_artifact, device=3),
        "a checkpoint must be a path, not b'state'": lambda: session.save(b"state"),
        "a checkpoint must be a path, not 4": lambda: session.restore(4),
        "a state must be a mapping of names to arrays, not 3": lambda: session.load_state(3),
        "the sums of gradients must be a mapping of names to arrays, not 3": lambda: session.load_gradients(3, 1),
    }
    for message, call in calls.items():
        with pytest.raises(UserError) as refused:
            call()
        assert str(refused.value) == message


def test_a_refused_call_says_so_in_one_line(session, batches):
    for given in ({}, {**batches[0], "z": 1}, {**batches[0], "x": batches[0]["x"][:3]}):
        with pytest.raises(GuardError, match="; expected eval_step") as refused:
            session.eval_step(**given)
        assert "\n" not in str(refused.value)


def test_non_contiguous_inputs_are_read_right(session, batches):
    x = np.asfortranarray(batches[0]["x"])
    assert session.predict(x=x).tolist() == session.predict(x=batches[0]["x"]).tolist()


@pytest.mark.parametrize("device", ["local-task", "local-sync"])
def test_no_call_writes_into_its_inputs(mlp_artifact, batches, device):
    """iree-org/iree#16168: a program that updates an argument may write into the caller's buffer."""
    session = Session(mlp_artifact, device=device)
    stacked = {n: np.stack([b[n] for b in batches]) for n in batches[0]}
    state = session.state()
    on_device = {n: session.to_device(a) for n, a in batches[0].items()}
    stacked_on_device = {n: session.to_device(a) for n, a in stacked.items()}
    state_on_device = {n: session.to_device(a) for n, a in state.items()}
    session.train_step(**on_device)
    session.train_steps(**stacked_on_device)
    session.grad_step(**on_device)
    sums, count = session.gradients()
    sums_on_device = {n: session.to_device(a) for n, a in sums.items()}
    session.load_gradients(sums_on_device, count)
    session.eval_step(**on_device)
    session.predict(x=on_device["x"])
    session.apply_step()
    session._invoke("import_state", list(state_on_device.values()))
    for _ in range(3):
        session.train_step(**on_device)
    for kept, given in (
        (batches[0], on_device),
        (stacked, stacked_on_device),
        (state, state_on_device),
        (sums, sums_on_device),
    ):
        for name in kept:
            np.testing.assert_array_equal(kept[name], given[name].to_host(), err_msg=name)


def test_exported_state_stays_as_it_was(session, batches):
    entry = session.manifest.entry_point("export_state")
    views = session._module.run(entry, ())
    arrays = [ireert.DeviceArray(session._module._device, v, implicit_host_transfer=True) for v in views]
    copies = [a.to_host().copy() for a in arrays]
    for batch in batches[:5]:
        session.train_step(**batch)
    for array, copy, spec in zip(arrays, copies, entry.outputs, strict=True):
        np.testing.assert_array_equal(array.to_host(), copy, err_msg=spec.name)


def test_state_that_is_read_in_place_stays_as_it_was(session, batches):
    session.train_step(**batches[0])
    before = session.state()
    kept = session.state(writable=False)
    for batch in batches[1:4]:
        session.train_step(**batch)
    session.load_state(session.initial_state())
    session.reset()
    assert kept.keys() == before.keys()
    for name, array in kept.items():
        assert array.dtype == before[name].dtype
        assert not array.flags.writeable
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    session.close()
    for name, array in kept.items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)


BAD_CALLS = {
    "shape": (lambda b: {**b, "x": b["x"][:3]}, "x shape dimension 0 mismatch; expected 6 but have 3"),
    "rank": (lambda b: {**b, "x": b["x"][0]}, "x shape rank mismatch; expected 2 but have 1"),
    "dtype": (
        lambda b: {**b, "x": b["x"].astype(np.float64)},
        r"x element type mismatch; expected f32 but have f64; convert it: x\.astype\('float32'\)",
    ),
    "integer dtype": (
        lambda b: {**b, "y": b["y"].astype(np.int32)},
        r"y element type mismatch; expected i64.*; convert it: y\.astype\('int64'\)",
    ),
    "class index": (lambda b: {**b, "y": b["y"] + 4}, r"y: every value must be in \[0, 3\]"),
    "missing": (lambda b: {"x": b["x"]}, "the input 'y' is missing; expected"),
    "misspelt": (lambda b: {"x": b["x"], "ys": b["y"]}, "'y' is missing, and there is no argument 'ys'; expected"),
    "extra": (lambda b: {**b, "z": b["x"]}, "takes no argument 'z'"),
    "no array": (lambda b: {**b, "x": "words"}, "_step: x: 'words' is no array of numbers"),
    "None": (lambda b: {**b, "x": None}, "'None' is no array of numbers"),
    "foreign bytes": (lambda b: {**b, "x": np.zeros(2, ">f4")}, r"is no array of numbers \(its dtype is >f4\)"),
    "hyperparameter": (lambda b: {**b, "lr": "fast"}, "lr must be a number, not 'fast'"),
    "several numbers": (lambda b: {**b, "lr": [1, 2]}, "lr must be a number"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
@pytest.mark.parametrize("entry", ["train_step", "grad_step", "eval_step"])
def test_a_bad_call_is_refused_and_changes_nothing(session, batches, case, entry):
    change, message = BAD_CALLS[case]
    before = snapshot(session)
    if entry != "train_step" and case in ("hyperparameter", "several numbers"):
        message = "takes no argument 'lr'"
    with pytest.raises(GuardError, match=re.compile(message)):
        getattr(session, entry)(**change(batches[0]))
    assert_same(snapshot(session), before)
    assert session.gradients()[1] == 0


def test_stacked_inputs_must_agree_and_be_valid_to_the_last(session, batches):
    stacked = {n: np.stack([b[n] for b in batches[:4]]) for n in batches[0]}
    before = snapshot(session)
    with pytest.raises(GuardError, match="y and x are stacked over different numbers of steps"):
        session.train_steps(x=stacked["x"], y=stacked["y"][:2])
    with pytest.raises(GuardError, match="lr and x are stacked"):
        session.train_steps(**stacked, lr=[0.1, 0.2])
    stacked["y"][3, 0] = 9
    with pytest.raises(GuardError, match="y: every value must be in"):
        session.train_steps(**stacked)
    assert_same(snapshot(session), before)
    assert session.train_steps(x=stacked["x"][:0], y=stacked["y"][:0]).shape == (0,)


def test_ignore_index_is_accepted(session, batches):
    y = batches[0]["y"].copy()
    y[:2] = -100
    assert np.isfinite(session.train_step(x=batches[0]["x"], y=y))


def test_apply_step_needs_gradients(session):
    with pytest.raises(GuardError, match="no gradients are accumulated; call grad_step first"):
        session.apply_step()


def test_strict_mode_refuses_nan(mlp_artifact, batches):
    strict = Session(mlp_artifact, strict=True)
    x = batches[0]["x"].copy()
    x[1, 2] = np.nan
    with pytest.raises(GuardError, match="x has 1 values that are NaN or infinite"):
        strict.train_step(x=x, y=batches[0]["y"])
    assert np.isnan(Session(mlp_artifact, on_nonfinite="ignore").train_step(x=x, y=batches[0]["y"]))


def test_an_unknown_entry_point_is_named(session):
    with pytest.raises(UserError, match="no entry point 'fit'; it has train_step"):
        session.call("fit", {})


def test_what_is_wrong_in_a_state_is_said_before_what_is_missing(session):
    for given, message in [
        ({"0.weigth": np.zeros(3)}, ": 0.weigth is unknown; 0.weight is missing"),
        ({"0.weight": np.zeros((1, 2), np.float32)}, r": 0.weight is float32\[1, 2\], the step has .*is missing"),
        ({"0.weight": session.state()["0.weight"]}, "is missing.*To replace some tensors alone, use update_state"),
    ]:
        with pytest.raises(ArtifactError, match=message):
            session.load_state(given)


def test_an_unknown_device_is_named(mlp_artifact):
    with pytest.raises(ArtifactError, match="the device 'cpu'; it has llvm-cpu for local-task or local-sync"):
        Session(mlp_artifact, device="cpu")


def test_hyperparameters_take_numpy_and_integers(session, batches):
    first = session.train_step(**batches[0], lr=np.float32(0.5))
    after = snapshot(session)
    session.reset()
    assert session.train_step(**batches[0], lr=0.5) == first
    assert_same(snapshot(session), after)
    session.train_step(**batches[0], lr=0)


def test_train_steps_names_the_bad_hyperparameter(session, batches):
    stacked = {n: np.stack([b[n] for b in batches[:2]]) for n in batches[0]}
    with pytest.raises(GuardError, match="lr must be a number, or one for each step, not 'fast'"):
        session.train_steps(**stacked, lr="fast")


NO_NUMBERS = {
    "None": None,
    "NaN": float("nan"),
    "infinite": float("inf"),
    "complex": 0.1j,
    "text": "0.1",
    "None among numbers": [0.1, None],
    "NaN among numbers": [0.1, np.nan],
    "masked": np.ma.array([0.1, 0.2], mask=[False, True]),
    "too large": 10**400,
    "ragged": [[0.1], [0.1, 0.2]],
}


@pytest.mark.parametrize("value", NO_NUMBERS.values(), ids=NO_NUMBERS)
@pytest.mark.parametrize("name", ["train_step", "train_steps"])
def test_a_hyperparameter_that_is_no_finite_number_is_refused_before_anything_runs(session, batches, name, value):
    many = name == "train_steps"
    arguments = {n: np.stack([b[n] for b in batches[:2]]) if many else batches[0][n] for n in batches[0]}
    before = snapshot(session)
    with pytest.raises(GuardError, match=f"^{name}: lr "):
        session.call(name, {**arguments, "lr": value})
    assert_same(snapshot(session), before)


def test_a_masked_array_is_no_input(session, batches):
    x = np.ma.array(batches[0]["x"], mask=batches[0]["x"] > 0)
    with pytest.raises(GuardError, match="its mask would be ignored"):
        session.predict(x=x)


def test_ragged_lists_are_no_input(session, batches):
    with pytest.raises(GuardError, match="a list cannot be read as an array"):
        session.predict(x=[[1.0], [1.0, 2.0]])


def test_a_closed_session_refuses_calls(mlp_artifact, batches):
    with Session(mlp_artifact) as session:
        session.train_step(**batches[0])
    session.close()
    for call in (
        session.state,
        session.reset,
        lambda: session.train_step(**batches[0]),
        lambda: session.to_device([1]),
    ):
        with pytest.raises(UserError, match="this session is closed"):
            call()


def stacked_batches(count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "x": rng.standard_normal((count, 6, 8)).astype(np.float32),
        "y": rng.integers(0, 4, (count, 6), dtype=np.int64),
    }


@pytest.mark.parametrize("on_device", [False, True])
def test_train_steps_in_chunks_is_train_steps(session, on_device):
    steps = stacked_batches(50)
    given = {n: session.to_device(a) for n, a in steps.items()} if on_device else steps
    rates = np.geomspace(1e-2, 1e-4, 50)
    losses = session.train_steps(**given, lr=rates)  # a session begins with chunks of 16 steps
    after = snapshot(session)
    session.reset()
    session._pace.steps = 1000
    np.testing.assert_array_equal(losses, session.train_steps(**given, lr=rates))
    assert_same(snapshot(session), after)


def test_a_refused_late_chunk_leaves_the_state(session):
    steps = stacked_batches(50)
    steps["y"][45, 2] = 4
    before = snapshot(session)
    with pytest.raises(GuardError, match="y "):
        session.train_steps(**steps)
    assert_same(snapshot(session), before)


def test_an_interrupt_leaves_the_state_after_a_whole_chunk(session, monkeypatch):
    steps, calls = stacked_batches(50), []
    call = session._module.call

    def interrupted(entry, values):
        if len(calls) == 1:
            raise KeyboardInterrupt
        calls.append(entry.name)
        return call(entry, values)

    monkeypatch.setattr(session._module, "call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.train_steps(**steps)
    monkeypatch.undo()
    after = snapshot(session)
    session.reset()
    session.train_steps(**{n: a[:16] for n, a in steps.items()})
    assert_same(snapshot(session), after)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "Error: FAILED_PRECONDITION; y: every value must be in [0, 3]; while invoking f; ",
            "y: every value must be in",
        ),
        ("Error: DATA_LOSS; while invoking native function hal.fence.await; while calling", "DATA_LOSS while invoking"),
    ],
)
def test_a_status_is_reported_by_its_message_or_else_by_its_name(text, reason):
    assert reason_of(RuntimeError(text)).startswith(reason)


@pytest.mark.parametrize("count", [-3, "1", 1.9, 2**70, None, True])
def test_a_count_of_gradients_that_is_none_is_refused(session, batches, count):
    session.grad_step(**batches[0])
    sums, _ = session.gradients()
    with pytest.raises(GuardError, match="the count must be a whole number of gradients"):
        session.load_gradients(sums, count)
    with pytest.raises(GuardError, match="other are no trained parameters"):
        session.load_gradients({**sums, "other": np.zeros(1)}, 1)

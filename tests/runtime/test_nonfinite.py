"""Losses and states that become NaN or infinite."""

from __future__ import annotations

import shutil
import warnings

import numpy as np
import pytest
import safetensors.numpy

from irongrad.runtime import Session
from irongrad.runtime.errors import NonFiniteError, UserError
from irongrad.runtime.nonfinite import NonFiniteWarning


@pytest.fixture
def bad(batches):
    """A batch whose loss is NaN."""
    x = batches[0]["x"].copy()
    x[1, 2] = np.nan
    return {"x": x, "y": batches[0]["y"]}


def test_a_loss_that_becomes_nan_is_reported_once(session, batches, bad):
    with pytest.warns(NonFiniteWarning, match="train_step: the loss is nan") as caught:
        assert np.isnan(session.train_step(**bad))
    assert caught[0].filename == __file__
    session.train_step(**bad)  # warnings are errors here
    session.reset()
    session.train_step(**batches[0])
    with pytest.warns(NonFiniteWarning):
        session.train_step(**bad)


def test_stop_raises_at_the_step(mlp_artifact, batches, bad):
    session = Session(mlp_artifact, on_nonfinite="stop")
    steps = {n: np.stack([batches[0][n]] * 3 + [bad[n]] + [batches[0][n]] * 3) for n in bad}
    with pytest.raises(NonFiniteError, match="train_steps: the loss of step 3 is nan"):
        session.train_steps(**steps)


def test_ignore_says_nothing(mlp_artifact, bad, tmp_path):
    session = Session(mlp_artifact, on_nonfinite="ignore")
    session.train_step(**bad)
    session.save(tmp_path / "state.safetensors")
    session.restore(tmp_path / "state.safetensors")


def test_an_unknown_policy_is_refused(mlp_artifact):
    with pytest.raises(UserError, match="must be 'warn', 'stop', 'ignore'"):
        Session(mlp_artifact, on_nonfinite="raise")


def test_the_last_finite_checkpoint_is_kept(session, batches, bad, tmp_path):
    path, kept = tmp_path / "state.safetensors", tmp_path / "state.safetensors.finite"
    session.train_step(**batches[0])
    session.save(path)
    finite = path.read_bytes()
    with pytest.warns(NonFiniteWarning):
        session.train_step(**bad)
    for _ in range(2):  # the second time the file that is replaced is not finite
        with pytest.warns(NonFiniteWarning, match=rf"the last finite checkpoint is .*{kept.name}"):
            session.save(path)
        assert kept.read_bytes() == finite
    with pytest.warns(NonFiniteWarning, match="that is how it is in"):
        session.restore(path)
    with pytest.warns(NonFiniteWarning, match="that is how it is in"):
        Session(session.directory, checkpoint=path)
    session.restore(kept)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.save(path)


def test_stop_writes_no_checkpoint(mlp_artifact, batches, bad, tmp_path):
    path = tmp_path / "state.safetensors"
    session = Session(mlp_artifact, on_nonfinite="stop")
    session.save(path)
    before = path.read_bytes()
    with pytest.raises(NonFiniteError):
        session.train_step(**bad)
    with pytest.raises(NonFiniteError, match="is not written"):
        session.save(path)
    assert path.read_bytes() == before


def test_a_file_from_elsewhere_is_looked_at_before_it_is_kept(session, bad, tmp_path):
    path, kept = tmp_path / "state.safetensors", tmp_path / "state.safetensors.finite"
    session.save(path)
    finite = path.read_bytes()
    with pytest.warns(NonFiniteWarning):
        session.train_step(**bad)
    with pytest.warns(NonFiniteWarning):
        session.save(path)
    safetensors.numpy.save_file(safetensors.numpy.load_file(path), path)  # drops our record
    with pytest.warns(NonFiniteWarning, match="the last finite checkpoint is"):
        session.save(path)
    assert kept.read_bytes() == finite


def test_a_state_is_saved_whatever_became_of_the_artifact(mlp_artifact, bad, tmp_path):
    copy = shutil.copytree(mlp_artifact, tmp_path / "copy")
    session = Session(copy)
    with pytest.warns(NonFiniteWarning):
        session.train_step(**bad)
    shutil.rmtree(copy)
    with pytest.warns(NonFiniteWarning, match="the state is NaN or infinite in"):
        session.save(tmp_path / "state.safetensors")
    assert (tmp_path / "state.safetensors").exists()

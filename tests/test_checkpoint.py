import contextlib
import resource
from functools import partial

import jax
import numpy as np
import pytest

from llamarl_jax.checkpoint import CheckpointConfig, Checkpointer, CheckpointMissingError

LARGE = 1 << 20


def _abstract(size):
    return {"x": jax.ShapeDtypeStruct((size,), np.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))}


@pytest.mark.parametrize("values", [{"every_steps": -1}, {"num_kept": 0}])
def test_numbers_out_of_range(values):
    numbers = {"every_steps": 0, "num_kept": 2, **values}
    expected = rf"every_steps = {numbers['every_steps']} must be 0 or more, checkpoint.num_kept = {numbers['num_kept']} at least 1"
    with pytest.raises(ValueError, match=expected):
        CheckpointConfig(**values)


def test_nothing_is_due_without_a_period(tmp_path):
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        assert not any(checkpointer.is_due(step) for step in range(5))
        assert checkpointer.latest_step() is None


def test_nothing_to_restore_names_the_folder(tmp_path):
    with (
        Checkpointer(tmp_path, CheckpointConfig()) as checkpointer,
        pytest.raises(CheckpointMissingError, match=rf"no checkpoint in {tmp_path}/checkpoints; start the run without resume, or name the"),
    ):
        checkpointer.restore(_abstract(3))


def test_only_the_newest_are_kept(tmp_path):
    with Checkpointer(tmp_path, CheckpointConfig(every_steps=1, num_kept=2)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"x": jax.numpy.full(3, step, np.float32)}, {"step": step})
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        restored = checkpointer.restore(_abstract(3))
    assert (restored.step, restored.state["x"].tolist(), restored.host) == (3, [3, 3, 3], {"step": 3})


@pytest.fixture
def no_large_files():
    """The system refuses to let a file grow beyond a size, as a full disk would."""

    @contextlib.contextmanager
    def refuse():
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGE, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return refuse


@pytest.mark.parametrize("raised_by", ["save", "close", "exit"])
def test_a_write_that_fails_in_the_background_is_raised_and_leaves_the_older_checkpoint(tmp_path, no_large_files, raised_by):
    values = np.random.default_rng(0).random(2 * LARGE).astype(np.float32)  # which no compression makes small
    state = {"x": jax.device_put(values)}
    with Checkpointer(tmp_path, CheckpointConfig(every_steps=1)) as checkpointer:
        checkpointer.save(1, state, {})
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(every_steps=1))

    def exit_only():
        with checkpointer:
            pass

    with no_large_files():
        checkpointer.save(2, state, {})
        with pytest.raises(ValueError, match="File too large"):
            {"save": partial(checkpointer.save, 3, state, {}), "close": checkpointer.close, "exit": exit_only}[raised_by]()
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        restored = checkpointer.restore(_abstract(len(values)))
    assert restored.step == 1
    np.testing.assert_array_equal(restored.state["x"], values)


def test_a_failed_write_does_not_hide_the_error_that_ended_the_run(tmp_path, no_large_files):
    state = {"x": jax.device_put(np.random.default_rng(0).random(2 * LARGE).astype(np.float32))}
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(every_steps=1))
    with no_large_files():
        checkpointer.save(1, state, {})
        with pytest.raises(KeyError, match="the trainer died") as caught, checkpointer:
            raise KeyError("the trainer died")
    assert "the last checkpoint was not written either" in caught.value.__notes__[0]
    assert "File too large" in caught.value.__notes__[0]

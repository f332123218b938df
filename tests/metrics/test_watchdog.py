import sys
import threading

import pytest

from llamarl_jax.metrics.watchdog import FILE_NAME, StallError, Watchdog


def _watchdog(tmp_path, clock, on_stall=lambda error: None, timeout_s=10.0):
    return Watchdog(timeout_s, on_stall, run_dir=tmp_path, clock=clock)


def test_any_executors_progress_counts(tmp_path):
    now_s = [0.0]
    watchdog = _watchdog(tmp_path, lambda: now_s[0])
    for name in ("trainer", "generator"):
        now_s[0] += 9
        assert watchdog.check() is None
        watchdog.beat(name)
    now_s[0] += 11
    error = watchdog.check()
    assert isinstance(error, StallError)
    assert "no executor made progress for 11 s (last progress: generator 11 s ago, trainer 20 s ago)" in str(error)


def test_stacks_of_all_threads_are_dumped(tmp_path, capsys):
    leave, entered = threading.Event(), threading.Event()

    def stuck_in_this_function():
        entered.set()
        leave.wait(30)

    thread = threading.Thread(target=stuck_in_this_function, name="the-stuck-one")
    thread.start()
    assert entered.wait(10)
    now_s = [0.0]
    watchdog = _watchdog(tmp_path, lambda: now_s[0])
    now_s[0] = 11.0
    error = watchdog.check()
    leave.set()
    thread.join()
    text = (tmp_path / FILE_NAME).read_text()
    assert "stuck_in_this_function" in text
    assert "the-stuck-one" in text
    assert str(tmp_path / FILE_NAME) in str(error)
    assert "stuck_in_this_function" in capsys.readouterr().err


def test_a_closed_stderr_does_not_hide_the_error(tmp_path, monkeypatch):
    class Closed:
        def write(self, text):
            raise ValueError("I/O operation on closed file")

    monkeypatch.setattr(sys, "stderr", Closed())
    now_s = [0.0]
    watchdog = _watchdog(tmp_path, lambda: now_s[0])
    now_s[0] = 11.0
    assert isinstance(watchdog.check(), StallError)


def test_the_thread_reports_a_stall_once(tmp_path):
    errors, called = [], threading.Event()

    def on_stall(error):
        errors.append(error)
        called.set()

    with Watchdog(0.02, on_stall, run_dir=tmp_path):
        assert called.wait(30)
    assert len(errors) == 1
    assert "last progress: none yet" in str(errors[0])


def test_a_run_that_ends_in_time_is_left_alone(tmp_path):
    errors = []
    with Watchdog(1000, errors.append, run_dir=tmp_path) as watchdog:
        watchdog.beat("trainer")
    assert not errors
    assert not (tmp_path / FILE_NAME).exists()
    assert "stall-watchdog" not in [thread.name for thread in threading.enumerate()]


def test_the_timeout_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match=r"the stall time-out is 0.* choose a positive number for watchdog.timeout_s"):
        Watchdog(0.0, lambda error: None, run_dir=tmp_path)

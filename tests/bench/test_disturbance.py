import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llamarl_jax.bench import disturbance
from llamarl_jax.bench.disturbance import ticks_to_share, undisturbed, watched

linux_only = pytest.mark.skipif(not Path("/proc/stat").is_file(), reason="only Linux tells")


def test_ticks_are_a_share_of_all_cores():
    cores, per_s = os.cpu_count(), os.sysconf("SC_CLK_TCK")
    assert cores is not None
    assert ticks_to_share(2 * cores + cores * per_s, 2.0) == pytest.approx(0.5)
    assert ticks_to_share(0, 2.0) == 0


@linux_only
def test_another_process_is_noticed_unless_it_is_ones_own():
    code = "print(1, flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        before = disturbance._own_ticks([other.pid])
        _, share = watched(lambda: time.sleep(2.0), [])
        assert disturbance._own_ticks([other.pid]) > before
        other.kill()
    assert share > 0


def _with_shares(monkeypatch, shares):
    """Makes the next runs as disturbed as the list says, and each return its number."""
    left = iter(enumerate(shares))
    monkeypatch.setattr(disturbance, "wait_until_quiet", lambda max_share: None)
    monkeypatch.setattr(disturbance, "watched", lambda run, pids: next(left))


def test_a_disturbed_run_is_repeated(monkeypatch):
    said = []
    _with_shares(monkeypatch, [0.4, 0.2, 0.01])
    assert undisturbed(lambda: None, [], 0.05, said.append) == (2, 0.01)
    assert said == [f"  other processes used {share}% of the cores meanwhile; once more" for share in (40, 20)]


def test_the_least_disturbed_run_counts_where_none_is_quiet(monkeypatch):
    _with_shares(monkeypatch, [0.4, 0.2, *[0.3] * 6])
    assert undisturbed(lambda: None, [], 0.05, lambda text: None) == (1, 0.2)

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from llamarl_jax.rewards.api import RewardConfig, RewardFunction, RewardInput, RewardTerm
from llamarl_jax.rewards.pool import Failure, RewardFailureError, RewardPool, RewardWorkerError
from tests.rewards import hostile

PATIENCE_S = 40


def _config(function: RewardFunction = hostile.by_text, **changes) -> RewardConfig:
    defaults = {"num_workers": 2, "timeout_s": 20.0, "max_failure_share": 1.0}
    return RewardConfig(terms=(RewardTerm(name="term", function=function),), **{**defaults, **changes})


def _samples(*texts: str) -> list[RewardInput]:
    return [RewardInput(prompt_text="", completion_text=text) for text in texts]


def _values(results) -> list[float | str]:
    return [result.kind if isinstance(result, Failure) else result["term"] for result in results]


def _children() -> set[int]:
    """Children of this process, zombies included."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait_until_gone(pids: list[int]) -> None:
    limit_s = time.monotonic() + PATIENCE_S
    while any(_is_running(pid) for pid in pids):
        assert time.monotonic() < limit_s, f"processes {pids} are still there"
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def _no_child_is_left():
    before = _children()
    yield
    assert _children() <= before


@pytest.fixture
def pool():
    with RewardPool(_config()) as shared:
        yield shared


def test_results_come_in_the_order_of_the_samples(pool):
    texts = ["x" * (i * 7 % 50) for i in range(200)]
    assert _values(pool.score(_samples(*texts))) == [len(text) for text in texts]
    assert pool.score([]) == []


def test_every_bad_answer_is_a_failure_and_its_neighbours_are_scored(pool):
    bad = {
        "exit": ("crash", "the worker ended with exit status 7"),
        "system exit": ("crash", "the worker ended with exit status 3"),
        "segfault": ("crash", "the worker was killed by SIGSEGV"),
        "raise": ("exception", "term: KeyError: 'no such column'"),
        "nan": ("bad value", "term returned nan"),
        "none": ("exception", "term: TypeError: "),
    }
    results = pool.score(_samples(*(text for name in bad for text in (name, "ok"))))
    assert _values(results[1::2]) == [2.0] * len(bad)
    for result, (kind, message) in zip(results[::2], bad.values(), strict=True):
        assert isinstance(result, Failure)
        assert result.kind == kind
        assert result.message.startswith(message)


@pytest.mark.parametrize("text", ["loop", "sleep", "hold the lock", "child"])
def test_an_answer_that_takes_too_long_is_killed_and_its_worker_replaced(text):
    with RewardPool(_config(timeout_s=0.3)) as pool:
        before = pool.worker_pids
        assert _values(pool.score(_samples(text, "ok", "fine", text, "good"))) == ["timeout", 2, 4, "timeout", 4]
        assert pool.failures == {"timeout": 2}
        assert len(set(before) - set(pool.worker_pids)) >= 1
        _wait_until_gone(list(set(before) - set(pool.worker_pids)))


def test_what_a_killed_function_started_is_killed_too():
    with RewardPool(_config(timeout_s=0.5, num_workers=1)) as pool:
        group = pool.worker_pids[0]
        assert _values(pool.score(_samples("child"))) == ["timeout"]
    members = [int(stat.parent.name) for stat in Path("/proc").glob("[0-9]*/stat") if _group_of(stat) == group]
    _wait_until_gone(members)


def _group_of(stat: Path) -> int:
    with contextlib.suppress(OSError):
        return int(stat.read_text().rpartition(")")[2].split()[2])
    return -1


def test_noise_on_the_standard_streams_disturbs_nothing(pool):
    assert _values(pool.score(_samples("print", "read", "ok"))) == [5.0, 0.0, 2.0]


def test_workers_import_neither_jax_nor_numpy(pool):
    assert _values(pool.score(_samples("jax", "numpy"))) == [0.0, 0.0]


def test_a_worker_that_died_between_two_calls_fails_no_innocent_sample():
    with RewardPool(_config(num_workers=1)) as pool:
        assert _values(pool.score(_samples("die later"))) == [9.0]
        os.waitid(os.P_PID, pool.worker_pids[0], os.WEXITED | os.WNOWAIT)
        assert _values(pool.score(_samples("ok"))) == [2.0]
        assert not pool.failures


def test_all_workers_work_at_the_same_time(tmp_path):
    """Each function waits for the other, so one worker alone would run into the deadline."""
    with RewardPool(_config(_Rendezvous(str(tmp_path)), timeout_s=PATIENCE_S)) as pool:
        assert _values(pool.score(_samples("a", "b"))) == [1.0, 1.0]


class _Rendezvous:
    """Not a plain dataclass on purpose: any picklable object will do."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, sample: RewardInput) -> float:
        (Path(self.folder) / sample.completion_text).touch()
        while not all((Path(self.folder) / name).exists() for name in "ab"):
            time.sleep(0.01)
        return 1.0


def test_starting_does_not_count_against_the_deadline_of_an_answer():
    with RewardPool(_config(hostile.SlowToStart(1.0), timeout_s=0.4)) as pool:
        assert _values(pool.score(_samples("a", "b", "c"))) == [1.0, 1.0, 1.0]


def test_functions_of_main_and_lambdas_travel_by_value():
    with RewardPool(_config(lambda sample: len(sample.completion_text) + 0.5)) as pool:
        assert _values(pool.score(_samples("ab"))) == [2.5]


@pytest.mark.parametrize("unguarded", ["", "import threading\n"])
def test_a_script_without_a_main_guard_and_with_its_own_function_works(tmp_path, unguarded):
    script = tmp_path / "script.py"
    script.write_text(
        unguarded
        + textwrap.dedent(
            """
            from llamarl_jax.rewards.api import RewardConfig, RewardInput, RewardTerm
            from llamarl_jax.rewards.pool import RewardPool

            print("top level")
            SCALE = 3.0

            def mine(sample: RewardInput) -> float:
                return SCALE * len(sample.completion_text)

            with RewardPool(RewardConfig(terms=(RewardTerm(name="mine", function=mine),))) as pool:
                print(pool.score([RewardInput(prompt_text="", completion_text="ab")]))
            """
        )
    )
    out = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert out.stdout.splitlines() == ["top level", "[{'mine': 6.0}]"]


def test_a_module_beside_the_script_is_found_and_files_that_shadow_the_library_are_not(tmp_path):
    (tmp_path / "pickle.py").write_text("raise RuntimeError('shadowed')")
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "my_rewards.py").write_text("def two(sample):\n    return 2.0\n")
    code = textwrap.dedent(
        """
        import sys
        sys.path.append("beside")
        import my_rewards
        from llamarl_jax.rewards.api import RewardConfig, RewardInput, RewardTerm
        from llamarl_jax.rewards.pool import RewardPool
        with RewardPool(RewardConfig(terms=(RewardTerm(name="two", function=my_rewards.two),))) as pool:
            print(pool.score([RewardInput(prompt_text="", completion_text="")]))
        """
    )
    out = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert out.stdout.strip() == "[{'two': 2.0}]"


def test_an_unpicklable_function_is_refused_with_its_name():
    lock = threading.Lock()
    with pytest.raises(ValueError, match=r"reward term 'term' cannot be sent to a worker process .*define its function at the top level"):
        RewardPool(_config(lambda sample: float(lock.locked())))


def test_a_term_that_a_worker_cannot_load_is_named():
    with pytest.raises(RewardWorkerError, match="reward term 'term' cannot be loaded in a worker process: ImportError: no such library"):
        RewardPool(_config(hostile.BrokenStart("no such library")))
    with pytest.raises(RewardWorkerError, match=r"ended while it was starting \(the worker ended with exit status 5\)"):
        RewardPool(_config(hostile.ExitsAtStart()))
    with pytest.raises(RewardWorkerError, match=r"did not start within rewards.start_timeout_s = 0.5 s"):
        RewardPool(_config(hostile.SlowToStart(600), start_timeout_s=0.5))


def test_a_sample_that_cannot_be_pickled_is_a_failure(pool):
    sample = RewardInput(prompt_text="", completion_text="", metadata={"lock": threading.Lock()})
    failure, fine = pool.score([sample, *_samples("ok")])
    assert isinstance(failure, Failure)
    assert "metadata cannot be pickled" in failure.message
    assert fine == {"term": 2.0}


def test_too_many_failures_end_the_run_with_their_reasons_and_few_do_not():
    with RewardPool(_config(max_failure_share=0.1, min_failures=3)) as pool:
        pool.score(_samples("raise", "raise"))  # all failed, but below the minimum
        pool.score(_samples(*["ok"] * 40))
        assert _values(pool.score(_samples("raise", "nan"))) == ["exception", "bad value"]  # 4 of 44 is within a tenth
        with pytest.raises(
            RewardFailureError,
            match=re.escape(
                "5 of 45 completions could not be scored (4 × exception, such as: term: KeyError: 'no such column'; 1 × bad value"
            ),
        ):
            pool.score(_samples("raise"))


def test_several_threads_may_score(pool):
    results: dict[int, list] = {}

    def work(number: int) -> None:
        results[number] = _values(pool.score(_samples(*["x" * number] * 30)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert results == {number: [float(number)] * 30 for number in range(4)}


def test_a_pool_outlives_the_thread_that_made_it():
    made: list[RewardPool] = []
    thread = threading.Thread(target=lambda: made.append(RewardPool(_config())))
    thread.start()
    thread.join(PATIENCE_S)
    with made[0] as pool:
        assert _values(pool.score(_samples("ok"))) == [2.0]


def test_closing_ends_a_call_under_way_and_leaves_no_process():
    pool = RewardPool(_config(timeout_s=600))
    errors: list[BaseException] = []

    def work() -> None:
        try:
            pool.score(_samples("sleep", "loop", "sleep"))
        except RewardWorkerError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    pids = pool.worker_pids
    while any(seat.doing != "scoring" for seat in pool._seats):
        time.sleep(0.01)
    pool.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert "closed while it was scoring" in str(errors[0]) or "is closed" in str(errors[0])
    assert not any(_is_running(pid) for pid in pids)
    pool.close()
    with pytest.raises(RewardWorkerError, match="the reward pool is closed"):
        pool.score(_samples("ok"))
    with pytest.raises(RewardWorkerError, match="the reward pool was closed while it was scoring"):
        pool._new_seat()


@pytest.mark.parametrize("text", ["ok", "sleep", "loop", "hold the lock"])
def test_workers_end_when_their_parent_is_killed(text):
    """Idle, asleep, busy, and busy without letting go of the interpreter lock."""
    code = textwrap.dedent(
        f"""
        import threading, time
        from llamarl_jax.rewards.api import RewardConfig, RewardInput, RewardTerm
        from llamarl_jax.rewards.pool import RewardPool
        from tests.rewards import hostile
        pool = RewardPool(RewardConfig(terms=(RewardTerm(name="t", function=hostile.by_text),), timeout_s=2.0))
        threading.Thread(target=pool.score, args=([RewardInput(prompt_text="", completion_text={text!r})],)).start()
        print(pool.worker_pids[0], flush=True)
        time.sleep(600)
        """
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.2)  # the sample is on its way; whether it has arrived does not matter for the assertion
        parent.send_signal(signal.SIGKILL)
    _wait_until_gone([pid])

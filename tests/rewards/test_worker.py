import io
import pickle

import cloudpickle

from llamarl_jax.rewards.api import RewardInput, RewardTerm
from llamarl_jax.rewards.worker import MAX_MESSAGE_CHARACTERS, READY, Setup, judge, serve
from tests.rewards import hostile

SAMPLE = RewardInput(prompt_text="", completion_text="abc")


def _terms(**functions) -> list[RewardTerm]:
    return [RewardTerm(name=name, function=function) for name, function in functions.items()]


def test_all_terms_are_judged_and_the_first_failure_speaks_for_the_sample():
    assert judge(_terms(a=hostile.length, b=lambda _: True), SAMPLE) == {"a": 3.0, "b": 1.0}
    assert judge(_terms(a=hostile.length, b=lambda _: 1 / 0), SAMPLE) == ("exception", "b: ZeroDivisionError: division by zero")
    assert judge(_terms(a=lambda _: float("inf"), b=hostile.length), SAMPLE) == ("bad value", "a returned inf")


def test_a_long_message_is_cut():
    def shout(_: RewardInput) -> float:
        raise ValueError("x" * 10**6)

    verdict = judge(_terms(a=shout), SAMPLE)
    assert isinstance(verdict, tuple)
    assert len(verdict[1]) == MAX_MESSAGE_CHARACTERS


def _serve(terms: list[RewardTerm], samples: list[RewardInput]) -> list:
    setup = Setup(terms=tuple((term.name, cloudpickle.dumps(term)) for term in terms), timeout_s=60)
    requests = io.BytesIO(b"".join(pickle.dumps(message) for message in (setup, *samples)))
    answers = io.BytesIO()
    serve(requests, answers)
    answers.seek(0)
    found = []
    while answers.tell() < len(answers.getvalue()):
        found.append(pickle.load(answers))
    return found


def test_the_protocol_is_ready_then_one_answer_each_until_the_input_ends():
    assert _serve(_terms(a=hostile.length), [SAMPLE, SAMPLE]) == [READY, {"a": 3.0}, {"a": 3.0}]


def test_a_worker_that_cannot_load_a_term_says_so_and_ends():
    answers = _serve(_terms(a=hostile.length, b=hostile.BrokenStart("no such library")), [SAMPLE])
    assert answers == ["reward term 'b' cannot be loaded in a worker process: ImportError: no such library"]

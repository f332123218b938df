import subprocess
import sys

import pytest

from llamarl_jax.data.reasoning_gym_tasks import ReasoningGymPrompts
from llamarl_jax.rewards.api import RewardConfig, RewardInput, RewardTerm
from llamarl_jax.rewards.pool import RewardPool
from llamarl_jax.rewards.reasoning import ReasoningGymScore

# One line; many lines; lines whose leading spaces carry meaning; a JSON answer.
TASKS = ["chain_sum", "countdown", "sudoku", "rotate_matrix", "futoshiki", "n_queens", "game_of_life", "tower_of_hanoi"]


def _sample(task: str, text: str | None = None) -> RewardInput:
    row = ReasoningGymPrompts(task=task, size=3, seed=11).open()[0]
    return RewardInput(
        prompt_text=row.question, completion_text=text or row.reference or "", reference=row.reference, metadata=row.metadata
    )


@pytest.mark.parametrize("task", TASKS)
def test_the_tasks_own_answer_earns_1_in_every_mode_also_behind_thinking_and_other_lines(task):
    sample = _sample(task)
    for text in (sample.completion_text, f"<think>first 5</think>So we have:\n{sample.completion_text}\n\n"):
        for credit in ("exact", "full", "partial"):
            assert ReasoningGymScore(credit=credit)(_sample(task, text)) == 1.0, (credit, text)


@pytest.mark.parametrize("task", ["chain_sum", "letter_jumble", "knights_knaves"])
def test_listing_candidates_earns_no_exact_credit(task):
    """Verifiers give part of a point, or even the whole of it, for such answers."""
    gold = _sample(task).completion_text
    for text in (f"{gold} or 7", f"1 2 3 4 5 6 7 8 9 {gold}", f"{gold}\n0", f"<think>{gold}"):
        assert ReasoningGymScore()(_sample(task, text)) == 0.0
    assert ReasoningGymScore(credit="partial")(_sample(task, f"{gold} or 7")) > 0.0


def test_partial_and_full_credit_differ_where_the_verifier_gives_part_of_a_point():
    gold = _sample("chain_sum").completion_text
    sample = _sample("chain_sum", f"The answer is {gold}")
    assert 0 < ReasoningGymScore(credit="partial")(sample) < 1
    assert ReasoningGymScore(credit="full")(sample) == 0.0


def test_a_task_without_an_answer_on_record_needs_its_verifier():
    sample = _sample("graph_color", "{}")
    assert sample.reference is None
    with pytest.raises(ValueError, match="reasoning-gym task 'graph_color' has no answer on record; use ReasoningGymScore"):
        ReasoningGymScore()(sample)
    assert ReasoningGymScore(credit="full")(sample) == 0.0


def test_another_source_is_refused():
    with pytest.raises(ValueError, match="prompt 'x' is no reasoning-gym item; use ReasoningGymPrompts"):
        ReasoningGymScore()(RewardInput(prompt_text="x", completion_text="1"))


def test_the_import_is_outside_the_deadline_and_absent_for_exact_credit():
    code = (
        "import sys\nfrom llamarl_jax.rewards.reasoning import ReasoningGymScore as R\nR().warm_up()\nprint('reasoning_gym' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
    terms = (RewardTerm(name="gym", function=ReasoningGymScore(credit="full")),)
    with RewardPool(RewardConfig(terms=terms, timeout_s=2.0)) as pool:  # importing takes longer than this on a busy machine
        assert pool.score([_sample("chain_sum"), _sample("chain_sum", "x")]) == [{"gym": 1.0}, {"gym": 0.0}]

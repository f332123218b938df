import pickle
import random
import subprocess
import sys

import pytest

from llamarl_jax.data.reasoning_gym_tasks import NUM_TRAINING_SEEDS, ReasoningGymPrompts
from llamarl_jax.data.sources import DataError, overlap


@pytest.mark.parametrize("task", ["chain_sum", "gcd", "simple_equations", "letter_counting"])
def test_items_are_repeatable_and_neighbouring_seeds_share_them(task):
    train = ReasoningGymPrompts(task=task, size=50, seed=1).open()
    assert [train[i].question for i in (3, 0, 3)] == [train[i].question for i in (3, 0, 3)]
    # The trap that the splits avoid: another seed is the same sequence, moved by one.
    neighbour = ReasoningGymPrompts(task=task, size=50, seed=2).open()
    assert [neighbour[i].question for i in range(49)] == [train[i + 1].question for i in range(49)]
    assert train[0].metadata["task"] == task
    assert train[0].metadata["entry"]["answer"] == train[0].reference
    assert pickle.loads(pickle.dumps(train[0])) == train[0]


def test_training_and_evaluation_seeds_are_disjoint(monkeypatch):
    """Every item's seed is in the range of its split, for the smallest and the largest permitted data sets."""
    made = []

    class Library:
        @staticmethod
        def create_dataset(task, *, size, seed):
            made.append(range(seed, seed + size))
            return made[-1]

    monkeypatch.setattr("llamarl_jax.data.reasoning_gym_tasks.import_reasoning_gym", lambda: Library)
    options = [(1, 0), (NUM_TRAINING_SEEDS, 0), (1, NUM_TRAINING_SEEDS - 1), (1000, 12345)]
    for size, seed in options:
        for split in ("train", "eval"):
            ReasoningGymPrompts(task="x", size=size, seed=seed, split=split).open()
    train, held_out = made[::2], made[1::2]
    assert max(seeds[-1] for seeds in train) < min(seeds[0] for seeds in held_out)
    assert [len(seeds) for seeds in held_out] == [size for size, _ in options]


def test_overlap_counts_what_disjoint_seeds_cannot_prevent():
    """A task with few questions repeats them by chance, a larger one does not."""

    def shared(options):
        train, held_out = (
            ReasoningGymPrompts(task="chain_sum", size=200, options=options, split=split).open() for split in ("train", "eval")
        )
        return overlap(train, held_out)

    one_digit = (("min_terms", 2), ("max_terms", 2), ("min_digits", 1), ("max_digits", 1))
    assert shared(one_digit) > 50
    assert shared((("min_terms", 4), ("max_terms", 6), ("min_digits", 4), ("max_digits", 4))) == 0


def test_a_task_without_an_answer_on_record_has_no_reference():
    row = ReasoningGymPrompts(task="graph_color", size=1).open()[0]
    assert row.reference is None
    assert row.metadata["entry"]["answer"] is None


def test_making_items_leaves_the_global_random_numbers_alone():
    source = ReasoningGymPrompts(task="chain_sum", size=3).open()
    state = random.getstate()
    assert source[0].question
    assert random.getstate() == state


def test_fingerprints_name_task_options_and_split():
    configs = [
        ReasoningGymPrompts(task="chain_sum"),
        ReasoningGymPrompts(task="chain_sum", split="eval"),
        ReasoningGymPrompts(task="chain_sum", options=(("max_terms", 5),)),
        ReasoningGymPrompts(task="gcd"),
    ]
    assert len({config.open().fingerprint for config in configs}) == len(configs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "no_such_task"}, "reasoning-gym task 'no_such_task' with options"),
        ({"task": "chain_sum", "options": (("wrong_option", 3),)}, "'wrong_option': 3"),
        ({"task": "chain_sum", "options": (("min_terms", -3),)}, "'min_terms': -3} cannot be made"),
        ({"task": "chain_sum", "size": 0}, "size = 0 must be at least 1"),
        ({"task": "chain_sum", "seed": -1}, "seed = -1 at least 0"),
        ({"task": "chain_sum", "seed": NUM_TRAINING_SEEDS}, "so that training and evaluation share no item"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(DataError, match=message):
        ReasoningGymPrompts(**options).open()


def test_importing_this_module_does_not_import_the_library():
    code = "import sys, llamarl_jax.data.reasoning_gym_tasks; print('reasoning_gym' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"

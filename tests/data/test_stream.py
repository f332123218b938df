import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl_jax.data.procedural import ArithmeticPrompts, DigitPrompts
from llamarl_jax.data.sources import Row, RowList
from llamarl_jax.data.stream import PromptsConfig, PromptStream
from llamarl_jax.data.templates import PlainTemplate
from tests.data.characters import CharacterTokenizer


def _stream(limit: int = 99, seed: int = 0, **options) -> PromptStream:
    source = options.pop("source", DigitPrompts(num_digits=1))
    config = PromptsConfig(source=source, template=PlainTemplate(text="{question}"), **options)
    return PromptStream(config, CharacterTokenizer(), max_prompt_tokens=limit, seed=seed)  # pyright: ignore[reportArgumentType]


def _questions(stream: PromptStream, positions: range) -> list[str]:
    return [prompt.text for p in positions if (prompt := stream.prompt_at(p)) is not None]


def test_one_integer_addresses_any_prompt_and_epochs_differ():
    stream, again = _stream(), _stream()
    n = len(stream)
    first, second = _questions(stream, range(n)), _questions(stream, range(n, 2 * n))
    assert sorted(first) == sorted(second)
    assert len(set(first)) == n
    assert first != second
    assert _questions(again, range(n, 2 * n)) == second  # no need to read the first epoch
    assert _questions(_stream(seed=1), range(n)) != first
    assert _questions(_stream(is_shuffled=False), range(n)) == _questions(_stream(is_shuffled=False), range(n, 2 * n))


@pytest.mark.parametrize(("limit", "expected"), [(3, 11), (4, 22), (40, 100)])
def test_prompts_over_the_limit_are_skipped_and_counted(limit, expected):
    """Lengths 3, 4 and 5: at the limit, one over, two over."""
    source = ArithmeticPrompts(min_operand=1, max_operand=20, operators="+", text="{a}+{b}", eval_share=0.01)
    stream = _stream(limit=limit, source=source)
    position, lengths = 0, []
    while position < len(stream):
        prompt, position = stream.next(position)
        lengths.append(len(prompt.token_ids))
    assert max(lengths) <= limit
    assert stream.num_skipped > 0 or limit == 40
    within = sum(len(stream.source[i].question) <= limit for i in range(len(stream)))
    assert len(lengths) - within in (0, 1)  # the last call may reach into the next epoch
    assert all(len(p.token_ids) <= limit for p in stream.first(50))


def _lengths(*lengths: int) -> RowList:
    """Rows whose prompts have these many tokens."""
    return RowList([Row(question="x" * length) for length in lengths], "")


def _stream_of(source: RowList, limit: int, **options) -> PromptStream:
    class Fixed:
        def open(self) -> RowList:
            return source

    return _stream(limit, source=Fixed(), **options)


@given(st.lists(st.sampled_from([9, 10, 11, 100]), min_size=1, max_size=8), st.integers(0, 30), st.integers(0, 5), st.booleans())
@settings(deadline=None, max_examples=60)
def test_the_next_prompt_is_the_first_one_within_the_limit(lengths, position, seed, is_shuffled):
    """Lengths at limit − 1, limit, + 1 and × 10; from the middle of an epoch, too, whose rest may hold no short prompt."""
    stream = _stream_of(_lengths(*lengths), 10, seed=seed, is_shuffled=is_shuffled)
    if min(lengths) > 10:
        with pytest.raises(ValueError, match=rf"no prompt from position {position} on is within engine.max_prompt_tokens = 10: the"):
            stream.next(position)
        assert stream.num_skipped == len(lengths)
        return
    prompt, behind = stream.next(position)
    assert (prompt.prompt_id, len(prompt.token_ids) <= 10) == (behind - 1, True)
    assert all(stream.prompt_at(p) is None for p in range(position, behind - 1))
    assert stream.num_skipped == behind - 1 - position


def test_an_epoch_without_a_short_prompt_names_limit_and_lengths():
    with pytest.raises(ValueError, match=r"engine.max_prompt_tokens = 1: the \d+ prompts have 2 to 2 tokens; raise the limit"):
        _stream(limit=1).next(0)
    with pytest.raises(ValueError, match="the 3 prompts have 5 to 70 tokens"):
        _stream_of(_lengths(5, 70, 6), 4).next(7)


def test_the_first_prompts_are_as_many_as_fit_the_limit_without_repeats():
    stream = _stream_of(_lengths(3, 50, 4, 50, 5, 50, 6), 10)
    assert sorted(len(p.token_ids) for p in stream.first(4)) == sorted(len(p.token_ids) for p in stream.first(99)) == [3, 4, 5, 6]
    assert [p.prompt_id for p in stream.first(2)] == [p.prompt_id for p in stream.first(99)][:2]
    assert stream.first(0) == []
    assert stream.num_skipped == 0


@given(st.integers(1, 4), st.integers(1, 6), st.booleans())
@settings(deadline=None, max_examples=15)
def test_shards_share_out_the_positions_of_one_stream(count, num_rows, is_shuffled):
    whole = _stream_of(_lengths(*range(1, num_rows + 1)), 99, is_shuffled=is_shuffled)
    end = 3 * num_rows * count
    expected = {p: len(prompt.token_ids) for p in range(end) if (prompt := whole.prompt_at(p)) is not None}
    seen: dict[int, int] = {}
    for index in range(count):
        shard, position = whole.shard(index, count), 0
        while True:
            prompt, position = shard.next(position)
            if prompt.prompt_id >= end:
                break
            assert prompt.prompt_id % count == index
            assert prompt.prompt_id not in seen
            seen[prompt.prompt_id] = len(prompt.token_ids)
    assert seen == expected


def test_a_shard_skips_and_counts_for_itself():
    whole = _stream_of(_lengths(1, 50, 2, 50), 10, is_shuffled=False)
    even, odd = whole.shard(0, 2), whole.shard(1, 2)
    assert even.next(1)[0].prompt_id == 2
    with pytest.raises(ValueError, match="no prompt from position 0 on"):  # its rows are those of odd index, in every epoch
        odd.next(0)
    assert (even.num_skipped, odd.num_skipped, whole.num_skipped) == (0, 4, 0)
    shuffled = _stream_of(_lengths(1, 50, 50, 50, 50), 10).shard(2, 3)
    assert all(len(shuffled.next(p)[0].token_ids) == 1 for p in range(0, 60, 7))  # if not in this epoch, then in a later one


def test_a_shard_that_does_not_exist():
    for index, count in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=rf"prompt shard {index} of {count} does not exist"):
            _stream().shard(index, count)


def test_a_prompt_carries_what_the_reward_needs():
    source = RowList([Row(question="q", reference="r", metadata={"level": 3})], "")
    prompt, behind = _stream_of(source, 10).next(5)
    assert (prompt.prompt_id, behind, prompt.text, prompt.reference, prompt.metadata) == (5, 6, "q", "r", {"level": 3})
    assert prompt.token_ids.dtype == np.int32

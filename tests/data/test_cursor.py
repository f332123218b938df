from llamarl_jax.data.cursor import PromptCursor
from llamarl_jax.data.procedural import DigitPrompts
from llamarl_jax.data.stream import PromptsConfig, PromptStream
from llamarl_jax.data.templates import PlainTemplate
from tests.data.characters import CharacterTokenizer


def _stream() -> PromptStream:
    config = PromptsConfig(source=DigitPrompts(num_digits=1), template=PlainTemplate())
    return PromptStream(config, CharacterTokenizer(), max_prompt_tokens=99, seed=0)  # pyright: ignore[reportArgumentType]


def test_a_resumed_cursor_neither_skips_nor_repeats():
    uninterrupted = PromptCursor(_stream())
    expected = [uninterrupted.draw(i).prompt_id for i in range(12)]
    cursor = PromptCursor(_stream())
    consumed = []
    for i in range(8):
        cursor.draw(i)
    for i in (0, 1, 2, 5):  # 3, 4, 6 and 7 are still being generated when the run is killed
        cursor.settle(i)
        consumed.append(expected[i])
    resumed = PromptCursor(_stream(), cursor.state())
    drawn = [resumed.draw(100 + i).prompt_id for i in range(8)]
    assert drawn == [expected[i] for i in (3, 4, 6, 7, 8, 9, 10, 11)]
    assert sorted(consumed + drawn) == sorted(expected)
    assert resumed.state() == {"next_position": 12, "outstanding": drawn}
    again = PromptCursor(_stream(), PromptCursor(_stream(), cursor.state()).state())
    assert again.draw(0).prompt_id == expected[3]


def test_skipped_prompts_are_counted_by_the_stream():
    config = PromptsConfig(source=DigitPrompts(num_digits=1), template=PlainTemplate())
    cursor = PromptCursor(PromptStream(config, CharacterTokenizer(), max_prompt_tokens=2, seed=0))  # pyright: ignore[reportArgumentType]
    cursor.draw(0)
    assert cursor.num_skipped == 0


def test_a_prompt_whose_group_goes_on_after_a_resume_is_held_and_not_drawn_again():
    before = PromptCursor(_stream(), {"next_position": 7, "outstanding": [3]})
    prompts = {index: before.draw(index) for index in (20, 21, 22)}
    assert [prompt.prompt_id for prompt in prompts.values()] == [3, 7, 8]
    kept = before.undrawn()
    assert kept == {"next_position": before.state()["next_position"], "outstanding": []}
    resumed = PromptCursor(_stream(), kept)
    assert resumed.hold(21, prompts[21].prompt_id).text == prompts[21].text
    assert resumed.state()["outstanding"] == [prompts[21].prompt_id]
    assert resumed.draw(23).prompt_id == before.draw(23).prompt_id
    resumed.settle(21)
    assert resumed.undrawn() == before.undrawn()

import numpy as np
import pytest

from llamarl_jax.data.cursor import PromptCursor
from llamarl_jax.data.procedural import ArithmeticPrompts, DigitPrompts
from llamarl_jax.data.sources import Row
from llamarl_jax.data.stream import PromptsConfig, PromptStream
from llamarl_jax.data.templates import ChatTemplate, PlainTemplate


class CharacterTokenizer:
    """One id per character; a chat is its messages joined with role marks."""

    def encode_plain(self, text: str) -> np.ndarray:
        return np.array([ord(c) for c in text], np.int32)

    def encode_chat(self, messages: list[dict[str, str]]) -> np.ndarray:
        return self.encode_plain("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")

    def decode(self, ids: np.ndarray, *, skips_special: bool = True) -> str:
        return "".join(map(chr, ids))


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
    source = ArithmeticPrompts(max_operand=9, operators="+", text="{a}+{b}")
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


def test_an_epoch_without_a_short_prompt_is_an_error():
    with pytest.raises(ValueError, match=r"all \d+ prompts are longer than engine.max_prompt_tokens = 1 \(the shortest has 2 tokens\)"):
        _stream(limit=1).next(0)


def test_chat_template_passes_messages_exactly():
    template = ChatTemplate(system="Be brief.", user="Q: {question}", examples=(("1+1", "2"),))
    text, ids = template.render(Row(question="2+3"), CharacterTokenizer())  # pyright: ignore[reportArgumentType]
    assert text == "<system>Be brief.<user>Q: 1+1<assistant>2<user>Q: 2+3<assistant>"
    assert "".join(map(chr, ids)) == text
    no_system, _ = ChatTemplate().render(Row(question="x"), CharacterTokenizer())  # pyright: ignore[reportArgumentType]
    assert no_system == "<user>x<assistant>"


def test_a_wrong_placeholder_is_named():
    with pytest.raises(ValueError, match=r"template.text = 'x \{queston\}' has the placeholders \['queston'\]"):
        PlainTemplate(text="x {queston}")
    with pytest.raises(ValueError, match=r"template.user = 'hello' has the placeholders \[\]"):
        ChatTemplate(user="hello")


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

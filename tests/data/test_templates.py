import pytest

from llamarl_jax.data.sources import Row
from llamarl_jax.data.templates import ChatTemplate, PlainTemplate, placeholders_in
from tests.data.characters import CharacterTokenizer


def test_chat_template_passes_messages_exactly():
    template = ChatTemplate(system="Be brief.", user="Q: {question}", examples=(("1+1", "2"),))
    text, ids = template.render(Row(question="2+3"), CharacterTokenizer())  # pyright: ignore[reportArgumentType]
    assert text == "<system>Be brief.<user>Q: 1+1<assistant>2<user>Q: 2+3<assistant>"
    assert "".join(map(chr, ids)) == text
    no_system, _ = ChatTemplate().render(Row(question="x"), CharacterTokenizer())  # pyright: ignore[reportArgumentType]
    assert no_system == "<user>x<assistant>"


def test_a_wrong_placeholder_is_named():
    with pytest.raises(ValueError, match=r"template.text = 'x \{questin\}' has the placeholders \['questin'\]"):
        PlainTemplate(text="x {questin}")
    with pytest.raises(ValueError, match=r"template.user = 'hello' has the placeholders \[\]"):
        ChatTemplate(user="hello")


def test_plain_examples_come_first_in_the_same_form():
    template = PlainTemplate(text="{question}=", examples=(("3+5", "8"), ("9-2", "7")))
    text, ids = template.render(Row(question="1+1"), CharacterTokenizer())  # pyright: ignore[reportArgumentType]
    assert text == "3+5=8\n9-2=7\n1+1="
    assert "".join(map(chr, ids)) == text


def test_braces_in_a_question_are_text():
    row = Row(question="{x} in \\frac{1}{2}")
    assert PlainTemplate(text="{{}} {question}").render(row, CharacterTokenizer())[0] == "{} {x} in \\frac{1}{2}"  # pyright: ignore[reportArgumentType]
    assert ChatTemplate().render(row, CharacterTokenizer())[0] == "<user>{x} in \\frac{1}{2}<assistant>"  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("text", ["{question} {", "{question", "} {question}"])
def test_braces_that_do_not_match(text):
    with pytest.raises(ValueError, match=r"template.text = .* has braces that do not match"):
        PlainTemplate(text=text)


def test_placeholders_inside_placeholders_are_found():
    assert placeholders_in("text", "{a:{width}} {b!r} {c.d} {} {{e}}") == {"a", "width", "b", "c.d", ""}

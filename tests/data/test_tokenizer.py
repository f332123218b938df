import json
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer

from llamarl_jax.data.tokenizer import Tokenizer

SPECIAL = ("<bos>", "<eos>", "<turn>")
WORDS = ("a", "b", "c", ":", "user", "system", "assistant")
TEMPLATE = (
    "<bos>{% for m in messages %}<turn>{{ m['role'] }}:{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant:{% endif %}"
)


def _write(folder, *, template: str | None = TEMPLATE, pattern="<bos> $A", extra_id=None):
    """A tokenizer whose tokens are the words above; `pattern` is what its post-processor puts around a text."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *WORDS])}
    if extra_id is not None:
        vocab["far"] = extra_id
    raw = RawTokenizer(models.WordLevel(vocab, unk_token="a"))
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # pyright: ignore[reportAttributeAccessIssue]
    raw.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    raw.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=pattern, special_tokens=[(token, i) for i, token in enumerate(SPECIAL)]
    )
    raw.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", "model_max_length": 100}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | ({"chat_template": template} if template else {})))
    return Tokenizer.from_folder(folder)


def test_chat_ids_are_exactly_the_templates(tmp_path):
    """One BOS, the template's own; the tokenizer would put another before it. No EOS behind the assistant's turn."""
    tokenizer = _write(tmp_path)
    messages = [{"role": "system", "content": "b"}, {"role": "user", "content": "a c"}]
    ids = tokenizer.encode_chat(messages)
    assert ids.dtype == np.int32
    assert ids.tolist() == [0, 2, 8, 6, 4, 1, 2, 7, 6, 3, 5, 1, 2, 9, 6]
    assert tokenizer.decode(ids, skips_special=False) == "<bos><turn>system:b<eos><turn>user:ac<eos><turn>assistant:"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("<bos> $A", [0, 3, 4]), ("<bos> $A <eos>", [0, 3, 4]), ("$A <eos>", [3, 4]), ("$A", [3, 4])],
)
def test_plain_text_gets_the_tokenizers_bos_and_never_an_eos(tmp_path, pattern, expected):
    """An EOS behind a prompt would tell the model that it is finished."""
    tokenizer = _write(tmp_path, pattern=pattern)
    assert tokenizer.encode_plain("a b").tolist() == expected
    assert tokenizer.encode_plain("a b").dtype == np.int32
    assert tokenizer.encode_plain("").tolist() == expected[:-2]


def test_a_bos_in_the_text_is_not_doubled(tmp_path):
    tokenizer = _write(tmp_path)
    assert tokenizer.encode_plain("<bos>a b").tolist() == [0, 3, 4]


def test_a_fragment_gets_nothing(tmp_path):
    tokenizer = _write(tmp_path)
    assert tokenizer.encode_fragment("a").tolist() == [3]
    assert tokenizer.encode_fragment("a<eos>").tolist() == [3, 1]


def test_decode_keeps_or_skips_special_tokens(tmp_path):
    tokenizer = _write(tmp_path)
    assert tokenizer.decode(np.array([0, 3, 1], np.int32)) == "a"
    assert tokenizer.decode([0, 3, 1], skips_special=False) == "<bos>a<eos>"


def test_known_ids(tmp_path):
    """The vocabulary may have holes; the largest id counts, not the number of tokens."""
    assert _write(tmp_path).num_tokens == 10
    tokenizer = _write(tmp_path, extra_id=20)
    assert tokenizer.num_tokens == 21
    assert tokenizer.eos_token_ids == (1,)


def test_without_a_chat_template(tmp_path):
    tokenizer = _write(tmp_path, template=None)
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match=f"tokenizer in {tmp_path} has no chat template; use PlainTemplate for this model"):
        tokenizer.encode_chat([{"role": "user", "content": "a"}])


def test_a_folder_without_a_tokenizer_or_with_a_damaged_one(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} has no tokenizer files; copy tokenizer.json and tokenizer_config.json of the model"):
        Tokenizer.from_folder(tmp_path)
    _write(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(ValueError, match=f"no tokenizer can be loaded from {tmp_path} "):
        Tokenizer.from_folder(tmp_path)


def test_loading_prints_nothing_and_needs_no_torch(tmp_path):
    _write(tmp_path)
    code = (
        "import sys; sys.modules['torch'] = None; "  # as where it is not installed
        "from pathlib import Path; from llamarl_jax.data.tokenizer import Tokenizer; "
        f"Tokenizer.from_folder(Path({str(tmp_path)!r})).encode_plain('a ' * 5000)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("", "")

import re

import pytest

from llamarl_jax.models.tiny import write_tiny_model
from llamarl_jax.policy import open_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return open_policy(str(folder))


def test_stop_texts_add_to_the_models_own_end(policy):
    own, newline = policy.config.eos_token_ids, policy.tokenizer.encode_fragment("\n")[0]
    assert policy.stop_ids([]) == own
    assert policy.stop_ids(["\n", "\n"]) == tuple(sorted([*own, newline]))


@pytest.mark.parametrize(("text", "num_tokens"), [("ab", 2), ("", 0)])
def test_a_stop_text_is_one_token(policy, text, num_tokens):
    message = f"engine.stop_texts has {text!r}, which is {num_tokens} tokens of {policy.folder.name}; each must be one token"
    with pytest.raises(ValueError, match=re.escape(message)):
        policy.stop_ids(["\n", text])

import numpy as np
import pytest

from llamarl_jax.data.tokenizer import Tokenizer
from llamarl_jax.models.safetensors_files import open_tensors
from llamarl_jax.models.tiny import CHARACTERS, SPECIAL_TOKENS, write_tiny_model
from tests.models.folders import load, logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_tiny_model(path, seed=3)
    return path


def test_a_seed_gives_the_same_bytes_and_another_seed_others(folder, tmp_path):
    for seed in (3, 4):
        (tmp_path / str(seed)).mkdir()
        write_tiny_model(tmp_path / str(seed), seed=seed)
    for file in folder.iterdir():
        assert (tmp_path / "3" / file.name).read_bytes() == file.read_bytes()
    first, second = open_tensors(folder), open_tensors(tmp_path / "4")
    assert any(not np.array_equal(tensor, second[name]) for name, tensor in first.items())


def test_it_loads_and_begins_near_the_uniform_distribution(folder):
    params, config = load(folder)
    values = logits(params, config, np.arange(40).reshape(2, 20) % config.vocab_size)
    assert np.isfinite(values).all()
    shifted = values - values.max(-1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    entropy = -(np.exp(log_probs) * log_probs).sum(-1)
    assert entropy.min() > 0.8 * np.log(config.vocab_size)
    assert values.std() > 0.05


def test_a_token_is_a_character(folder):
    tokenizer = Tokenizer.from_folder(folder)
    _, config = load(folder)
    assert tokenizer.num_tokens == config.vocab_size == len(SPECIAL_TOKENS) + len(CHARACTERS)
    ids = tokenizer.encode_plain(CHARACTERS)
    assert ids.tolist() == list(range(len(SPECIAL_TOKENS), config.vocab_size))
    assert tokenizer.decode(ids) == CHARACTERS
    assert tokenizer.eos_token_ids == config.eos_token_ids
    assert tokenizer.decode([*tokenizer.encode_plain("3+4"), *tokenizer.eos_token_ids]) == "3+4"
    assert tokenizer.encode_plain("Q").tolist() == [SPECIAL_TOKENS.index("<unk>")]

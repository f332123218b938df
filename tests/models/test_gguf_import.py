import json

import numpy as np
import pytest

from llamarl_jax.data.tokenizer import Tokenizer
from llamarl_jax.models.gguf_import import GgufError, convert_gguf, undo_permutation
from llamarl_jax.models.hf_config import from_hugging_face
from llamarl_jax.models.safetensors_files import open_tensors
from tests.models.folders import load
from tests.models.tiny_gguf import SPECIAL, byte_level_tokens, permute, weights, write_gguf


@pytest.fixture
def convert(tmp_path):
    def run(tensors=None, **options):
        folder = tmp_path / "model"
        folder.mkdir()
        write_gguf(tmp_path / "model.gguf", weights() if tensors is None else tensors, **options)
        convert_gguf(tmp_path / "model.gguf", folder)
        return folder

    return run


def test_weights_come_back_bit_for_bit(convert):
    """Query and key rows too, which the file holds in another order."""
    expected, found = weights(), open_tensors(convert())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name, strict=True)


def test_the_permutation_is_undone():
    """Written as numbers: head 0 has rows 0–3 and head 1 rows 4–7; llama.cpp interleaves the halves of each."""
    rows = np.arange(8.0)[:, None]
    assert permute(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    np.testing.assert_array_equal(undo_permutation(permute(rows, 2), 2), rows)
    other = np.arange(36.0).reshape(12, 3)
    np.testing.assert_array_equal(undo_permutation(permute(other, 2), 2), other)


def test_quantised_weights_are_dequantised_to_float32(convert):
    """Q4_1 has 16 levels between the extremes of 32 neighbours: off by at most half a level, and a little for its float16 scale."""
    expected, found = weights(), open_tensors(convert(is_quantised=True))
    for name, tensor in expected.items():
        assert found[name].dtype == np.float32
        if tensor.ndim == 1:
            np.testing.assert_array_equal(found[name], tensor)
            continue
        blocks = tensor.reshape(-1, 32)
        step = (blocks.max(1) - blocks.min(1)) / 15
        error = np.abs(found[name].reshape(-1, 32) - blocks).max(1)
        assert (error <= step / 2 + 0.01).all()
        assert error.max() > 0.01


def test_the_config_is_the_files_own(convert):
    folder = convert()
    config = from_hugging_face(folder)
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (64, 2, 4, 2, 16)
    assert (config.rope_theta, config.rms_norm_eps, config.max_position_embeddings) == (100000.0, 1e-5, 512)
    assert (config.eos_token_ids, config.bos_token_id, config.is_tied_embedding) == ((2,), 1, True)
    assert json.loads((folder / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    load(folder)


def test_a_head_of_its_own(convert):
    head = np.ones((len(byte_level_tokens()), 64), np.float32)
    folder = convert({**weights(), "lm_head.weight": head})
    assert not from_hugging_face(folder).is_tied_embedding
    np.testing.assert_array_equal(load(folder)[0]["lm_head"]["kernel"], head)


def test_the_tokenizer_is_rebuilt(convert):
    """BPE by the file's merges; digits apart, in spite of the merge of 1 and 2; special tokens whole; every byte has a token."""
    tokenizer, tokens = Tokenizer.from_folder(convert()), byte_level_tokens()
    ids = tokenizer.encode_plain("hello world 12<|im_end|>")
    assert [tokens[i] for i in ids] == ["hello", "Ġw", "o", "r", "l", "d", "Ġ", "1", "2", "<|im_end|>"]
    for text in ("hello  world\n\n", "ü 東京 \t x", " leading", "don't 3.14"):
        assert tokenizer.decode(tokenizer.encode_plain(text)) == text
    assert tokenizer.num_tokens == len(tokens)
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.decode([1, *tokenizer.encode_plain("hello"), 2]) == "hello"


def test_the_chat_template_is_the_files_own(convert):
    tokenizer = Tokenizer.from_folder(convert())
    ids = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert tokenizer.decode(ids, skips_special=False) == "<|im_start|>user\nhello<|im_end|>\n"
    assert (ids[0], SPECIAL[ids[0]]) == (1, "<|im_start|>")


def test_without_a_chat_template(convert):
    assert not Tokenizer.from_folder(convert(has_template=False)).has_chat_template


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba' is not supported; supported: llama"),
        ({"pre": "llama-bpe"}, "tokenizer 'gpt2' with pre-tokenizer 'llama-bpe' is not supported; supported: 'gpt2' with 'smollm'"),
        ({"extra_tensor": "rope_freqs.weight"}, "tensor 'rope_freqs.weight' is of no known kind; only plain llama models"),
        ({"extra_tensor": "blk.0.ffn_gate_exps.weight"}, "tensor 'blk.0.ffn_gate_exps.weight' is of no known kind"),
        ({"extra_tensor": "blk.0.attn_q.bias"}, "tensor 'blk.0.attn_q.bias' is of no known kind"),
        ({"rope_scaling": "yarn"}, "RoPE scaling 'yarn' is not supported; supported: none"),
        ({"integer_tensor": True}, "tensor 'output.weight' is stored as I8, which is not supported; use F32, F16, BF16 or Q8_0"),
        ({"without": "epsilon"}, "has no metadata 'llama.attention.layer_norm_rms_epsilon'; only complete llama models can be converted"),
    ],
)
def test_what_cannot_be_converted_is_refused(convert, options, message):
    with pytest.raises(GgufError, match=message):
        convert(**options)


@pytest.mark.parametrize("num_bytes", [0, 3, 500, 100_000])
def test_a_cut_off_file_is_refused(tmp_path, num_bytes):
    path = tmp_path / "model.gguf"
    write_gguf(path, weights())
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(GgufError, match=r"model.gguf is not a whole GGUF file \(.*\); download it again"):
        convert_gguf(path, tmp_path)

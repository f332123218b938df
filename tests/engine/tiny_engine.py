"""A small random transformer and its engine, for the tests of this folder and its neighbours."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.engine.api import DecodeState, PrefillRequest, Prefix, ResultTokens
from llamarl_jax.engine.engine import DecodeEngine, EngineConfig
from llamarl_jax.engine.sampling import SamplingConfig
from llamarl_jax.engine.slots import CompletionRequest, SlotScheduler
from llamarl_jax.kernels.implementations import Kernels
from llamarl_jax.losses.logprobs import token_logprobs
from llamarl_jax.meshes import build_mesh
from llamarl_jax.models.config import ModelConfig
from llamarl_jax.models.transformer import Params, TransformerSpec
from llamarl_jax.types import Completion, Prompt

CONFIG = ModelConfig(
    vocab_size=300,
    valid_vocab_size=290,
    hidden_size=48,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    max_position_embeddings=128,
    eos_token_ids=(7, 11),
)
STACKED = TransformerSpec.build(CONFIG, is_scanned=True)
LISTED = TransformerSpec.build(CONFIG, is_scanned=False)


def random_params(spec: TransformerSpec, seed: int = 0, scale: float = 6.0) -> Params:
    """Random weights, larger than at initialisation so that distributions are far from uniform."""
    mesh = build_mesh(jax.devices()[:1], {"data": 1, "fsdp": 1, "tensor": 1})
    return jax.tree_util.tree_map_with_path(lambda path, x: x if path[-1].key == "scale" else x * scale, spec.init(seed, mesh))


@jax.jit
def _full_forward(params: Params, ids: jax.Array, temperature: jax.Array) -> jax.Array:
    model, segments = STACKED.bind(params), jnp.ones_like(ids)
    hidden = model(ids, jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape), segments)
    return token_logprobs(model.logits(hidden), ids, segments, temperature)[0]


def trainer_logprobs(params: Params, prompt: Prompt, completion: Completion, temperature: float) -> np.ndarray:
    """The completion's log-probs by the training forward over the whole sequence (padded at the end, which a causal model cannot see)."""
    ids = np.concatenate([prompt.token_ids, completion.token_ids])
    padded = np.zeros((1, 48 if len(ids) <= 48 else 288), np.int32)
    padded[0, : len(ids)] = ids
    return np.asarray(_full_forward(params, padded, np.float32(temperature)))[0, len(prompt.token_ids) : len(ids)]


def unstack(params: Params) -> Params:
    """The decoding form of stacked weights, done the obvious way."""
    layers = {i: _fuse(jax.tree.map(lambda x, i=i: np.asarray(x[i]), params["layers"])) for i in range(CONFIG.num_layers)}
    return {**params, "layers": layers}


def _fuse(layer: Params) -> Params:
    """Row by row: query heads 2k and 2k + 1, key k, value k; a row of gate, a row of up (96 has no more than 32 blocks)."""
    attention, mlp = dict(layer["attention"]), dict(layer["mlp"])
    q, k, v = (attention.pop(name)["kernel"].reshape(-1, CONFIG.head_dim, CONFIG.hidden_size) for name in ("q_proj", "k_proj", "v_proj"))
    attention["qkv_proj"] = {"kernel": np.concatenate([q[0], q[1], k[0], v[0], q[2], q[3], k[1], v[1]])}
    gate, up = mlp.pop("gate_proj")["kernel"], mlp.pop("up_proj")["kernel"]
    mlp["gate_up_proj"] = {"kernel": np.array([row for pair in zip(gate, up, strict=True) for row in pair])}
    return {**layer, "attention": attention, "mlp": mlp}


def make_engine(
    *,
    data: int = 1,
    tensor: int = 1,
    first_device: int = 0,
    seed: int = 0,
    eos_token_ids: tuple[int, ...] = CONFIG.eos_token_ids,
    forced_kernels: Kernels | None = None,
    **options: Any,
) -> DecodeEngine:
    mesh = build_mesh(jax.devices()[first_device : first_device + data * tensor], {"data": data, "tensor": tensor})
    config = EngineConfig(**{"num_slots": 4, "max_prompt_tokens": 24, "max_new_tokens": 10, "decode_steps_per_call": 3, **options})
    spec = TransformerSpec.build(CONFIG, is_scanned=False, quantization=config.quantization)
    return DecodeEngine(spec, mesh, config, eos_token_ids=eos_token_ids, seed=seed, kernels=forced_kernels)


def place(engine: DecodeEngine, params: Params) -> Params:
    return jax.device_put(jax.device_get(params), engine.spec.shardings(engine.mesh))


def prefill_all(engine: DecodeEngine, params: Params, prompts: Sequence[np.ndarray]) -> list[Prefix]:
    prefixes: dict[int, Prefix] = {}
    for done in engine.prefill(params, [PrefillRequest(prompt, 0) for prompt in prompts]):
        prefixes |= done.prefixes
    return [prefixes[i] for i in range(len(prompts))]


def generate(engine: DecodeEngine, params: Params, state: DecodeState, **options: Any) -> tuple[DecodeState, ResultTokens]:
    state, pending = engine.generate(params, state, **options)
    return state, pending.to_host()


def make_prompts(lengths: Sequence[int], seed: int = 0) -> list[Prompt]:
    random = np.random.default_rng(seed)
    ids = [random.integers(0, CONFIG.valid_vocab_size, size=n).astype(np.int32) for n in lengths]
    return [Prompt(prompt_id=i, token_ids=x, text="") for i, x in enumerate(ids)]


def requests(
    prompts: Sequence[Prompt], group_size: int, *, max_new_tokens: int = 10, deadline_s: float | None = None, **sampling: Any
) -> list[CompletionRequest]:
    return [
        CompletionRequest(
            ticket=p.prompt_id * group_size + s,
            prompt=p,
            sample_index=s,
            sampling=SamplingConfig(**sampling),
            max_new_tokens=max_new_tokens,
            deadline_s=deadline_s,
        )
        for p in prompts
        for s in range(group_size)
    ]


def run_to_end(slots: SlotScheduler) -> dict[int, Completion]:
    finished: dict[int, Completion] = {}
    while not slots.is_idle:
        finished.update(slots.step())
    return finished

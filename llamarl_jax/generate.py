"""Answers one prompt from the shell, with the same decoder that training uses."""

from __future__ import annotations

from llamarl_jax.data.tokenizer import Tokenizer
from llamarl_jax.engine.engine import EngineConfig, prompt_bucket
from llamarl_jax.engine.sampling import SamplingConfig
from llamarl_jax.engine.slots import CompletionRequest
from llamarl_jax.evaluate import open_decoder
from llamarl_jax.meshes import PlacementConfig
from llamarl_jax.policy import open_policy
from llamarl_jax.types import Prompt


def generate_text(
    model: str,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    sampling: SamplingConfig | None = None,
    num_samples: int = 1,
    seed: int = 0,
    is_raw: bool = False,
) -> list[str]:
    """Returns the model's answers.

    Args:
        model: a name, Hub id or folder, as for `llamarl fetch`.
        prompt: the user's message, or with `is_raw` the text to continue.
        max_new_tokens: longest answer.
        sampling: None takes the likeliest token each time.
        num_samples: how many answers.

    Raises:
        ValueError: a number is out of range.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples is {num_samples}; it must be at least 1")
    sampling = sampling or SamplingConfig(temperature=0.0)
    policy = open_policy(model)
    ids = _encode(policy.tokenizer, prompt, is_raw)
    config = EngineConfig(
        num_slots=num_samples, slots_per_prompt=num_samples, max_prompt_tokens=prompt_bucket(len(ids)), max_new_tokens=max_new_tokens
    )
    slots = open_decoder(policy, PlacementConfig(kind="shared"), config, seed)
    task = Prompt(prompt_id=0, token_ids=ids, text=prompt)
    slots.submit(
        [
            CompletionRequest(ticket=i, prompt=task, sample_index=i, sampling=sampling, max_new_tokens=max_new_tokens)
            for i in range(num_samples)
        ]
    )
    finished = {}
    while not slots.is_idle:
        finished.update(slots.step())
    return [policy.tokenizer.decode(finished[i].token_ids) for i in range(num_samples)]


def _encode(tokenizer: Tokenizer, prompt: str, is_raw: bool):
    return tokenizer.encode_plain(prompt) if is_raw else tokenizer.encode_chat([{"role": "user", "content": prompt}])

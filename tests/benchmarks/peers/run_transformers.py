# pyright: reportMissingImports=false
"""Peer `transformers`: `model.generate` on PyTorch, CPU, float32, greedy, otherwise with its defaults."""

import time
from typing import Any

import torch
import transformers
from protocol import Run, num_cores, serve


class Clock(transformers.StoppingCriteria):
    """Notes when each token was there; stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def start(folder: str, _: list[str]) -> tuple[str, Run]:
    torch.set_num_threads(num_cores())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def run(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        ids, clock = torch.tensor(prompts), Clock()
        begin = time.perf_counter()
        with torch.inference_mode():
            result = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
                stopping_criteria=transformers.StoppingCriteriaList([clock]),
            )
        end = time.perf_counter()
        gaps = sorted(b - a for a, b in zip(clock.times, clock.times[1:], strict=False))
        return {
            "total_s": end - begin,
            "prefill_s": clock.times[0] - begin,
            "decode_steps": len(gaps),
            "step_s": gaps[len(gaps) // 2],
            "token_ids": result[:, len(prompts[0]) :].tolist(),
        }

    return f"{transformers.__version__} (torch {torch.__version__})", run


if __name__ == "__main__":
    serve(start)

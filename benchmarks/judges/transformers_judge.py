"""Greedy decoding with transformers on the CPU: what the NumPy backend is compared with."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Timed:
    """Output tokens of one call and the seconds it took."""

    token_ids: list[int]
    seconds: float


class TransformersModel:
    """One HF directory in float32, as `generate` runs it."""

    def __init__(self, directory: Path, num_threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(num_threads)
        self._torch: Any = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None  # min_new_tokens would forbid end tokens instead

    def generate(self, prompt: list[int], num_tokens: int) -> Timed:
        """Exactly `num_tokens` greedy tokens; end tokens do not stop it."""
        torch = self._torch
        with torch.inference_mode():
            start = time.perf_counter()
            output = self._model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                repetition_penalty=1.0,
                max_new_tokens=num_tokens,
                pad_token_id=0,
            )
            seconds = time.perf_counter() - start
        return Timed(output[0, len(prompt) :].tolist(), seconds)

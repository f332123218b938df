"""Text to token ids and back, by the tokenizer and chat template of a Hugging Face folder.

`transformers` is used for tokenizers only; it works without torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found": we do not want it


class Tokenizer:
    """The tokenizer of one model folder."""

    def __init__(self, tokenizer: Any, folder: Path) -> None:
        self._tokenizer = tokenizer
        self._folder = folder

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Loads a folder's tokenizer.

        Raises:
            ValueError: the folder has no tokenizer that transformers can load.
        """
        from transformers import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(str(folder), local_files_only=True), folder)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"no tokenizer can be loaded from {folder}: {error}; the folder needs tokenizer.json and tokenizer_config.json") from error

    @property
    def num_tokens(self) -> int:
        """Returns the largest id that the tokenizer knows, plus 1; ids beyond it are vocabulary padding."""
        return max(self._tokenizer.get_vocab().values()) + 1

    @property
    def has_chat_template(self) -> bool:
        """Tells whether `encode_chat` can be used."""
        return bool(self._tokenizer.chat_template)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> np.ndarray:
        """Returns int32 ids of a conversation, exactly as the chat template gives them, up to where the assistant begins to answer.

        Raises:
            ValueError: the folder has no chat template.
        """
        if not self.has_chat_template:
            raise ValueError(f"the tokenizer in {self._folder} has no chat template; use PlainTemplate for this model")
        ids = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True, return_dict=False)
        return np.asarray(ids, np.int32)

    def encode_plain(self, text: str) -> np.ndarray:
        """Returns int32 ids of a text, with the special tokens that the tokenizer itself adds and no others."""
        return np.asarray(self._tokenizer(text)["input_ids"], np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray, *, skips_special: bool = True) -> str:
        """Returns the text of ids."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=skips_special, clean_up_tokenization_spaces=False)

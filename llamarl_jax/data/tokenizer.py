"""Text to token ids and back, by the tokenizer and chat template of a Hugging Face folder.

`transformers` is used for tokenizers only; it works without torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Read when transformers is imported: no remarks that PyTorch was not found or that a text is longer than the model's context.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


class Tokenizer:
    """The tokenizer of one model folder."""

    def __init__(self, tokenizer: Any, folder: Path) -> None:
        self._tokenizer = tokenizer
        self._folder = folder
        begin = tokenizer("")["input_ids"][:1]  # what the tokenizer puts before a text; an EOS behind it is never wanted in a prompt
        self._prefix = begin if begin and begin[0] == tokenizer.bos_token_id else []

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Loads a folder's tokenizer.

        Raises:
            ValueError: the folder has no tokenizer that transformers can load.
        """
        from transformers import AutoTokenizer

        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            raise ValueError(f"{folder} has no tokenizer files; copy tokenizer.json and tokenizer_config.json of the model into it")
        try:
            return cls(AutoTokenizer.from_pretrained(str(folder), local_files_only=True), folder)
        except Exception as error:  # the library's parsers raise bare Exception
            raise ValueError(
                f"no tokenizer can be loaded from {folder} ({type(error).__name__}: {error}); the folder needs whole tokenizer.json and "
                "tokenizer_config.json files"
            ) from error

    @property
    def num_tokens(self) -> int:
        """Returns the largest id that the tokenizer knows, plus 1; ids beyond it are vocabulary padding."""
        return max(self._tokenizer.get_vocab().values()) + 1

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Returns the tokenizer's own end of text; the model's configs may name more (`ModelConfig.eos_token_ids`)."""
        eos = self._tokenizer.eos_token_id
        return () if eos is None else (eos,)

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
        """Returns int32 ids of a prompt: behind a BOS where the tokenizer puts one, unless the text begins with it; never with an EOS."""
        ids = self.encode_fragment(text)
        has_bos = ids[:1].tolist() == self._prefix
        return ids if has_bos or not self._prefix else np.concatenate([np.asarray(self._prefix, np.int32), ids])

    def encode_fragment(self, text: str) -> np.ndarray:
        """Returns int32 ids of a text with no special tokens but those written in it."""
        return np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray, *, skips_special: bool = True) -> str:
        """Returns the text of ids."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=skips_special, clean_up_tokenization_spaces=False)

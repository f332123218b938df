"""A tokenizer of one id per character; a chat is its messages joined with role marks."""

import numpy as np


class CharacterTokenizer:
    def encode_plain(self, text: str) -> np.ndarray:
        return np.array([ord(c) for c in text], np.int32)

    def encode_chat(self, messages: list[dict[str, str]]) -> np.ndarray:
        return self.encode_plain("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")

    def decode(self, ids: np.ndarray, *, skips_special: bool = True) -> str:
        return "".join(map(chr, ids))

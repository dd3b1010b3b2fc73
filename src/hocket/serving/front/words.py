"""Words: text to token ids and back, for many requests at once.

The tokenizer of the model, as its JSON text, in an instance of its own whose settings never
change: threads may share it. Never imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class TokenizerFace:
    """A face over the `tokenizers` library.

    Args:
        json: the tokenizer's own file, as text.

    Attributes:
        vocab_size: one more than the largest id.
    """

    def __init__(self, json: str) -> None:
        from tokenizers import Tokenizer as Backend

        self._backend: Any = Backend.from_str(json)
        self._backend.no_truncation()
        self._backend.no_padding()
        # Special tokens written in a prompt are meant: chat templates write them.
        self._backend.encode_special_tokens = False
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        added = self._backend.get_added_tokens_decoder()
        self._added = {number: token.content for number, token in added.items()}
        decoder = "" if self._backend.decoder is None else repr(self._backend.decoder)
        self._byte_level = "ByteLevel" in decoder
        self._byte_fallback = "ByteFallback" in decoder
        self._known: dict[int, bytes] = {}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a text, in C and without the interpreter's lock.

        `special`: with those tokens around it that the tokenizer adds by itself, such as a begin
        token; chat templates have written theirs already.
        """
        return list(self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, without special tokens."""
        return str(self._backend.decode(ids, skip_special_tokens=True))

    def decode_all(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens written out."""
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for inside a text; empty for an id of no token."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._bytes(token)
        return found

    def token_text(self, token: int) -> str:
        """The text of one token; a replacement character where its bytes are none by themselves."""
        return self.token_bytes(token).decode(errors="replace")

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return str(self._added[token]).encode()
        text = self._backend.id_to_token(token) if 0 <= token < self.vocab_size else None
        if text is None:
            return b""
        if self._byte_level:
            with_bytes = [_BYTES.get(character) for character in text]
            if None not in with_bytes:
                return bytes(b for b in with_bytes if b is not None)
            return str(text).encode()
        if self._byte_fallback and (byte := _BYTE.match(text)):
            return bytes([int(byte[1], 16)])
        return str(text).replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


def _byte_characters() -> dict[str, int]:
    """The printable character that byte-level tokenizers write for each byte, to its byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(other)}


_BYTES = _byte_characters()

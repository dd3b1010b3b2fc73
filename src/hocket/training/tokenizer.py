"""Tokenizer: text to token ids and back, from a model directory, from bytes, or trained here.

A thin face over the `tokenizers` library: byte-level, so that decoding gives back the text it was
encoded from. Never imports torch.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hocket.spec.errors import DataError, ModelError, OptionError
from hocket.spec.files import read_object
from hocket.training.pieces import Sample, piece_groups, pieces_of
from hocket.training.tokenizer_files import (
    FILE,
    SOURCES,
    converted,
    eos_of,
    has_tokenizer,
)

EOS = "<|endoftext|>"
"""End-of-document token of the tokenizers made here."""

_TOKENIZER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
Ids = npt.NDArray[np.uint32]
Places = npt.NDArray[np.int64]


MOST_IDS = 2**24
"""Token ids are below it: 60 times the largest vocabulary of the catalogue."""


class Tokenizer:
    """Text to ids and back.

    Attributes:
        vocab_size: one more than the largest id.
        eos_id: the token that ends a document; None if the tokenizer has none.
        kind: `model`, `bytes` or `trained`.
    """

    def __init__(
        self, backend: Any, *, eos: str | None, kind: str, directory: Path | None = None
    ) -> None:
        self._backend = backend
        self._directory = directory
        self.kind = kind
        self.eos = eos
        self.eos_id: int | None = None if eos is None else backend.token_to_id(eos)
        ids = backend.get_vocab(with_added_tokens=True).values()
        self.vocab_size: int = max(ids, default=-1) + 1
        if not 1 <= self.vocab_size <= MOST_IDS:
            # The library's own writer allocates a place for each id up to the largest.
            raise ValueError(
                f"it has {len(ids)} tokens with ids up to {self.vocab_size - 1}; they are at least "
                f"one, and below {MOST_IDS:,}"
            )
        # A document that happens to hold the text of a special token must not end early.
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()

    # --- text to ids -----------------------------------------------------------------------

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of one text. `special`: special tokens written in the text and those that the
        tokenizer adds by itself (such as a begin token) become ids, as a prompt wants it.
        """
        self._backend.encode_special_tokens = not special
        try:
            return list(self._backend.encode(text, add_special_tokens=special).ids)
        finally:
            self._backend.encode_special_tokens = True

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of many documents, without special tokens. Runs on all cores."""
        if self.kind == "bytes":
            return [np.frombuffer(t.encode(), np.uint8).astype(np.uint32) for t in texts]
        # One very long text would be encoded by one core: where the tokens do not depend on what
        # a text begins with, it is cut at line ends. Encodings hold a hundred bytes a token, so
        # that only some million characters are under way at once.
        pieces: list[tuple[int, str]] = []
        for number, text in enumerate(texts):
            pieces += [(number, p) for p in (pieces_of(text) if self._divisible else [text])]
        found: list[list[Ids]] = [[] for _ in texts]
        for together in piece_groups(pieces):
            encoded = self._backend.encode_batch_fast(
                [piece for _, piece in together], add_special_tokens=False
            )
            for (number, _), each in zip(together, encoded, strict=True):
                found[number].append(np.array(each.ids, np.uint32))
        return [ids[0] if len(ids) == 1 else np.concatenate(ids) for ids in found]

    def encode_placed(self, texts: Sequence[str]) -> list[tuple[Ids, Places]]:
        """Ids of many texts in which special tokens are written, and for each token the first
        character it stands for and the one after its last, [tokens, 2]. None are added."""
        self._backend.encode_special_tokens = False
        try:
            encoded = self._backend.encode_batch(list(texts), add_special_tokens=False)
        finally:
            self._backend.encode_special_tokens = True
        return [
            (np.array(each.ids, np.uint32), np.array(each.offsets, np.int64).reshape(-1, 2))
            for each in encoded
        ]

    def begin_ids(self) -> list[int]:
        """What the tokenizer itself puts before a prompt, such as a begin token."""
        whole, bare = self.encode("a", special=True), self.encode("a")
        for at in range(len(whole) - len(bare) + 1):
            if whole[at : at + len(bare)] == bare:
                return whole[:at]
        return []

    @property
    def directory(self) -> Path | None:
        """Where it was read from; None of one that was made here."""
        return self._directory

    def decode(self, ids: Sequence[int] | Ids, *, special: bool = False) -> str:
        """The text of some ids; special tokens are shown only if asked for."""
        return str(self._backend.decode([int(i) for i in ids], skip_special_tokens=not special))

    @property
    def _divisible(self) -> bool:
        """Whether encoding two halves of a text gives the same text back when joined."""
        return (
            self._backend.normalizer is None and "ByteLevel" in type(self._backend.decoder).__name__
        )

    # --- files -----------------------------------------------------------------------------

    @property
    def hash(self) -> str:
        """SHA-256 of the tokenizer's own file, the first 16 digits."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The text of the tokenizer's own file."""
        self._backend.encode_special_tokens = False
        try:
            return str(self._backend.to_str())
        finally:
            self._backend.encode_special_tokens = True

    def save(self, to: Path | str) -> None:
        """Write tokenizer.json and tokenizer_config.json, so that AutoTokenizer loads it."""
        to = Path(to)
        to.mkdir(parents=True, exist_ok=True)
        for name in _TOKENIZER_FILES:
            if self._directory is not None and (self._directory / name).is_file():
                shutil.copyfile(self._directory / name, to / name)
        self._backend.save(str(to / FILE))
        settings = "tokenizer_config.json"
        if self._directory is None or not (self._directory / settings).is_file():
            (to / settings).write_text(
                json.dumps(
                    {
                        "tokenizer_class": "PreTrainedTokenizerFast",
                        "clean_up_tokenization_spaces": False,
                        **({} if self.eos is None else {"eos_token": self.eos}),
                        "hocket_kind": self.kind,
                    },
                    indent=1,
                )
            )

    @classmethod
    def load(cls, directory: Path | str, *, trust_remote_code: bool = False) -> Tokenizer:
        """The tokenizer of a directory: a model's, or one that `save` wrote.

        Raises:
            ModelError: the directory holds none, or one that cannot be read.
        """
        from tokenizers import Tokenizer as Backend

        directory = Path(directory)
        if not has_tokenizer(directory):
            raise ModelError(
                f"{directory} holds no tokenizer (none of {', '.join(SOURCES)})",
                hint="--tokenizer bytes, --tokenizer train, or a directory that has one",
            )
        settings = read_object(directory / "tokenizer_config.json")
        try:
            if (directory / FILE).is_file():
                backend = Backend.from_file(str(directory / FILE))
            else:
                backend = converted(directory, trust_remote_code)
            return cls(
                backend,
                eos=eos_of(directory, settings, backend),
                kind=str(settings.get("hocket_kind", "model")),
                directory=directory,
            )
        except Exception as error:
            hint = None
            if "trust_remote_code" in str(error):
                hint = "read its code first, then add --trust-remote-code"
            raise ModelError(
                f"the tokenizer in {directory} cannot be read: {error}", hint=hint
            ) from error


# --- making one ----------------------------------------------------------------------------


def resolve_tokenizer(
    choice: str | None,
    *,
    model_dir: Path | str | None = None,
    texts: Callable[[], Iterable[str]] | None = None,
    vocab_size: int = 4096,
    trust_remote_code: bool = False,
) -> Tokenizer:
    """The tokenizer that `--tokenizer` names.

    Args:
        choice: `bytes`, `train`, `model` (the model directory's own), a directory, or None: the
            model directory's if it has one, else bytes.
        model_dir: the model directory, if the model is one.
        texts: gives the documents that `train` learns from.
        vocab_size: of a trained tokenizer, its end token included.

    Raises:
        OptionError: `choice` is none of these.
        ModelError: a directory without a readable tokenizer.
        DataError: `train` found no text.
    """
    if choice is None:
        choice = "model" if model_dir is not None and has_tokenizer(model_dir) else "bytes"
    if choice == "bytes":
        return byte_tokenizer()
    if choice == "train":
        assert texts is not None, "training a tokenizer needs documents"
        return train_tokenizer(texts(), vocab_size)
    if choice == "model":
        if model_dir is None:
            raise OptionError(
                "--tokenizer model: the model is a bare configuration without a tokenizer",
                hint="--tokenizer bytes, or --tokenizer train",
            )
        return Tokenizer.load(model_dir, trust_remote_code=trust_remote_code)
    if not Path(choice).is_dir():
        raise OptionError(
            f"--tokenizer {choice!r} is neither a directory nor one of bytes, model, train",
            hint="--tokenizer bytes",
        )
    return Tokenizer.load(choice, trust_remote_code=trust_remote_code)


def byte_tokenizer() -> Tokenizer:
    """256 byte tokens, id = byte, and an end token: 257 ids."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE(vocab=_byte_characters(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
    return Tokenizer(backend, eos=EOS, kind="bytes")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level byte-pair tokenizer (Sennrich et al. 2016; bytes as in GPT-2) learned here.

    Learns from about the first four million characters. Its end token has the last id.

    Raises:
        OptionError: a vocabulary too small for 256 bytes, an end token and one merge.
        DataError: no text at all.
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    if vocab_size < 258:
        raise OptionError(
            f"vocab_size is {vocab_size}; a trained tokenizer needs 256 bytes, an end token and "
            "at least one merge",
            hint="--vocab-size 4096, or --tokenizer bytes",
        )
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    sample = Sample(texts)
    backend.train_from_iterator(
        sample,
        trainers.BpeTrainer(
            vocab_size=vocab_size - 1,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if not sample.characters:
        raise DataError("there is no text to train a tokenizer on")
    backend.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
    return Tokenizer(backend, eos=EOS, kind="trained")


def _byte_characters() -> dict[str, int]:
    """The printable character that byte-level tokenizers write for each byte, to its byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [b for b in range(256) if b not in plain]
    found = {chr(b): b for b in plain}
    found.update({chr(256 + i): b for i, b in enumerate(other)})
    return found

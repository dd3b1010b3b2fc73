"""Data: documents tokenized once into memory-mapped files, and sample = f(seed, global index).

    documents -> ids, eos after each -> tokens.bin (training) and valid.bin (held out) -> samples

Sample i of a file holds its tokens [i S, i S + S + 1): S inputs and S labels, shifted by one.
Documents are packed without padding; attention runs across them. Conversations, and whatever is
asked to be packed otherwise, have flags beside their tokens (`packed_files`). Letters: B batch,
S sequence. Never imports torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hocket.spec.errors import DataError
from hocket.spec.run import write_text
from hocket.training import data_paths, data_sources
from hocket.training.conversation import TEXT
from hocket.training.documents import Document, documents, kinds
from hocket.training.packed_files import arrange, flags_file, write_aside
from hocket.training.packed_files import held_out as held_out_documents
from hocket.training.packing import ACROSS, DOCUMENTS
from hocket.training.token_files import BATCH_CHARACTERS, Dtype, choose, split, write
from hocket.training.tokenizer import Tokenizer

if TYPE_CHECKING:
    from hocket.models.chat_template import ChatTemplates

TRAIN, VALID, MANIFEST = "tokens.bin", "valid.bin", "tokens.json"
_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """The manifest of a run's tokens: `tokens.json`.

    Attributes:
        train_tokens, valid_tokens: tokens in the two files, end tokens included.
        train_documents, valid_documents: documents in each (a document cut at the end of the
            training part counts in both).
        dtype: `uint16` or `uint32`.
        tokenizer: hash of the tokenizer.
        vocab_size: of the tokenizer.
        largest: the largest token id.
        eos_id: the token after each document, or None.
        key: hash of everything that the tokens depend on; equal keys, equal files.
        sources: path, kind and bytes of each file read.
        held: what each of them holds: `text`, `chat` or `completion`.
        packing: `across`, `documents` or `none`.
        flags: whether flags lie beside the tokens.
        train_rows, valid_rows: rows of the files; 0 where documents follow each other.
        learned_tokens: training tokens that loss falls on; None: all.
        truncated_documents, truncated_tokens: cut at the length of a row, and what was cut off.
        unlearned_documents: left out, since nothing of them is learned.
    """

    train_tokens: int
    valid_tokens: int
    train_documents: int
    valid_documents: int
    dtype: str
    tokenizer: str
    vocab_size: int
    largest: int
    eos_id: int | None
    key: str
    sources: tuple[tuple[str, str, int], ...]
    held: tuple[str, ...] = ()
    packing: str = ACROSS
    flags: bool = False
    train_rows: int = 0
    valid_rows: int = 0
    learned_tokens: int | None = None
    truncated_documents: int = 0
    truncated_tokens: int = 0
    unlearned_documents: int = 0
    version: int = _VERSION

    def said(self, seq_len: int) -> str:
        """What the data came to, in one line for a person."""
        text = f"{self.train_tokens:,} tokens to train on, {self.valid_tokens:,} held out"
        if self.learned_tokens is not None and self.flags:
            share = self.learned_tokens / max(1, self.train_tokens)
            text += f"; loss falls on {share:.0%} of them"
        if self.train_rows:
            full = self.train_tokens / (self.train_rows * seq_len)
            kind = "shared" if self.packing == DOCUMENTS else "one document each"
            text += f"; {self.train_rows:,} rows ({kind}), {full:.0%} full"
        if self.truncated_documents:
            text += (
                f"; {self.truncated_documents:,} documents cut at {seq_len} tokens, which lost "
                f"{self.truncated_tokens:,}"
            )
        if self.unlearned_documents:
            text += f"; {self.unlearned_documents:,} left out: nothing of them is learned"
        return text

    @classmethod
    def load(cls, folder: Path) -> Tokens:
        """Read the manifest of a data folder. Raises DataError where it is not complete."""
        try:
            data = json.loads((folder / MANIFEST).read_text())
            data["sources"] = tuple((str(a), str(b), int(c)) for a, b, c in data["sources"])
            data["held"] = tuple(data.get("held", ()))
            return cls(**data)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DataError(f"{folder} holds no complete token files: {error}") from None


def prepare(
    folder: Path | str,
    tokenizer: Tokenizer,
    paths: Sequence[str | os.PathLike[str]],
    *,
    seq_len: int,
    global_batch: int,
    text_field: str = "text",
    held_out: float = 0.02,
    seed: int = 0,
    model_vocab_size: int | None = None,
    data_format: str = "auto",
    packing: str | None = None,
    templates: ChatTemplates | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tokens:
    """Tokenize the data into `folder`, with the tokenizer beside it; do nothing if it is there.

    The held-out documents are the first of a seeded shuffle that together hold the share
    `held_out` of the tokens; where the documents are too few for that, the end of the text is
    held out instead.

    Args:
        seq_len, global_batch: what one step takes; the data must hold at least one.
        model_vocab_size: rows of the model's embedding, which every id must fit.
        data_format: `text`, `chat`, `completion`, or `auto`: as each file's first record says.
        packing: None: `across` for text, `documents` where there is anything else.
        templates: of chats.
        progress: called with (bytes read, bytes in all) as the work goes on.

    Raises:
        DataError: unreadable, empty or too short data, or an id beyond the model's vocabulary.
        OptionError: chats, and no template.
    """
    folder = Path(folder)
    sources = data_paths.find(paths).sources
    listed = tuple((str(s.path.resolve()), s.kind, s.bytes) for s in sources)
    stamps = [(path, kind, size, os.stat(path).st_mtime_ns) for path, kind, size in listed]
    held = kinds(sources, data_format)
    plain = set(held) <= {TEXT}
    packing = packing or (ACROSS if plain else DOCUMENTS)
    written = [] if templates is None else sorted(templates.texts.items())
    key = _hash(
        _VERSION,
        stamps,
        text_field,
        held_out,
        seed,
        seq_len,
        tokenizer.hash,
        held,
        packing,
        written,
    )
    tokens = _existing(folder, key, seq_len)
    if tokens is None:
        folder.mkdir(parents=True, exist_ok=True)
        dtype: Dtype = np.dtype("uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32")
        making = _Making(
            folder=folder, sources=sources, tokenizer=tokenizer, dtype=dtype,
            seq_len=seq_len, share=held_out, seed=seed, progress=progress,
        )  # fmt: skip
        if plain and packing == ACROSS:
            counts = making.stream(text_field)
        else:
            found = documents(
                sources, held, tokenizer, templates, text_field=text_field, passed=making.passed
            )
            counts = making.flagged(found, packing)
        tokens = Tokens(
            **counts,
            held=tuple(held),
            packing=packing,
            dtype=dtype.name,
            tokenizer=tokenizer.hash,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            key=key,
            sources=listed,
        )
        tokenizer.save(folder)
        write_text(folder / MANIFEST, json.dumps(dataclasses.asdict(tokens), indent=1))
    check(tokens, seq_len=seq_len, global_batch=global_batch, model_vocab_size=model_vocab_size)
    return tokens


def check(
    tokens: Tokens, *, seq_len: int, global_batch: int, model_vocab_size: int | None = None
) -> None:
    """Refuse tokens that are too few for one step or too large for the model (DataError)."""
    if model_vocab_size is not None and tokens.largest >= model_vocab_size:
        raise DataError(
            f"the data holds token id {tokens.largest}, the model's vocabulary has "
            f"{model_vocab_size} rows (ids 0 to {model_vocab_size - 1}); the tokenizer has "
            f"{tokens.vocab_size} ids",
            hint="--tokenizer bytes" if model_vocab_size >= 257 else "a model with more rows",
        )
    if tokens.train_rows:
        if tokens.train_rows < global_batch:
            raise DataError(
                f"the training data fills {tokens.train_rows} rows of {seq_len} tokens; one step "
                f"takes {global_batch}",
                hint=f"--global-batch {tokens.train_rows}, or more data",
            )
        return
    samples = num_samples(tokens.train_tokens, seq_len)
    if samples < global_batch:
        fits = max(0, (tokens.train_tokens - 1) // global_batch)
        raise DataError(
            f"the training data holds {tokens.train_tokens} tokens; one step takes "
            f"{global_batch} sequences of {seq_len} and needs {global_batch * seq_len + 1}",
            hint=f"--seq-len {fits}, or more data"
            if fits >= 2
            else f"--global-batch {max(1, samples)}, or more data",
        )


def num_samples(num_tokens: int, seq_len: int) -> int:
    """How many samples of `seq_len` inputs and their labels some tokens hold."""
    return max(0, (num_tokens - 1) // seq_len)


@dataclasses.dataclass(kw_only=True)
class _Making:
    """The token files of one folder while they are made; half-made ones lie aside."""

    folder: Path
    sources: Sequence[data_paths.Source]
    tokenizer: Tokenizer
    dtype: Dtype
    seq_len: int
    share: float
    seed: int
    progress: Callable[[int, int], None] | None

    def __post_init__(self) -> None:
        self._total, self._done = sum(s.bytes for s in self.sources), 0
        self._aside = self.folder / f".{TRAIN}.{os.getpid()}"
        self._beside = self.folder / f".{VALID}.{os.getpid()}"

    def passed(self, characters: int) -> None:
        """Some more characters have been read."""
        self._done = min(self._total, self._done + characters)
        if self.progress is not None:
            self.progress(self._done, self._total)

    def stream(self, text_field: str) -> dict[str, Any]:
        """Documents one after the other, without flags; counts for the manifest."""
        try:
            texts = _counted(self.sources, text_field, self.progress)
            lengths, largest = write(self._aside, texts, self.tokenizer, self.dtype)
            self._require(lengths)
            chosen = choose(lengths, self.share, self.seed, self.seq_len)
            counts = split(
                self._aside, self._beside, lengths, chosen,
                dtype=self.dtype, share=self.share, seq_len=self.seq_len,
            )  # fmt: skip
            os.replace(self._beside, self.folder / VALID)
            os.replace(self._aside, self.folder / TRAIN)
        finally:
            self._aside.unlink(missing_ok=True)
            self._beside.unlink(missing_ok=True)
        return {**counts, "largest": largest}

    def flagged(self, found: Iterable[Document], packing: str) -> dict[str, Any]:
        """Documents with flags, in rows or one after the other; counts for the manifest."""
        row = None if packing == ACROSS else self.seq_len
        try:
            lengths, counts = write_aside(
                self._aside, self._beside, found, dtype=self.dtype, row=row
            )
            if not lengths.size and counts.unlearned_documents:
                raise DataError(
                    f"data {self._paths()}: none of the {counts.unlearned_documents} documents "
                    f"has a token in its first {self.seq_len} that loss falls on",
                    hint="conversations with an assistant's turn, or a longer --seq-len",
                )
            self._require(lengths)
            chosen = held_out_documents(len(lengths), self.share, self.seed)
            parts = {
                name: arrange(
                    self.folder / file, self._aside, self._beside, lengths, which,
                    dtype=self.dtype, packing=packing, row=self.seq_len,
                    filler=self.tokenizer.eos_id or 0,
                )
                for name, file, which in (("train", TRAIN, ~chosen), ("valid", VALID, chosen))
            }  # fmt: skip
        finally:
            self._aside.unlink(missing_ok=True)
            self._beside.unlink(missing_ok=True)
        return {
            "flags": True,
            "largest": max(counts.largest, self.tokenizer.eos_id or 0),
            "train_documents": int((~chosen).sum()),
            "valid_documents": int(chosen.sum()),
            **{
                f"{part}_{name}": n[name]
                for part, n in parts.items()
                for name in ("tokens", "rows")
            },
            "learned_tokens": parts["train"]["learned"],
            "truncated_documents": counts.truncated_documents,
            "truncated_tokens": counts.truncated_tokens,
            "unlearned_documents": counts.unlearned_documents,
        }

    def _paths(self) -> str:
        return ", ".join(str(source.path) for source in self.sources[:3])

    def _require(self, lengths: npt.NDArray[np.int64]) -> None:
        if lengths.size == 0:
            raise DataError(
                f"data {self._paths()}: there is no text in it", hint="give files that hold text"
            )


# --- parts of preparing ---------------------------------------------------------------------


def _existing(folder: Path, key: str, seq_len: int) -> Tokens | None:
    try:
        tokens = Tokens.load(folder)
    except DataError:
        return None
    size = np.dtype(tokens.dtype).itemsize
    rows = (tokens.train_rows, tokens.valid_rows)
    held = (tokens.train_tokens, tokens.valid_tokens)
    for name, count, lines in zip((TRAIN, VALID), held, rows, strict=True):
        path = folder / name
        count = lines * seq_len if any(rows) else count
        if not path.is_file() or path.stat().st_size != count * size:
            return None
        beside = flags_file(path)
        if tokens.flags and (not beside.is_file() or beside.stat().st_size != count):
            return None
    return tokens if tokens.key == key and tokens.version == _VERSION else None


def _counted(
    sources: Sequence[data_paths.Source],
    text_field: str,
    progress: Callable[[int, int], None] | None,
) -> Iterator[str]:
    total, done = sum(s.bytes for s in sources), 0
    for source in sources:
        read = said = 0
        for text in data_sources.documents([source], text_field):
            yield text
            read += len(text)
            if progress is not None and read - said >= BATCH_CHARACTERS:
                said = read
                progress(min(done + read, total), total)
        done += source.bytes
        if progress is not None:
            progress(done, total)


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

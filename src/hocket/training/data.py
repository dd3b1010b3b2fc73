"""Data: documents tokenized once into memory-mapped files, and sample = f(seed, global index).

    documents -> ids, eos after each -> tokens.bin (training) and valid.bin (held out) -> samples

Sample i of a file holds its tokens [i S, i S + S + 1): S inputs and S labels, shifted by one.
Documents are packed without padding; attention runs across them. Letters: B batch, S sequence.
Never imports torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hocket.spec.errors import DataError
from hocket.spec.run import write_text
from hocket.training import data_sources
from hocket.training.order import permuted
from hocket.training.token_files import BATCH_CHARACTERS, Dtype, choose, split, write
from hocket.training.tokenizer import Tokenizer

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
    version: int = _VERSION

    @classmethod
    def load(cls, folder: Path) -> Tokens:
        """Read the manifest of a data folder. Raises DataError where it is not complete."""
        try:
            data = json.loads((folder / MANIFEST).read_text())
            data["sources"] = tuple((str(a), str(b), int(c)) for a, b, c in data["sources"])
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
    progress: Callable[[int, int], None] | None = None,
) -> Tokens:
    """Tokenize the data into `folder`, with the tokenizer beside it; do nothing if it is there.

    The held-out documents are the first of a seeded shuffle that together hold the share
    `held_out` of the tokens; where the documents are too few for that, the end of the text is
    held out instead.

    Args:
        seq_len, global_batch: what one step takes; the data must hold at least one.
        model_vocab_size: rows of the model's embedding, which every id must fit.
        progress: called with (bytes read, bytes in all) as the work goes on.

    Raises:
        DataError: unreadable, empty or too short data, or an id beyond the model's vocabulary.
    """
    folder = Path(folder)
    sources = data_sources.find(paths)
    listed = tuple((str(s.path.resolve()), s.kind, s.bytes) for s in sources)
    stamps = [(path, kind, size, os.stat(path).st_mtime_ns) for path, kind, size in listed]
    key = _hash(_VERSION, stamps, text_field, held_out, seed, seq_len, tokenizer.hash)
    tokens = _existing(folder, key)
    if tokens is None:
        folder.mkdir(parents=True, exist_ok=True)
        dtype: Dtype = np.dtype("uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32")
        aside = folder / f".{TRAIN}.{os.getpid()}"
        beside = folder / f".{VALID}.{os.getpid()}"
        try:
            texts = _counted(sources, text_field, progress)
            lengths, largest = write(aside, texts, tokenizer, dtype)
            if lengths.size == 0:
                raise DataError(
                    f"data {', '.join(map(str, paths))}: there is no text in it",
                    hint="give files that hold text",
                )
            chosen = choose(lengths, held_out, seed, seq_len)
            counts = split(
                aside, beside, lengths, chosen, dtype=dtype, share=held_out, seq_len=seq_len
            )
            os.replace(beside, folder / VALID)
            os.replace(aside, folder / TRAIN)
        finally:
            aside.unlink(missing_ok=True)
            beside.unlink(missing_ok=True)
        tokens = Tokens(
            **counts,
            dtype=dtype.name,
            tokenizer=tokenizer.hash,
            vocab_size=tokenizer.vocab_size,
            largest=largest,
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


class TokenDataset:
    """Samples of one token file, in a shuffled order that is a function of seed and index.

    Args:
        path: `tokens.bin` or `valid.bin`.
        dtype: of the file.
        seq_len: S.
        seed: of the order. None: in the order of the file.
    """

    def __init__(self, path: Path | str, dtype: str, seq_len: int, seed: int | None = None) -> None:
        self.seq_len = seq_len
        self.seed = seed
        self.path = Path(path)
        size = self.path.stat().st_size
        self._tokens: npt.NDArray[np.unsignedinteger] = (
            np.memmap(self.path, dtype=dtype, mode="r") if size else np.zeros(0, dtype)
        )
        self.num_samples = num_samples(len(self._tokens), seq_len)
        self._within = np.arange(seq_len + 1)

    def __len__(self) -> int:
        return self.num_samples

    def order(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Global indices (0, 1, 2, ... without end) to samples; each epoch has its own order."""
        assert self.num_samples > 0, self.path
        index = np.asarray(indices, np.int64)
        epoch, position = np.divmod(index, self.num_samples)
        if self.seed is None:
            return position
        found = np.empty_like(position)
        for one in np.unique(epoch):
            here = epoch == one
            found[here] = permuted(position[here], self.num_samples, (self.seed, int(one)))
        return found

    def rows(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Tokens [B, S + 1] of the samples at some global indices."""
        starts = self.order(indices) * self.seq_len
        return self._tokens[starts[:, None] + self._within].astype(np.int64)


@dataclasses.dataclass(frozen=True)
class BatchOrder:
    """Which global indices a step takes, and which of them one data rank and microbatch does.

    Step k takes the indices k G .. k G + G - 1 of the shuffled order, G the global batch; data
    rank d of D takes the d-th of D equal runs of them, microbatch m the m-th of M equal runs of
    that. One process therefore sees the same global batch as any layout.
    """

    global_batch: int
    data_ranks: int = 1
    microbatches: int = 1

    def __post_init__(self) -> None:
        assert self.global_batch % (self.data_ranks * self.microbatches) == 0, self

    @property
    def microbatch_size(self) -> int:
        """Sequences in one microbatch."""
        return self.global_batch // (self.data_ranks * self.microbatches)

    def indices(self, step: int, data_rank: int, microbatch: int) -> npt.NDArray[np.int64]:
        """Global indices [B] of one microbatch of `step` (counted from 0)."""
        size = self.microbatch_size
        first = step * self.global_batch + (data_rank * self.microbatches + microbatch) * size
        return np.arange(first, first + size)

    def rank_indices(self, step: int, data_rank: int) -> npt.NDArray[np.int64]:
        """Global indices of all microbatches of one data rank, in their order."""
        size = self.microbatch_size * self.microbatches
        first = step * self.global_batch + data_rank * size
        return np.arange(first, first + size)


# --- parts of preparing ---------------------------------------------------------------------


def _existing(folder: Path, key: str) -> Tokens | None:
    try:
        tokens = Tokens.load(folder)
    except DataError:
        return None
    size = np.dtype(tokens.dtype).itemsize
    for name, count in ((TRAIN, tokens.train_tokens), (VALID, tokens.valid_tokens)):
        path = folder / name
        if not path.is_file() or path.stat().st_size != count * size:
            return None
    return tokens if tokens.key == key and tokens.version == _VERSION else None


def _counted(
    sources: Sequence[data_sources.Source],
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

"""Data: documents tokenized once into memory-mapped files, and sample = f(seed, global index).

    documents -> ids, eos after each -> tokens.bin (training) and valid.bin (held out) -> samples

Sample i of a file holds its tokens [i S, i S + S + 1): S inputs and S labels, shifted by one.
Documents are packed without padding; attention runs across them. Conversations, and whatever is
asked to be packed otherwise, have flags with their tokens (`packed_files`). Letters: B batch,
S sequence. Never imports torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hocket.models.chat_template import file_of
from hocket.spec.errors import DataError
from hocket.spec.units import format_bytes
from hocket.training import data_paths, data_sources, mixture, windowed
from hocket.training.conversation import TEXT
from hocket.training.corrupt import CorruptRecords
from hocket.training.documents import Document, source_kinds, split_documents
from hocket.training.packed_files import DocumentCounts, arrange, flags_file, write_aside
from hocket.training.packed_files import held_out as held_out_documents
from hocket.training.packing import ACROSS, DOCUMENTS
from hocket.training.token_files import (
    BATCH_CHARACTERS,
    Dtype,
    choose_held_out,
    split_tokens,
    write_tokens,
)
from hocket.training.token_manifest import TRAIN, VALID, VERSION, Tokens, verify_tokens
from hocket.training.tokenizer import Tokenizer

if TYPE_CHECKING:
    from hocket.models.chat_template import ChatTemplates


def prepare_data(
    folder: Path | str,
    tokenizer: Tokenizer,
    paths: Sequence[str | os.PathLike[str]],
    *,
    eval_paths: Sequence[str | os.PathLike[str]] = (),
    seq_len: int,
    global_batch: int,
    text_field: str = "text",
    eval_fraction: float = 0.02,
    seed: int = 0,
    model_vocab_size: int | None = None,
    data_format: str = "auto",
    packing: str | None = None,
    templates: ChatTemplates | None = None,
    chat_template: Path | str | None = None,
    streaming: bool = False,
    samples: int | None = None,
    max_corrupt_records: int = 0,
    token_window: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Tokens:
    """Tokenize the data into `folder`, with the tokenizer; do nothing if it is there.

    The held-out documents are the first of a seeded shuffle that together hold the share
    `eval_fraction` of the tokens; where the documents are too few for that, the end of the text is
    held out instead. Of a mixture (`mixture`) that holds for each source by itself.

    Args:
        eval_paths: held out in place of a fraction of `paths`.
        seq_len, global_batch: what one step takes; the data must hold at least one.
        model_vocab_size: rows of the model's embedding, which every id must fit.
        data_format: `text`, `chat`, `completion`, or `auto`: as each file's first record says.
        packing: None: `across` for text, `documents` where there is anything else.
        templates: of chats. chat_template: the file that they are from, where it is not the
            tokenizer's own; it is copied into the folder.
        streaming: as `data_paths.find_sources`.
        samples: that the run trains on. Where sources are streamed and documents follow each other
            (`across`), so much is read of them, from their beginnings, and no more; None: all.
        max_corrupt_records: records that cannot be read and are skipped, in all sources together.
        token_window: bytes of training tokens on disk at a time, of a stream; 0: all.
        progress: called with (bytes read, bytes in all) as the work goes on.

    Raises:
        DataError: unreadable, empty or too short data, or an id beyond the model's vocabulary.
        OptionError: chats, and no template.
    """
    folder = Path(folder)
    weights = mixture.weights_of(paths)
    mixture.reject_weights(eval_paths)
    slots = mixture.slots_of(weights) if weights else ()
    each = [data_paths.find_sources([path], streaming=streaming).sources for path in paths]
    sources = [source for some in each for source in some]
    listed = tuple((source.shown, source.kind, source.bytes) for source in sources)
    held_out = (
        data_paths.find_sources(eval_paths, streaming=streaming).sources if eval_paths else ()
    )
    stamps = [source.stamp for source in (*sources, *held_out)]
    held = [*source_kinds(sources, data_format), *source_kinds(held_out, data_format)]
    listed_out = tuple((source.shown, source.kind, source.bytes) for source in held_out)
    plain = set(held) <= {TEXT}
    packing = packing or (ACROSS if plain else DOCUMENTS)
    written = [] if templates is None else sorted(templates.texts.items())
    quotas: list[int] = []
    dtype: Dtype = np.dtype("uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32")
    window, stream = 0, plain and packing == ACROSS
    if token_window:
        window = windowed.window_of(
            token_window, dtype.itemsize, seq_len, global_batch, plain=stream and not slots
        )
    elif samples is not None and stream and _streamed(sources, streaming):
        shares = slots or [sum(source.bytes for source in some) for some in each]
        quotas = stream_quotas(samples, seq_len, shares, 0.0 if held_out else eval_fraction)
    key = _hash(
        VERSION,
        [*zip((*listed, *listed_out), stamps, strict=True)],
        *([len(held_out)] if held_out else ()),
        text_field,
        eval_fraction,
        seed,
        seq_len,
        tokenizer.hash,
        held,
        packing,
        written,
        *([slots, [len(some) for some in each]] if slots else []),
        *([max_corrupt_records] if max_corrupt_records else []),
        *([quotas] if quotas else []),
        *(["window", window] if window else []),
    )
    tokens = _existing(folder, key, seq_len)
    if tokens is None:
        folder.mkdir(parents=True, exist_ok=True)
        windowed.delete_windows(folder)
        _require_room(folder, token_window or sum(quotas) * dtype.itemsize)
        corrupt = CorruptRecords(max_corrupt_records)
        kind_of = dict(zip(map(id, (*sources, *held_out)), held, strict=True))

        def made(
            to: Path,
            paths: Sequence[Sequence[data_paths.Source]],
            out: Sequence[data_paths.Source],
            share: float,
            most: Sequence[int],
        ) -> dict[str, Any]:
            some = [source for one in paths for source in one]
            making = _Making(
                folder=to, sources=some, held_out=out, tokenizer=tokenizer, dtype=dtype,
                seq_len=seq_len, share=share, seed=seed, corrupt=corrupt, progress=progress,
            )  # fmt: skip
            if stream:
                return making.stream(text_field, paths, most)
            of_train, of_valid = (
                split_documents(
                    these, [kind_of[id(one)] for one in these], tokenizer, templates,
                    text_field=text_field, passed=making.passed, corrupt=corrupt,
                )
                for these in (some, out)
            )  # fmt: skip
            return making.flagged(of_train, of_valid, packing)

        mixed: list[mixture.MixedSource] = []
        if window:
            counts = windowed.held_out_counts(
                folder, tokenizer, sources, held_out, text_field=text_field, corrupt=corrupt,
                dtype=dtype, seq_len=seq_len, samples=samples, share=eval_fraction, window=window,
            )  # fmt: skip
        elif not slots:
            counts = made(folder, each, held_out, eval_fraction, quotas)
        else:
            parts = []
            for number, some in enumerate(each):
                aside = folder / f".source-{number}.{os.getpid()}"
                aside.mkdir()
                out = held_out if not number else ()
                share = 0.0 if held_out else eval_fraction
                most = quotas[number : number + 1]
                parts.append((aside, made(aside, [some], out, share, most)))
            counts = _joined(folder, parts)
            mixed = [
                mixture.MixedSource(
                    mixture.unweighted(path)[0], count, part["train_tokens"],
                    part.get("train_rows", 0),
                )
                for path, count, (_, part) in zip(paths, slots, parts, strict=True)
            ]  # fmt: skip
        tokens = Tokens(
            **counts,
            corrupt_records=corrupt.count,
            corrupt=tuple(corrupt.notes),
            mixture=tuple(mixed),
            partial=bool(quotas),
            window=window,
            held=tuple(held),
            packing=packing,
            dtype=dtype.name,
            tokenizer=tokenizer.hash,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            key=key,
            sources=listed,
            eval_sources=listed_out,
        )
        data_paths.reject_changed((*sources, *held_out), stamps)
        tokenizer.save(folder)
        if chat_template is not None:  # the exported model brings what it was trained on
            shutil.copyfile(file_of(str(chat_template)), folder / "chat_template.jinja")
        tokens = tokens.save(folder)
    check_tokens(
        tokens, seq_len=seq_len, global_batch=global_batch, model_vocab_size=model_vocab_size
    )
    return tokens


def check_tokens(
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
    for one in tokens.mixture:
        if not (one.rows or num_samples(one.tokens, seq_len)):
            raise DataError(
                f"data {one.data}: this source of the mixture holds {one.tokens} tokens to train "
                f"on; one sample takes {seq_len + 1}",
                hint="more of this source, a shorter --seq-len, or leave it out",
            )
    samples = num_samples(tokens.train_tokens, seq_len)
    if samples < global_batch:
        fits = max(0, (tokens.train_tokens - 1) // global_batch)
        raise DataError(
            f"the training data holds {tokens.train_tokens} tokens; one step takes "
            f"{global_batch} sequences of {seq_len} and needs {global_batch * seq_len + 1}",
            hint=f"--global-batch {samples}, or more data"
            if samples
            else f"--seq-len {max(2, fits or tokens.train_tokens - 1)} --global-batch "
            f"{global_batch if fits >= 2 else 1}, or more data",
        )


def num_samples(num_tokens: int, seq_len: int) -> int:
    """How many samples of `seq_len` inputs and their labels some tokens hold."""
    return max(0, (num_tokens - 1) // seq_len)


@dataclasses.dataclass(kw_only=True)
class _Making:
    """The token files of one folder while they are made; half-made ones lie aside."""

    folder: Path
    sources: Sequence[data_paths.Source]
    held_out: Sequence[data_paths.Source]
    tokenizer: Tokenizer
    dtype: Dtype
    seq_len: int
    share: float
    seed: int
    corrupt: CorruptRecords
    progress: Callable[[int, int], None] | None

    def __post_init__(self) -> None:
        self._total, self._done = sum(s.bytes for s in (*self.sources, *self.held_out)), 0
        self._aside = self.folder / f".{TRAIN}.{os.getpid()}"
        self._partial = self.folder / f".{VALID}.{os.getpid()}"

    def passed(self, characters: int) -> None:
        """Some more characters have been read."""
        self._done = min(self._total, self._done + characters)
        if self.progress is not None:
            self.progress(self._done, self._total)

    def stream(
        self,
        text_field: str,
        paths: Sequence[Sequence[data_paths.Source]],
        quotas: Sequence[int],
    ) -> dict[str, Any]:
        """Documents one after the other, without flags; counts for the manifest. `quotas`: of the
        sources of each path, as of `write_tokens`."""
        try:
            texts = [self._texts(one, text_field) for one in paths]
            lengths, largest = write_tokens(self._aside, texts, self.tokenizer, self.dtype, quotas)
            self._require(self.sources, lengths)
            if self.held_out:
                texts = [data_sources.source_documents(self.held_out, text_field, self.corrupt)]
                apart, other = write_tokens(self._partial, texts, self.tokenizer, self.dtype)
                self._require(self.held_out, apart, self.seq_len + 1)
                largest = max(largest, other)
                counts = {
                    "train_tokens": int(lengths.sum()),
                    "valid_tokens": int(apart.sum()),
                    "train_documents": len(lengths),
                    "valid_documents": len(apart),
                }
            else:
                chosen = choose_held_out(lengths, self.share, self.seed, self.seq_len)
                counts = split_tokens(
                    self._aside, self._partial, lengths, chosen,
                    dtype=self.dtype, share=self.share, seq_len=self.seq_len,
                )  # fmt: skip
            os.replace(self._partial, self.folder / VALID)
            os.replace(self._aside, self.folder / TRAIN)
        finally:
            self._aside.unlink(missing_ok=True)
            self._partial.unlink(missing_ok=True)
        return {**counts, "largest": largest}

    def _texts(self, sources: Sequence[data_paths.Source], text_field: str) -> Iterator[str]:
        """The documents of some sources, whose progress is reported."""
        for source in sources:
            read = said = 0
            for text in data_sources.source_documents([source], text_field, self.corrupt):
                yield text
                read += len(text)
                if read - said >= BATCH_CHARACTERS:
                    self.passed(read - said)
                    said = read
            self.passed(source.bytes - said)

    def flagged(
        self, found: Iterable[Document], held_out: Iterable[Document], packing: str
    ) -> dict[str, Any]:
        """Documents with flags, in rows or one after the other; counts for the manifest."""
        share = 0.0 if self.held_out else self.share
        train, counts = self._arranged(self.sources, found, packing, {TRAIN: 0.0, VALID: share})
        if self.held_out:
            apart, other = self._arranged(self.held_out, held_out, packing, {VALID: 0.0})
            train |= apart
            counts.largest = max(counts.largest, other.largest)
        return {
            "flags": True,
            "largest": max(counts.largest, self.tokenizer.eos_id or 0),
            **{
                f"{part}_{name}": train[file][name]
                for part, file in (("train", TRAIN), ("valid", VALID))
                for name in ("tokens", "rows", "documents")
            },
            "learned_tokens": train[TRAIN]["learned"],
            "truncated_documents": counts.truncated_documents,
            "truncated_tokens": counts.truncated_tokens,
            "unlearned_documents": counts.unlearned_documents,
        }

    def _arranged(
        self,
        sources: Sequence[data_paths.Source],
        found: Iterable[Document],
        packing: str,
        files: dict[str, float],
    ) -> tuple[dict[str, dict[str, int]], DocumentCounts]:
        """The documents of some sources in token files, the last with a share of them, the first
        with the rest; what each holds, and what became of the documents."""
        row = None if packing == ACROSS else self.seq_len
        try:
            lengths, counts = write_aside(
                self._aside, self._partial, found, dtype=self.dtype, row=row
            )
            if not lengths.size and counts.unlearned_documents:
                raise DataError(
                    f"data {_paths(sources)}: none of the {counts.unlearned_documents} documents "
                    f"has a token in its first {self.seq_len} that loss falls on",
                    hint="conversations with an assistant's turn, or a longer --seq-len",
                )
            self._require(sources, lengths)
            chosen = held_out_documents(lengths, counts.pieces, max(files.values()), self.seed)
            parts = {}
            for file, which in zip(files, (~chosen, chosen), strict=False):
                parts[file] = arrange(
                    self.folder / file, self._aside, self._partial, lengths, which,
                    dtype=self.dtype, packing=packing, row=self.seq_len,
                    filler=self.tokenizer.eos_id or 0,
                )  # fmt: skip
                parts[file]["documents"] = int(which.sum())
        finally:
            self._aside.unlink(missing_ok=True)
            self._partial.unlink(missing_ok=True)
        return parts, counts

    def _require(
        self,
        sources: Sequence[data_paths.Source],
        lengths: npt.NDArray[np.int64],
        least: int = 1,
    ) -> None:
        """Refuse sources without text, or with fewer tokens than `least`. Raises DataError."""
        if lengths.size == 0:
            raise DataError(
                f"data {_paths(sources)}: there is no text in it", hint="give files that hold text"
            )
        if lengths.sum() < least:
            raise DataError(
                f"data {_paths(sources)}: it holds {lengths.sum()} tokens, and one sequence of "
                f"--seq-len {self.seq_len} takes {least}",
                hint=f"--seq-len {max(2, int(lengths.sum()) - 1)}, or more text",
            )


def _paths(sources: Sequence[data_paths.Source]) -> str:
    return ", ".join(str(source.path) for source in sources[:3])


# --- parts of preparing ---------------------------------------------------------------------


def _existing(folder: Path, key: str, seq_len: int) -> Tokens | None:
    """The tokens of a folder, if they are whole and those that are asked for."""
    try:
        tokens = Tokens.load(folder)
        if tokens.key != key or tokens.files is None:
            return None
        verify_tokens(folder, seq_len)
    except DataError:
        return None
    return tokens


def _joined(folder: Path, parts: Sequence[tuple[Path, dict[str, Any]]]) -> dict[str, Any]:
    """Put the token files of the sources of a mixture one after the other; counts of all."""
    for name in (TRAIN, VALID):
        for file in (name, flags_file(Path(name)).name):
            pieces = [part / file for part, _ in parts if (part / file).exists()]
            if not pieces:
                continue
            with (folder / file).open("wb") as whole:
                for piece in pieces:
                    with piece.open("rb") as one:
                        shutil.copyfileobj(one, whole)
                    piece.unlink()
    for part, _ in parts:
        part.rmdir()
    counts = dict(parts[0][1])
    for _, more in parts[1:]:
        for name, value in more.items():
            if name == "largest":
                counts[name] = max(counts[name], value)
            elif name != "flags":
                counts[name] += value
    return counts


def _streamed(sources: Iterable[data_paths.Source], asked: bool) -> bool:
    """Whether sources are read where they are: that was asked for, or the disk has no room."""
    return asked or any(part.streaming for source in sources for part in source.parts)


def stream_quotas(
    samples: int, seq_len: int, shares: Sequence[float], eval_fraction: float
) -> list[int]:
    """Tokens of each source of a stream that are read, by the shares that a run takes of them, so
    that `samples` of all are left where `eval_fraction` is held out; empty: all of them."""
    left = 1 - 1.5 * eval_fraction  # `choose_held_out` takes so much at most
    if left <= 0.25 or not sum(shares):
        return []
    return [
        math.ceil(((samples * share / sum(shares) + len(shares) + 1) * seq_len + 1) / left)
        + seq_len + 1
        for share in shares
    ]  # fmt: skip


def _require_room(folder: Path, size: int) -> None:
    """Raise DataError where the disk has no room for so many bytes of tokens."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise DataError(
            f"the tokens that the run trains on take {format_bytes(size)}; the disk of {folder} "
            f"has {format_bytes(free)} free",
            hint="fewer --steps, or --run on a larger disk",
        )


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def steps_of(tokens: Tokens, epochs: float, *, seq_len: int, global_batch: int) -> int:
    """Optimizer steps that pass over the training data `epochs` times; the last may begin more."""
    samples = tokens.train_rows or num_samples(tokens.train_tokens, seq_len)
    return max(1, math.ceil(round(epochs * samples / global_batch, 9)))

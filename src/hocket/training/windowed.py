"""Windowed data: what `--token-window` asks for, what it holds out, and the thread that serves it.

Held out is what `--eval-data` names, else the first documents of the stream that together have the
share `--eval-fraction` of one window's tokens. Never imports torch.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hocket.spec.checkpoint import resumable_checkpoints
from hocket.spec.errors import DataError, HocketError
from hocket.spec.run import RunFolder, TrainOptions, Workload
from hocket.spec.units import format_bytes, parse_bytes
from hocket.training import data_paths, data_sources
from hocket.training.corrupt import CorruptRecords
from hocket.training.data_sources import DocumentPlace
from hocket.training.token_files import write_tokens
from hocket.training.token_manifest import MANIFEST, TRAIN, VALID, Tokens
from hocket.training.token_window import (
    MARKS,
    PARTS,
    Ended,
    TokenStream,
    WindowMaker,
    hold_out,
    window_samples,
)
from hocket.training.tokenizer import Tokenizer

TURN = 0.05
"""Seconds between two looks for what ranks ask for."""


def window_of(size: int, itemsize: int, seq_len: int, global_batch: int, *, plain: bool) -> int:
    """Samples of each window, where `size` bytes of tokens are on disk at most.

    Raises:
        DataError: data that is not one stream of text, or too few bytes for the samples of a step.
    """
    if not plain:
        raise DataError(
            "--token-window is for text whose documents follow each other, from one source or "
            "several without weights",
            hint="leave --token-window out, or --packing across and text",
        )
    samples = window_samples(size, itemsize, seq_len)
    if samples < global_batch:
        least = PARTS * itemsize * (global_batch * seq_len + 1)
        raise DataError(
            f"--token-window of {format_bytes(size)} is {PARTS} windows of {samples} sequences of "
            f"{seq_len} tokens; a window has at least those of one step, {global_batch}",
            hint=f"--token-window {least}B",
        )
    return samples


def held_out_counts(
    folder: Path,
    tokenizer: Tokenizer,
    sources: Sequence[data_paths.Source],
    held_out: Sequence[data_paths.Source],
    *,
    text_field: str,
    corrupt: CorruptRecords,
    dtype: np.dtype[Any],
    seq_len: int,
    samples: int | None,
    share: float,
    window: int,
) -> dict[str, Any]:
    """Write what is held out; counts for the manifest.

    Args:
        samples: that the run trains on. share: of the tokens of a window, which has `window`
            samples, that are held out of the stream.
    """
    (folder / TRAIN).unlink(missing_ok=True)
    documents = 0
    if held_out:
        texts = data_sources.source_documents(held_out, text_field, corrupt)
        lengths, _ = write_tokens(folder / VALID, [texts], tokenizer, dtype)
        tokens, of_valid = int(lengths.sum()), len(lengths)
        if tokens <= seq_len:
            raise DataError(
                f"what is held out has {tokens} tokens; one sequence of --seq-len {seq_len} takes "
                f"{seq_len + 1}",
                hint="more text for --eval-data",
            )
    else:
        wanted = max(round(share * window * seq_len), seq_len + 1) if share else 0
        stream = TokenStream(_texts(sources, text_field, corrupt), tokenizer)
        tokens, documents = hold_out(stream, folder / VALID, wanted, dtype)
        of_valid = documents
    TokenStream(_texts(sources, text_field, corrupt), tokenizer, documents).take(1)
    return {
        "train_tokens": (samples or 0) * seq_len + 1, "valid_tokens": tokens,
        "train_documents": 0, "valid_documents": of_valid, "largest": tokenizer.vocab_size - 1,
    }  # fmt: skip


def delete_windows(folder: Path) -> None:
    """Delete the windows that a data folder has of other data."""
    for path in (folder / MARKS, *folder.glob("window-*.bin")):
        path.unlink(missing_ok=True)


def _texts(
    sources: Sequence[data_paths.Source], text_field: str, corrupt: CorruptRecords
) -> Callable[[DocumentPlace], Iterator[tuple[str, DocumentPlace]]]:
    """Begins to read the documents at a place."""
    return lambda place: data_sources.placed_documents(sources, text_field, corrupt, place)


class StreamingJob(Protocol):
    """What a run's windows depend on: of its run.json, or of a request for it."""

    @property
    def data(self) -> tuple[str, ...]: ...
    @property
    def eval_data(self) -> tuple[str, ...]: ...
    @property
    def options(self) -> TrainOptions: ...
    @property
    def workload(self) -> Workload: ...


class EventNotes(Protocol):
    """Where skipped records are noted; its watchers are called with each event of the run."""

    watchers: list[Callable[[dict[str, Any]], None]]

    def note(self, text: str) -> None: ...


def window_maker(
    folder: RunFolder,
    job: StreamingJob,
    ended: Callable[[], bool] = lambda: False,
    corrupt: CorruptRecords | None = None,
) -> WindowMaker | None:
    """What makes the windows of a run; None where all of its tokens are on disk.

    Raises:
        DataError: the data is not there, or the manifest has windows of another size than the
            run's option makes.
    """
    tokens, options, workload = Tokens.load(folder.data), job.options, job.workload
    size = parse_bytes(options.token_window) if options.token_window else 0
    samples = window_samples(size, np.dtype(tokens.dtype).itemsize, workload.seq_len)
    if tokens.window != samples:
        raise DataError(
            f"{folder.data / MANIFEST} has windows of {tokens.window} sequences, and the run's "
            f"--token-window, {options.token_window or 'none'}, makes windows of {samples}",
            hint=f"a copy of {folder.data} as it was, or a new run from the data: another --run",
        )
    if not tokens.window:
        return None
    tokenizer = Tokenizer.load(folder.data, trust_remote_code=options.trust_remote_code)
    sources = data_paths.find_sources(job.data, streaming=True).sources
    stamps = [source.stamp for source in sources]
    listed = tuple((source.shown, source.kind, source.bytes) for source in sources)
    if listed != tokens.sources:
        raise DataError(
            f"the data {', '.join(job.data)} has changed since the run began: its files or their "
            "sizes are others",
            hint="the data as it was, or a new run from the data: another --run",
        )
    documents = 0 if job.eval_data else tokens.valid_documents
    done = next((int(p.name.split("-")[1]) for p in resumable_checkpoints(folder.checkpoints)), 0)
    corrupt = corrupt or CorruptRecords(options.max_corrupt_records)
    texts = _texts(sources, options.text_field, corrupt)

    def over() -> bool:
        data_paths.reject_changed(sources, stamps)
        return ended()

    return WindowMaker(
        folder.data, TokenStream(texts, tokenizer, documents), samples=tokens.window,
        seq_len=workload.seq_len, dtype=tokens.dtype, ended=over,
        first=done * workload.global_batch // tokens.window,
        last=(options.steps * workload.global_batch - 1) // tokens.window,
    )  # fmt: skip


@contextlib.contextmanager
def windows_made(
    folder: RunFolder, job: StreamingJob, notes: EventNotes | None = None, *, here: bool = True
) -> Iterator[None]:
    """Within, windows that ranks ask for are made, by a thread, where that is done `here`. Corrupt
    records that are skipped are noted at the run's next event."""
    over, corrupt = threading.Event(), CorruptRecords(job.options.max_corrupt_records)
    maker = window_maker(folder, job, over.is_set, corrupt) if here else None
    if maker is None:
        yield
        return
    maker.clean()

    def serve() -> None:
        try:
            while not over.is_set():
                if not maker.serve():
                    over.wait(TURN)
        except Ended:
            return
        except Exception as error:  # the ranks wait for it, and raise it
            known = error if isinstance(error, HocketError) else DataError(repr(error))
            maker.fail(known)

    noted = set(Tokens.load(folder.data).corrupt)  # by the preparation

    def tell(event: dict[str, Any]) -> None:
        for text in tuple(corrupt.notes):
            if notes is not None and text not in noted:
                noted.add(text)
                notes.note(f"skipped: {text}")

    thread = threading.Thread(target=serve, name="token windows", daemon=True)
    thread.start()
    if notes is not None:
        notes.watchers.append(tell)
    try:
        yield
    finally:
        over.set()
        thread.join()
        maker.tidy()
        if notes is not None:
            notes.watchers.remove(tell)
            tell({})
            if corrupt.count > len(corrupt.notes):
                notes.note(f"{corrupt.count:,} corrupt records were skipped in all")

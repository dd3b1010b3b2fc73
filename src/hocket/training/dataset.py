"""Datasets: sample = f(seed, global index), read from memory-mapped token files.

Letters: B batch, S sequence. Never imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hocket.training import token_window
from hocket.training.data import check_tokens, num_samples
from hocket.training.mixture import MixedSource, Mixture
from hocket.training.mixture import mixture_lines as mixture_text
from hocket.training.order import permuted
from hocket.training.packed_files import BEGINS, LEARNED, PADDING, flags_file
from hocket.training.packing import ACROSS
from hocket.training.token_manifest import TRAIN, Tokens

POLL = 0.01
"""Seconds between two looks for a window."""
_COUNTED = 256
"""Rows whose tokens are counted at once."""
IGNORED = -100
"""The label of a token that no loss falls on."""

Ids = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Samples of some indices.

    Attributes:
        ids: [B, S]. labels: [B, S], the token that follows each, `IGNORED` where no loss falls.
        positions: [B, S], counted from each document's beginning; None: from the row's.
    """

    ids: Ids
    labels: Ids
    positions: Ids | None = None


class TokenDataset:
    """Samples of one token file, in a shuffled order that is a function of seed and index.

    Args:
        path: `tokens.bin` or `valid.bin`.
        dtype: of the file.
        seq_len: S.
        seed: of the order. None: in the order of the file.
        flags: whether a file of flags exists.
        mixed: the sources whose tokens or rows follow each other in the file, drawn from by weight;
            empty: it is one.
    """

    def __init__(
        self,
        path: Path | str,
        dtype: str,
        seq_len: int,
        seed: int | None = None,
        *,
        flags: bool = False,
        mixed: Sequence[MixedSource] = (),
    ) -> None:
        self.seq_len = seq_len
        self.seed = seed
        self.path = Path(path)
        size = self.path.stat().st_size
        self._tokens: npt.NDArray[np.unsignedinteger] = (
            np.memmap(self.path, dtype=dtype, mode="r") if size else np.zeros(0, dtype)
        )
        self._flags = np.memmap(flags_file(self.path), np.uint8, "r") if flags and size else None
        self.mixture: Mixture | None = None
        if mixed:
            assert seed is not None, path
            lengths = [one.tokens if self._across else one.rows * seq_len for one in mixed]
            sizes = [self._count(length) for length in lengths]
            self.mixture = Mixture([one.slots for one in mixed], sizes, seed)
            self._names = [one.data for one in mixed]
            self._starts = np.cumsum([0, *lengths[:-1]])
        total = self._count(len(self._tokens))
        self.num_samples = total if self.mixture is None else sum(self.mixture.sizes)
        self._within = np.arange(seq_len + 1)

    _across = True

    def _count(self, tokens: int) -> int:
        return num_samples(tokens, self.seq_len)

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

    def starts(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Where in the file the samples at some global indices begin, in tokens."""
        if self.mixture is None:
            return self.order(indices) * self.seq_len
        source, sample = self.mixture.samples(indices)
        return self._starts[source] + sample * self.seq_len

    def cursor(self, samples: int) -> dict[str, Any]:
        """The position after the first `samples` global indices, as checkpoints store it: samples,
        and of a mixture those of each source, by its name."""
        if self.mixture is None:
            return {"samples": samples}
        taken = self.mixture.taken(samples)
        return {"samples": samples, "sources": dict(zip(self._names, taken, strict=True))}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Take from a checkpoint's cursor what would have to be counted again."""

    def tokens_seen(self, samples: int) -> int:
        """Tokens of the first `samples` global indices, without padding."""
        return samples * self.seq_len

    def rows(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Tokens [B, S + 1] of the samples at some global indices."""
        starts = self.starts(indices)
        return self._tokens[starts[:, None] + self._within].astype(np.int64)

    def batch(self, indices: npt.ArrayLike) -> Batch:
        """The samples at some global indices."""
        rows = self.rows(indices)
        ids, labels = rows[:, :-1], rows[:, 1:].copy()  # a label that is ignored keeps its id
        if self._flags is not None:
            starts = self.starts(indices)
            flags = self._flags[starts[:, None] + self._within[1:]]
            labels = np.where(flags & LEARNED, labels, IGNORED)
        return Batch(ids, labels)

    def learned(self, indices: npt.ArrayLike) -> int:
        """Labels among the samples at some global indices that loss falls on."""
        if self._flags is None:
            return int(np.size(indices)) * self.seq_len
        return int((self.batch(indices).labels != IGNORED).sum())


class RowDataset(TokenDataset):
    """Samples of a file of rows, each of whole documents that do not see each other."""

    _across = False
    _seen = (0, 0)
    """Samples, and the tokens of so many of the first global indices."""

    def _count(self, tokens: int) -> int:
        return tokens // self.seq_len

    def cursor(self, samples: int) -> dict[str, Any]:
        """As of any data set, and the tokens of the samples so far."""
        return {**super().cursor(samples), "tokens": self.tokens_seen(samples)}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """As of any data set; of earlier versions' checkpoints the tokens are counted again."""
        if "tokens" in cursor:
            self._seen = cursor["samples"], cursor["tokens"]

    def tokens_seen(self, samples: int) -> int:
        """As of any data set; counted from the call before on, by the flags."""
        assert self._flags is not None, self.path
        first, count = self._seen if self._seen[0] <= samples else (0, 0)
        for begin in range(first, samples, _COUNTED):
            indices = np.arange(begin, min(begin + _COUNTED, samples))
            flags = self._flags[self.starts(indices)[:, None] + self._within[:-1]]
            count += flags.size - int(np.count_nonzero(flags & PADDING))
        self._seen = samples, count
        return count

    def batch(self, indices: npt.ArrayLike) -> Batch:
        """The rows at some global indices; a row's last token has no label."""
        assert self._flags is not None, self.path
        where = self.starts(indices)[:, None] + self._within[:-1]
        ids, flags = self._tokens[where].astype(np.int64), self._flags[where]
        labels = np.full_like(ids, IGNORED)
        labels[:, :-1] = np.where(flags[:, 1:] & LEARNED, ids[:, 1:], IGNORED)
        places = np.broadcast_to(self._within[:-1], ids.shape)
        begins = np.maximum.accumulate(np.where(flags & BEGINS, places, 0), axis=1)
        return Batch(ids, labels, places - begins)


class WindowDataset(TokenDataset):
    """Samples of a stream of which some windows are on disk; the order is of each window.

    Attributes:
        waiting: is called once a second while a window is waited for.
    """

    def __init__(
        self, folder: Path, dtype: str, seq_len: int, seed: int | None, samples: int
    ) -> None:
        self.path, self.seq_len, self.seed = folder, seq_len, seed
        self.num_samples = samples
        self.mixture = self._flags = None
        self.waiting: Callable[[], None] | None = None
        self._dtype = np.dtype(dtype)
        self._within = np.arange(seq_len + 1)
        self._open: dict[int, npt.NDArray[np.unsignedinteger]] = {}

    def rows(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Tokens [B, S + 1] of the samples at some global indices."""
        index = np.asarray(indices, np.int64)
        starts, windows = self.starts(index), index // self.num_samples
        found = np.empty((index.size, self.seq_len + 1), np.int64)
        for window in np.unique(windows):
            here = windows == window
            found[here] = self._window(int(window))[starts[here][:, None] + self._within]
        return found

    def _window(self, window: int) -> npt.NDArray[np.unsignedinteger]:
        if window not in self._open:
            token_window.ask(self.path, window)
            near = {number: ids for number, ids in self._open.items() if abs(number - window) < 2}
            self._open = {**near, window: self._mapped(window)}
        return self._open[window]

    def _mapped(self, window: int) -> npt.NDArray[np.unsignedinteger]:
        """The tokens of a window, waited for where they are not there."""
        asked = time.monotonic()
        while True:
            with contextlib.suppress(FileNotFoundError):
                path = token_window.window_file(self.path, window)
                return np.memmap(path, self._dtype, "r")
            if (error := token_window.failure_of(self.path)) is not None:
                raise error
            if time.monotonic() - asked > 1:  # it may have been deleted since
                token_window.ask(self.path, window)
                asked = time.monotonic()
                if self.waiting is not None:
                    self.waiting()
            time.sleep(POLL)


def open_dataset(
    folder: Path, name: str, tokens: Tokens, seq_len: int, seed: int | None = None
) -> TokenDataset:
    """The samples of one file of a data folder, as its manifest says. Raises DataError where a
    file has another size."""
    tokens.require_sizes(folder, seq_len)
    kind = TokenDataset if tokens.packing == ACROSS else RowDataset
    mixed = tokens.mixture if name == TRAIN else ()
    check_tokens(tokens, seq_len=seq_len, global_batch=1)
    if tokens.window and name == TRAIN:
        return WindowDataset(folder, tokens.dtype, seq_len, seed, tokens.window)
    return kind(folder / name, tokens.dtype, seq_len, seed, flags=tokens.flags, mixed=mixed)


def drawn_text(tokens: Tokens, seq_len: int, samples: int) -> str | None:
    """What a run of so many samples draws from each source of a mixture; None without one."""
    if not tokens.mixture:
        return None
    sizes = [one.rows or num_samples(one.tokens, seq_len) for one in tokens.mixture]
    return mixture_text(tokens.mixture, sizes, samples)


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
        return self.global_batch // (self.data_ranks * self.microbatches)

    def indices(self, step: int, data_rank: int, microbatch: int) -> npt.NDArray[np.int64]:
        """Global indices [B] of one microbatch of `step` (counted from 0)."""
        size = self.microbatch_size
        first = step * self.global_batch + (data_rank * self.microbatches + microbatch) * size
        return np.arange(first, first + size)

    def step_indices(self, step: int) -> npt.NDArray[np.int64]:
        return np.arange(step * self.global_batch, (step + 1) * self.global_batch)

    def rank_indices(self, step: int, data_rank: int) -> npt.NDArray[np.int64]:
        """Global indices of all microbatches of one data rank, in their order."""
        size = self.microbatch_size * self.microbatches
        first = step * self.global_batch + data_rank * size
        return np.arange(first, first + size)

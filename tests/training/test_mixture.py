"""Sources are drawn from by weight; every index has one sample, on any data-parallel degree."""

from __future__ import annotations

import json
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.spec.errors import DataError
from hocket.training import data, data_paths
from hocket.training.dataset import BatchOrder, TokenDataset, drawn_text, open_dataset
from hocket.training.mixture import Mixture, slots_of, unweighted, weights_of
from hocket.training.token_manifest import TRAIN, Tokens
from hocket.training.tokenizer import byte_tokenizer

pytest.importorskip("tokenizers")

SEQ = 8


def source(path: Path, letter: str, samples: int) -> Path:
    """A text of so many samples, each of which spells its source and its number."""
    path.write_text("".join(f"{letter}{n:07}" for n in range(samples)))
    return path


def sample_names(dataset: TokenDataset, indices: Any) -> list[str]:
    return ["".join(map(chr, row[:-1])) for row in dataset.rows(indices)]


def prepared(tmp_path: Path, *given: str, **options: Any) -> Tokens:
    values = {"seq_len": SEQ, "global_batch": 4, "eval_fraction": 0.0, **options}
    return data.prepare_data(tmp_path / "data", byte_tokenizer(), given, **values)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(0, 3), st.integers(1, 400))
def test_every_cycle_has_its_share_and_every_epoch_each_sample_once(
    slots: list[int], seed: int, count: int
) -> None:
    sizes = [3 + 5 * n for n in range(len(slots))]
    mixture = Mixture(slots, sizes, seed)
    origin, sample = mixture.samples(np.arange(count))
    drawn: dict[int, list[int]] = {n: [] for n in range(len(slots))}
    number = mixture.drawn(np.arange(count))[1]
    for which, one, draw in zip(origin.tolist(), sample.tolist(), number.tolist(), strict=True):
        drawn[which].append((draw, one))
    for first in range(0, count - mixture.cycle + 1, mixture.cycle):
        cycle = Counter(origin[first : first + mixture.cycle].tolist())
        assert [cycle[n] for n in range(len(slots))] == slots
    assert mixture.taken(count) == tuple(len(one) for one in drawn.values())
    for which, pairs in drawn.items():
        in_cycle = count % mixture.cycle == 0
        numbers = sorted(draw for draw, _ in pairs)
        if in_cycle:  # draws of a source have no holes
            assert numbers == list(range(len(numbers)))
        assert len(set(numbers)) == len(numbers)
        for epoch in range(len(numbers) // sizes[which] if in_cycle else 0):
            here = [one for draw, one in pairs if draw // sizes[which] == epoch]
            assert sorted(here) == list(range(sizes[which]))


def test_no_sample_is_repeated_or_skipped_when_the_data_ranks_change(tmp_path: Path) -> None:
    """Counted by what the rows hold: 2 data ranks for 7 steps, then 4, then 1."""
    a, b = source(tmp_path / "a.txt", "a", 141), source(tmp_path / "b.txt", "b", 61)
    tokens = prepared(tmp_path, f"{a}:0.7", f"{b}:0.3")
    dataset = open_dataset(tmp_path / "data", TRAIN, tokens, SEQ, seed=3)
    seen: list[str] = []
    for step in range(50):
        ranks = 2 if step < 7 else 4 if step < 20 else 1
        order = BatchOrder(4, ranks)
        if step in (7, 20):  # as a new start opens it
            dataset = open_dataset(tmp_path / "data", TRAIN, tokens, SEQ, seed=3)
        for rank in range(ranks):
            seen += sample_names(dataset, order.rank_indices(step, rank))
        cursor = dataset.cursor(4 * (step + 1))
        counts = Counter(name[0] for name in seen)
        assert cursor["sources"] == {str(a): counts["a"], str(b): counts["b"]}
    counts = Counter(seen)
    assert sum(counts.values()) == 200
    assert sum(n for name, n in counts.items() if name[0] == "a") == 140
    assert set(counts.values()) == {1}
    # The epoch of the one source ends, and each of its samples has come once.
    more = [*seen, *sample_names(dataset, np.arange(200, 210))]
    assert sum(name[0] == "b" for name in more) == 63
    assert max(Counter(more).values()) == 2
    assert len({name for name in more if name[0] == "b"}) == 61
    text = drawn_text(tokens, SEQ, 200)
    assert text is not None
    assert "70.00% of the samples, 140 of 200; it has 141" in text


def test_a_mixture_of_conversations_is_rows_of_one_source_each(tmp_path: Path) -> None:
    files = []
    for letter, many in (("a", 30), ("b", 20)):
        file = tmp_path / f"{letter}.jsonl"
        file.write_text("".join(
            json.dumps({"prompt": f"{letter}{n:03}", "completion": letter * 3}) + "\n"
            for n in range(many)
        ))  # fmt: skip
        files.append(f"{file}:{1 if letter == 'a' else 3}")
    tokens = prepared(tmp_path, *files, seq_len=24, eval_fraction=0.1)
    dataset = open_dataset(tmp_path / "data", TRAIN, tokens, 24, seed=1)
    assert tokens.flags
    assert [one.slots for one in tokens.mixture] == [1, 3]
    for first in range(0, 40, 4):
        ids = dataset.batch(np.arange(first, first + 4)).ids
        rows = ["".join(chr(i) for i in row if i < 128) for row in ids]
        assert sorted("ab"["b" in row] for row in rows) == ["a", "b", "b", "b"]
        assert not any("a" in row and "b" in row for row in rows)
    assert len(open_dataset(tmp_path / "data", "valid.bin", tokens, 24)) > 0


def test_the_last_number_is_a_weight_and_nothing_else_is(tmp_path: Path) -> None:
    for text, found in {
        "a.txt": ("a.txt", ""), "a.txt:0.7": ("a.txt", "0.7"), "a:.5": ("a", ".5"),
        "o/n:train": ("o/n:train", ""), "o/n:train:2": ("o/n:train", "2"),
        "o/n:train[:100]": ("o/n:train[:100]", ""),
        "o/n:train[:100]:0.25": ("o/n:train[:100]", "0.25"),
        "o/n/sub:test[:5]@v1.0:3": ("o/n/sub:test[:5]@v1.0", "3"),
        "o/n@v1.0": ("o/n@v1.0", ""), "a:1e-2": ("a:1e-2", ""), "a:-1": ("a:-1", ""),
    }.items():  # fmt: skip
        assert unweighted(text) == found, text
    odd = source(tmp_path / "log:5", "a", 9)
    assert unweighted(str(odd)) == (str(odd), "")
    assert data_paths.pinned_path(f"{odd}:2") == f"{odd}:2"
    (one,) = data_paths.find_sources([f"{odd}:2"]).sources
    assert one.path == odd


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["a:1", "b"], "data b has no weight"),
        (["a:1", "b:0"], "must be above 0"),
        (["a:1", "a:2"], "named twice"),
    ],
)
def test_weights_that_cannot_be_are_rejected(given: list[str], error: str) -> None:
    with pytest.raises(DataError, match=error):
        weights_of(given)


def test_cycles_are_as_short_as_the_weights_allow() -> None:
    assert slots_of([Fraction("0.7"), Fraction("0.3")]) == (7, 3)
    assert slots_of([Fraction(2), Fraction(1), Fraction(1)]) == (2, 1, 1)
    rounded = slots_of([Fraction("0.33333"), Fraction("0.66667")])
    assert rounded == (3333, 6667)
    with pytest.raises(DataError, match="smallest weight is 1e-06"):
        slots_of([Fraction(1), Fraction("0.000001")])


def test_a_source_too_short_for_one_sample_is_named(tmp_path: Path) -> None:
    a, b = source(tmp_path / "a.txt", "a", 50), tmp_path / "b.txt"
    b.write_text("b")
    with pytest.raises(DataError, match="this source of the mixture holds 2 tokens"):
        prepared(tmp_path, f"{a}:1", f"{b}:1")


def test_corrupt_records_are_skipped_with_file_and_line_up_to_a_limit(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    lines = [json.dumps({"text": f"text {n} " * 9}) for n in range(30)]
    lines[4], lines[9], lines[20] = '{"text": "cut', "[1, 2]", '{"other": "field"}'
    file.write_text("\n".join(lines))
    with pytest.raises(DataError, match="line 5 is not JSON"):
        prepared(tmp_path, str(file))
    with pytest.raises(DataError, match=r"line 21 has no text field.*2 corrupt records before it"):
        prepared(tmp_path, str(file), max_corrupt_records=2)
    tokens = prepared(tmp_path, str(file), max_corrupt_records=3)
    assert tokens.corrupt_records == 3
    found = [re.search(r"line (\d+) ", note) for note in tokens.corrupt]
    assert [match and match[1] for match in found] == ["5", "10", "21"]
    assert all(str(file) in note for note in tokens.corrupt)
    good = tmp_path / "good.jsonl"
    good.write_text("\n".join(line for n, line in enumerate(lines) if n not in (4, 9, 20)))
    (tmp_path / "other").mkdir()
    clean = prepared(tmp_path / "other", str(good))
    assert (tmp_path / "data" / TRAIN).read_bytes() == (
        tmp_path / "other" / "data" / TRAIN
    ).read_bytes()
    assert clean.corrupt_records == 0
    assert Tokens.load(tmp_path / "data").corrupt == tokens.corrupt

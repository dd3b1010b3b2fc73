"""Documents become token files once; every layout draws the same global batch from them."""

from __future__ import annotations

import csv
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.spec.errors import DataError
from hocket.training import data, data_paths, data_sources
from hocket.training.data_paths import COMPRESSED
from hocket.training.dataset import BatchOrder, TokenDataset
from hocket.training.order import permuted
from hocket.training.tokenizer import byte_tokenizer, train_tokenizer

pytest.importorskip("tokenizers")

BYTES = byte_tokenizer()
TEXTS = [f"document {i}: " + "abc def " * (5 + i % 7) for i in range(60)]


def write_lines(path, texts=TEXTS, field="text"):
    path.write_text("".join(json.dumps({field: t, "n": i}) + "\n" for i, t in enumerate(texts)))
    return path


def documents(*paths, field="text"):
    return list(data_sources.source_documents(data_paths.find_sources(paths).sources, field))


def prepared(tmp_path, paths, **changes):
    options = {"seq_len": 16, "global_batch": 4, **changes}
    return data.prepare_data(tmp_path / "data", changes.pop("tokenizer", BYTES), paths, **{
        k: v for k, v in options.items() if k != "tokenizer"
    })  # fmt: skip


# --- the permutation -----------------------------------------------------------------------


@given(st.integers(1, 3000), st.integers(-5, 5), st.integers(0, 3))
def test_order_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    found = permuted(np.arange(size), size, (seed, epoch))
    assert np.array_equal(np.sort(found), np.arange(size))


def test_order_depends_on_every_part_of_its_key_and_on_nothing_else() -> None:
    first = permuted(np.arange(500), 500, (1, 2))
    assert np.array_equal(first[100:200], permuted(np.arange(100, 200), 500, (1, 2)))
    for other in ((1, 3), (2, 2), (2, 1)):
        assert (first != permuted(np.arange(500), 500, other)).sum() > 400
    # Neighbours are torn apart: the mean distance of a random order of n is n / 3.
    assert abs(np.abs(np.diff(first)).mean() - 500 / 3) < 25


# --- sources -------------------------------------------------------------------------------


def test_every_kind_of_source_gives_the_same_documents(tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    datasets = pytest.importorskip("datasets")
    parquet = pytest.importorskip("pyarrow.parquet")

    (tmp_path / "text").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "text" / f"{i:03}.txt").write_text(text)
    lines = write_lines(tmp_path / "lines.jsonl")
    (tmp_path / "array.json").write_text(json.dumps([{"text": t} for t in TEXTS]))
    with gzip.open(tmp_path / "lines.jsonl.gz", "wt") as file:
        file.write(lines.read_text())
    parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "table.parquet")
    dataset = datasets.Dataset.from_dict({"text": TEXTS})
    dataset.save_to_disk(tmp_path / "dataset")
    datasets.DatasetDict({"test": dataset, "train": dataset}).save_to_disk(tmp_path / "both")
    pytest.importorskip("pyarrow.feather").write_feather(
        pyarrow.table({"text": TEXTS}), tmp_path / "table.feather"
    )
    with pyarrow.OSFile(str(tmp_path / "stream.arrow"), "wb") as sink:
        table = pyarrow.table({"text": TEXTS})
        with pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    for suffix, delimiter in ((".csv", ","), (".tsv", "\t")):
        with (tmp_path / f"table{suffix}").open("w", newline="") as file:
            rows = csv.writer(file, delimiter=delimiter)
            rows.writerows([("id", "text"), *((f"{i:03}", t) for i, t in enumerate(TEXTS))])
    for codec in ("zst", "bz2"):
        for name in ("lines.jsonl", "table.csv"):
            with pyarrow.output_stream(
                str(tmp_path / f"{name}.{codec}"), compression=COMPRESSED[f".{codec}"]
            ) as out:
                out.write((tmp_path / name).read_bytes())
    for name in ("text", "lines.jsonl", "array.json", "lines.jsonl.gz", "table.parquet",
                 "dataset", "both", "table.feather", "stream.arrow", "table.csv", "table.tsv",
                 "lines.jsonl.zst", "table.csv.zst", "lines.jsonl.bz2",
                 "table.csv.bz2"):  # fmt: skip
        assert documents(tmp_path / name) == TEXTS, name
    assert documents(tmp_path / "text" / "001.txt", lines) == [TEXTS[1], *TEXTS]


def test_a_directory_is_walked_in_order_without_what_is_no_text(tmp_path) -> None:
    for name, content in {
        "b/2.md": b"two", "a.txt": b"one", "c.txt": b"  \n", "d.dat": b"\xff\xfe\x00",
        "z.py": b"three", ".hidden/x.txt": b"no", "__pycache__/y.txt": b"no",
        "settings.json": b"{}", "e.so": b"no", "f": b"zero\x00byte",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert documents(tmp_path) == ["one", "two", "three"]


def repository(path: Path, card: str = "# A card\n") -> Path:
    """A folder as `git clone` of a dataset repository leaves it."""
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    (path / "data").mkdir(parents=True)
    (path / "README.md").write_text(card)
    (path / "loader.py").write_text("raise SystemExit('executed')")
    for split in ("test", "train", "validation"):
        table = pyarrow.table({"text": [f"{split} {text}" for text in TEXTS]})
        parquet.write_table(table, path / "data" / f"{split}-00000-of-00001.parquet")
    return path


def test_a_dataset_repository_is_read_as_datasets_reads_it(tmp_path) -> None:
    """Its card, scripts and other splits once were trained on too."""
    datasets = pytest.importorskip("datasets")
    path = repository(tmp_path / "repo")
    reference = datasets.load_dataset(str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert documents(path) == list(reference["text"]) == [f"train {text}" for text in TEXTS]
    (notice,) = data_paths.find_sources([path]).notices
    assert "data/train-00000-of-00001.parquet (split 'train')" in notice
    for name in ("README.md", "loader.py", "data/test-00000-of-00001.parquet"):
        assert name in notice.partition("left out")[2] or "more" in notice


def test_a_dataset_card_says_what_the_splits_are(tmp_path) -> None:
    pytest.importorskip("datasets")
    card = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n"
    path = repository(tmp_path / "repo", f"{card}    path: data/val*.parquet\n---\n")
    assert documents(path) == [f"validation {text}" for text in TEXTS]
    two = "".join(f"- config_name: {c}\n  data_files: data/{c}*\n" for c in ("train", "test"))
    (path / "README.md").write_text(f"---\nconfigs:\n{two}---\n")
    with pytest.raises(DataError, match="needs one of its subsets: train, test"):
        documents(path)


def test_a_directory_of_csv_needs_no_split_in_its_names(tmp_path) -> None:
    pytest.importorskip("datasets")
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text(f'text,n\n"{name}, and ""more""",1\n')
    assert documents(tmp_path) == ['a, and "more"', 'b, and "more"']


def refusals(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin.txt").write_bytes("é".encode("latin1"))
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "corpus.txt").write_text("some text")
    write_lines(tmp_path / "content.jsonl", field="content")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 but not really")
    (tmp_path / "mixed").mkdir()
    write_lines(tmp_path / "mixed" / "a.jsonl")
    (tmp_path / "mixed" / "notes.md").write_text("notes")
    (tmp_path / "tests").mkdir()
    write_lines(tmp_path / "tests" / "test.jsonl")
    (tmp_path / "sheet.xlsx").write_bytes(b"PK")
    (tmp_path / "torn.csv").write_text("text,n\na,1\nb,2,3\n")
    return [
        ([tmp_path / "mixed"], r"both records \(a.jsonl\) and text \(notes.md\)", "a.jsonl"),
        ([tmp_path / "tests"], "no split 'train'; its splits: test", "tests:test"),
        ([tmp_path / "sheet.xlsx"], "files of .xlsx are not read", "convert"),
        ([tmp_path / "torn.csv"], "Expected 2 columns, got 3", None),
        ([], "no data is given", None),
        ([tmp_path / "corpsu.txt"], "no such file", "corpus.txt"),
        ([tmp_path / "empty"], r"no readable data \(text, .*\.parquet", None),
        ([tmp_path / "latin.txt"], "not UTF-8 text", "iconv"),
        ([tmp_path / "bad.jsonl"], "line 2 is not JSON", None),
        ([tmp_path / "content.jsonl"], "no text field 'text'; it has 'content'", "content"),
        ([tmp_path / "broken.parquet"], "cannot be read", None),
    ]


def test_bad_sources_are_refused(tmp_path) -> None:
    for paths, says, hint in refusals(tmp_path):
        with pytest.raises(DataError, match=says) as caught:
            documents(*paths)
        assert hint is None or hint in (caught.value.hint or ""), says


@pytest.mark.parametrize("again", ["a.txt", "./a.txt", "link.txt", "all", "a.txt:2"])
def test_a_file_is_read_once(tmp_path, monkeypatch, again: str) -> None:
    """By whatever name: what is held out of it would be trained on in its copy."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("one melody")
    Path("b.txt").write_text("two voices")
    Path("link.txt").symlink_to("a.txt")
    Path("all").mkdir()
    Path("all/b.txt").write_text("rests")
    Path("all/a.txt").symlink_to("../a.txt")
    once, other = data_paths.find_sources(["a.txt"]), data_paths.find_sources(["b.txt"])
    data_paths.reject_repeated(once, other)
    data_paths.reject_repeated(data_paths.find_sources(["a.txt", "b.txt"]))
    with pytest.raises(DataError, match="in --data twice"):
        data_paths.reject_repeated(data_paths.find_sources(["a.txt", again]))
    with pytest.raises(DataError, match="both in --data and in --eval-data"):
        data_paths.reject_repeated(once, data_paths.find_sources([again]))


def encoded(path: Path, encoding: str) -> bytes:
    if path.suffix == ".jsonl":
        return "".join(
            json.dumps({"text": f"é {t}"}, ensure_ascii=False) + "\n" for t in TEXTS
        ).encode(encoding)
    return ("text\n" + "\n".join(f"é {t}" for t in TEXTS) + "\n").encode(encoding)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin1"])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv"])
def test_other_encodings_are_rejected_with_the_command_that_converts_them(
    suffix: str, encoding: str, tmp_path: Path
) -> None:
    path = tmp_path / f"my data{suffix}"
    path.write_bytes(encoded(path, encoding))
    with pytest.raises(DataError, match=r"UTF-?8") as caught:
        documents(path)
    command = str(caught.value.hint).partition("  (")[0]
    assert command.startswith("iconv -f ")
    subprocess.run(command, shell=True, check=True, timeout=100)  # as it is printed
    path.write_bytes(encoded(path, "utf-8-sig"))  # which is read as it is
    assert documents(tmp_path / f"my data.utf8{suffix}") == documents(path)


def test_a_record_that_is_not_utf8_is_skipped_only_if_asked(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(b'{"text": "one"}\n{"text": "caf\xe9"}\n{"text": "two"}\n')
    with pytest.raises(DataError, match="line 2, is not UTF-8 text"):
        documents(path)
    some = data_sources.CorruptRecords(1)
    sources = data_paths.find_sources([path]).sources
    assert list(data_sources.source_documents(sources, "text", some)) == ["one", "two"]


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv"])
@pytest.mark.parametrize(
    ("contents", "name", "hint"),
    [
        (gzip.compress(b"text", mtime=0), "gzip", "mv {file} {file}.gz"),
        (b"PAR1" + bytes(20), "parquet", "mv {file} {stem}.parquet"),
        (b"PK\3\4" + bytes(20), "zip", "unzip {file}"),
        (b"%PDF-1.7\n\xe2\xe3", "PDF", "pdftotext {file} {stem}.txt"),
    ],
)
def test_other_formats_are_rejected_by_name(contents, name, hint, suffix, tmp_path) -> None:
    path = tmp_path / f"data{suffix}"
    path.write_bytes(contents)
    with pytest.raises(DataError, match=f"holds {name}") as caught:
        documents(path)
    assert hint.format(file=path, stem=tmp_path / "data") in str(caught.value.hint)


def test_wrong_column_and_wrong_type_are_refused(tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"body": ["a"], "n": [1]}), path)
    with pytest.raises(DataError, match="it has 'body', 'n'"):
        documents(path)
    with pytest.raises(DataError, match="holds int64"):
        documents(path, field="n")
    assert documents(path, field="body") == ["a"]


# --- token files ---------------------------------------------------------------------------


def test_files_hold_each_document_once_with_an_end(tmp_path) -> None:
    tokens = prepared(tmp_path, [write_lines(tmp_path / "x.jsonl")], eval_fraction=0.1)
    assert tokens.dtype == "uint16"
    assert (tokens.train_documents + tokens.valid_documents) == len(TEXTS)
    found = []
    for name, count in (("tokens.bin", tokens.train_tokens), ("valid.bin", tokens.valid_tokens)):
        ids = np.fromfile(tmp_path / "data" / name, tokens.dtype)
        assert len(ids) == count
        assert ids[-1] == BYTES.eos_id
        ends = np.flatnonzero(ids == BYTES.eos_id)
        parts = np.split(ids, ends + 1)[:-1]
        found.append([BYTES.decode(part) for part in parts])
    assert len(found[1]) == tokens.valid_documents > 1
    assert sorted(found[0] + found[1]) == sorted(TEXTS)
    assert found[0] == [t for t in TEXTS if t not in set(found[1])], "the order is kept"
    share = tokens.valid_tokens / (tokens.train_tokens + tokens.valid_tokens)
    assert 0.05 < share < 0.16


def test_one_long_document_holds_out_its_end(tmp_path) -> None:
    text = "".join(map(chr, range(32, 127))) * 40
    (tmp_path / "one.txt").write_text(text)
    tokens = prepared(tmp_path, [tmp_path / "one.txt"], eval_fraction=0.1)
    both = [np.fromfile(tmp_path / "data" / n, tokens.dtype) for n in ("tokens.bin", "valid.bin")]
    assert BYTES.decode(np.concatenate(both)) == text
    assert len(both[1]) == round(0.1 * (len(text) + 1))
    assert (tokens.train_documents, tokens.valid_documents) == (1, 1)


def test_nothing_is_held_out_if_asked(tmp_path) -> None:
    tokens = prepared(tmp_path, [write_lines(tmp_path / "x.jsonl")], eval_fraction=0)
    assert (tokens.valid_tokens, tokens.valid_documents) == (0, 0)
    assert len(TokenDataset(tmp_path / "data" / "valid.bin", tokens.dtype, 16)) == 0


def test_prepared_once_and_again_when_something_changes(tmp_path) -> None:
    path = write_lines(tmp_path / "x.jsonl")
    first = prepared(tmp_path, [path])
    stamp = (tmp_path / "data" / "tokens.bin").stat().st_mtime_ns
    assert prepared(tmp_path, [path]) == first
    assert (tmp_path / "data" / "tokens.bin").stat().st_mtime_ns == stamp
    other = train_tokenizer(TEXTS, 300)
    assert prepared(tmp_path, [path], tokenizer=other).key != first.key
    write_lines(path, TEXTS[:-1])
    os.utime(path, ns=(1, 1))
    assert prepared(tmp_path, [path]).train_tokens != first.train_tokens
    (tmp_path / "data" / "tokens.bin").write_bytes(b"cut short")
    again = prepared(tmp_path, [path])
    assert (tmp_path / "data" / "tokens.bin").stat().st_size == 2 * again.train_tokens
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == [
        "tokenizer.json", "tokenizer_config.json", "tokens.bin", "tokens.json", "valid.bin",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("append", r"one.jsonl had [\d,]+ bytes and has"), ("remove", "No such file"),
        ("replace", "as before, and was written again"), ("held out", r"other.txt had [\d,]+"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("packing", ["across", "documents"])
def test_data_that_changes_while_it_is_read_is_rejected(packing, how, says, tmp_path) -> None:
    path, other = write_lines(tmp_path / "one.jsonl"), tmp_path / "other.txt"
    other.write_text(" ".join(TEXTS))

    def change(done: int, total: int) -> None:
        if how == "remove":
            path.unlink(missing_ok=True)
        elif how == "replace":
            new = tmp_path / "new"
            new.write_text(path.read_text().replace("abc", "xyz"))
            os.utime(new, ns=(1, 1))
            new.replace(path)
        else:
            with (path if how == "append" else other).open("a") as file:
                file.write(f'{{"text": "{TEXTS[0]}"}}\n')

    options = {"packing": packing, "progress": change}
    with pytest.raises(DataError, match=f"was changed while it was read: .*{says}"):
        prepared(tmp_path, [path], eval_paths=[other], **options)
    assert not (tmp_path / "data" / "tokens.json").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"global_batch": 1000}, r"holds \d+ tokens; one step takes 1000 sequences of 16"),
        ({"seq_len": 5000, "global_batch": 1}, "needs 5001"),
        ({"model_vocab_size": 256}, "token id 256, the model's vocabulary has 256 rows"),
        ({"text_field": "txt"}, "no text field 'txt'"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(changes, says, tmp_path) -> None:
    with pytest.raises(DataError, match=says) as caught:
        prepared(tmp_path, [write_lines(tmp_path / "x.jsonl")], **changes)
    assert caught.value.hint


def test_empty_text_is_refused_and_leaves_nothing(tmp_path) -> None:
    (tmp_path / "x.txt").write_text(" \n")
    with pytest.raises(DataError, match="no text in it"):
        prepared(tmp_path, [tmp_path / "x.txt"])
    assert list((tmp_path / "data").iterdir()) == []


# --- samples and batches -------------------------------------------------------------------


@pytest.fixture
def dataset(tmp_path) -> TokenDataset:
    np.arange(16 * 50 + 1, dtype=np.uint16).tofile(tmp_path / "t.bin")
    return TokenDataset(tmp_path / "t.bin", "uint16", 16, seed=3)


def test_samples_overlap_by_one_token(dataset) -> None:
    assert len(dataset) == 50
    rows = dataset.rows(np.arange(50))
    assert rows.shape == (50, 17)
    assert (np.diff(rows, axis=1) == 1).all()
    assert sorted(rows[:, 0]) == list(range(0, 800, 16))


def test_each_epoch_has_its_own_order_of_all_samples(dataset) -> None:
    epochs = dataset.order(np.arange(150)).reshape(3, 50)
    assert (np.sort(epochs, axis=1) == np.arange(50)).all()
    assert (epochs[0] != epochs[1]).sum() > 40
    # An index means the same sample whenever it is asked for: a resumed run needs the step alone.
    assert np.array_equal(dataset.order(np.arange(40, 70)), epochs.reshape(-1)[40:70])


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 3)])
def test_every_layout_draws_the_same_global_batch(dataset, ranks, microbatches) -> None:
    whole = BatchOrder(24)
    split = BatchOrder(24, ranks, microbatches)
    for step in (0, 3):
        together = [
            split.indices(step, rank, m) for rank in range(ranks) for m in range(microbatches)
        ]
        assert np.array_equal(np.concatenate(together), whole.indices(step, 0, 0))
        by_rank = [split.rank_indices(step, rank) for rank in range(ranks)]
        assert np.array_equal(np.concatenate(by_rank), whole.indices(step, 0, 0))


def test_data_needs_no_torch() -> None:
    code = "import sys, hocket.training.data, hocket.training.tokenizer as t; t.byte_tokenizer();"
    code += "assert not {'torch', 'transformers', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

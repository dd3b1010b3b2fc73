"""Tokenizers give back the text they encoded, from bytes, trained, and read again from files."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.spec.errors import DataError, ModelError, OptionError
from hocket.training import tokenizer as tk

pytest.importorskip("tokenizers")

TEXT = "def f(x):\n\treturn x  # héllo, 你好 🙂\r\n\n   <|endoftext|> end\n"


@pytest.fixture(scope="module")
def trained() -> tk.Tokenizer:
    return tk.train_tokenizer([TEXT * 20, "the cat sat on the mat " * 50], 300)


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=60))
def test_bytes_round_trip(text: str) -> None:
    found = _BYTES.encode_batch([text])[0]
    assert found.tolist() == list(text.encode()) == _BYTES.encode(text)
    assert _BYTES.decode(found) == text


_BYTES = tk.byte_tokenizer()


def test_bytes_has_an_end_token_after_the_256() -> None:
    assert (_BYTES.vocab_size, _BYTES.eos_id) == (257, 256)
    assert _BYTES.encode("<|endoftext|>", special=True) == [256]
    assert _BYTES.decode([104, 105, 256]) == "hi"
    assert _BYTES.decode([104, 105, 256], special=True) == "hi<|endoftext|>"


def test_trained_round_trip_and_shorter_than_bytes(trained: tk.Tokenizer) -> None:
    ids = trained.encode(TEXT)
    assert trained.decode(ids) == TEXT
    assert len(ids) < len(TEXT.encode())
    assert trained.eos_id == trained.vocab_size - 1
    assert max(ids) < trained.eos_id, "the text of the end token must not become the end token"


def test_trained_is_the_same_again(trained: tk.Tokenizer) -> None:
    again = tk.train_tokenizer([TEXT * 20, "the cat sat on the mat " * 50], 300)
    assert again.hash == trained.hash


def test_long_texts_are_cut_and_joined_unchanged(trained: tk.Tokenizer) -> None:
    text = "".join(f"line {i} of a long file\n" for i in range(20_000))
    found, short = trained.encode_batch([text, "ab"])
    assert trained.decode(found) == text
    assert trained.decode(short) == "ab"
    one_line = "x" * 400_000
    assert trained.decode(trained.encode_batch([one_line])[0]) == one_line


@pytest.mark.parametrize("kind", ["bytes", "trained"])
def test_saved_and_loaded(kind: str, trained: tk.Tokenizer, tmp_path) -> None:
    first = _BYTES if kind == "bytes" else trained
    first.save(tmp_path)
    second = tk.Tokenizer.load(tmp_path)
    assert (second.kind, second.eos_id, second.vocab_size) == (kind, first.eos_id, first.vocab_size)
    assert second.hash == first.hash
    assert np.array_equal(second.encode_batch([TEXT])[0], first.encode_batch([TEXT])[0])
    second.save(tmp_path / "copy")
    assert tk.Tokenizer.load(tmp_path / "copy").kind == kind


@pytest.mark.torch
def test_transformers_loads_what_is_saved(trained: tk.Tokenizer, tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    trained.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = TEXT.replace(tk.EOS, "")
    assert theirs(text)["input_ids"] == trained.encode(text)
    assert theirs.decode(theirs(text)["input_ids"]) == text
    assert theirs.eos_token_id == trained.eos_id


def test_end_token_comes_from_settings_or_configuration(trained: tk.Tokenizer, tmp_path) -> None:
    trained.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert tk.Tokenizer.load(tmp_path).eos_id == 7
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": tk.EOS}})
    )
    assert tk.Tokenizer.load(tmp_path).eos_id == trained.eos_id


def test_resolve(trained: tk.Tokenizer, tmp_path) -> None:
    assert tk.resolve_tokenizer(None).kind == "bytes"
    assert tk.resolve_tokenizer(None, model_dir=tmp_path).kind == "bytes"
    trained.save(tmp_path)
    assert tk.resolve_tokenizer(None, model_dir=tmp_path).hash == trained.hash
    assert tk.resolve_tokenizer(str(tmp_path)).hash == trained.hash
    assert tk.resolve_tokenizer("bytes", model_dir=tmp_path).kind == "bytes"
    assert (
        tk.resolve_tokenizer("train", texts=lambda: [TEXT * 20], vocab_size=280).vocab_size == 280
    )


@pytest.mark.parametrize(
    ("choice", "error", "says"),
    [
        ("byte", OptionError, "'byte'"),
        ("model", OptionError, "bare configuration"),
        ("train", DataError, "no text"),
    ],
)
def test_refused(choice: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        tk.resolve_tokenizer(choice, texts=list)


def test_unreadable_directory_is_refused(tmp_path) -> None:
    with pytest.raises(ModelError, match="holds no tokenizer"):
        tk.Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        tk.Tokenizer.load(tmp_path)
    with pytest.raises(OptionError, match="vocab_size is 256"):
        tk.train_tokenizer(["abc"], 256)


@pytest.mark.torch
def test_a_directory_with_older_files_is_converted(trained: tk.Tokenizer, tmp_path) -> None:
    pytest.importorskip("transformers")
    model = json.loads((save_of(trained, tmp_path / "new") / "tokenizer.json").read_text())["model"]
    old = tmp_path / "old"
    old.mkdir()
    vocab = {**model["vocab"], tk.EOS: trained.eos_id}
    (old / "vocab.json").write_text(json.dumps(vocab))
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    (old / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (old / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    found = tk.Tokenizer.load(old)
    text = TEXT.replace(tk.EOS, "")
    assert found.encode(text) == trained.encode(text)
    assert found.decode(found.encode(text)) == text
    assert (found.eos_id, found.kind) == (trained.eos_id, "model")


def save_of(tokenizer: tk.Tokenizer, to):
    tokenizer.save(to)
    return to

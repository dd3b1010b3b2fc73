"""Held-out data of its own, epochs, and templates by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.models.chat_template import ChatTemplates, file_of, shipped
from hocket.spec.errors import DataError, HocketError, OptionError
from hocket.training import data, data_paths
from hocket.training.tokenizer import byte_tokenizer

pytestmark = pytest.mark.train
pytest.importorskip("tokenizers")

SEEN = ["one melody is dealt ", "note by note ", "to several voices"]
UNSEEN = ["one sounding ", "while another rests"]


def texts(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


def chats(path: Path, answers: list[str]) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": answer}]}
        for answer in answers
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepared(tmp_path: Path, train: Path, valid: Path, **more: Any) -> tuple[Path, Any]:
    folder = tmp_path / "data"
    options = {"seq_len": 8, "global_batch": 1, **more}
    return folder, data.prepare_data(
        folder, byte_tokenizer(), [train], eval_paths=[valid], **options
    )


def ids_of(file: Path, tokens: Any) -> list[int]:
    return np.fromfile(file, tokens.dtype).tolist()


def test_all_of_the_data_is_trained_on_and_all_of_the_other_is_held_out(tmp_path: Path) -> None:
    folder, tokens = prepared(
        tmp_path, texts(tmp_path / "a.jsonl", SEEN), texts(tmp_path / "b.jsonl", UNSEEN)
    )
    for name, lines in (("tokens.bin", SEEN), ("valid.bin", UNSEEN)):
        wanted = [token for line in lines for token in [*line.encode(), tokens.eos_id]]
        assert ids_of(folder / name, tokens) == wanted
    assert (tokens.train_documents, tokens.valid_documents) == (3, 2)
    assert [row[0] for row in tokens.eval_sources] == [str(tmp_path / "b.jsonl")]


def test_of_chats_too(tmp_path: Path) -> None:
    template = ChatTemplates({"default": file_of("chatml").read_text()}, marked=True)
    folder, tokens = prepared(
        tmp_path, chats(tmp_path / "a.jsonl", SEEN), chats(tmp_path / "b.jsonl", UNSEEN),
        templates=template, seq_len=128, packing="none",
    )  # fmt: skip
    rows = np.fromfile(folder / "valid.bin", tokens.dtype).reshape(-1, 128)
    held_out = [bytes(row[row < 256].astype(np.uint8)).decode() for row in rows]
    start = "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    assert sorted(held_out) == sorted(f"{start}{line}<|im_end|>\n" for line in UNSEEN)
    assert tokens.train_rows == 3


@pytest.mark.parametrize("packing", ["documents", "none"])
def test_long_documents_are_evaluated_or_trained_on_but_not_both(
    tmp_path: Path, packing: str
) -> None:
    """Text longer than a row is in several rows: all of them on the same side."""
    lines = [chr(97 + number) * (5 + 3 * number) for number in range(20)]
    files = ("tokens.bin", "valid.bin")

    def letters(name: str, written: list[str]) -> list[set[int]]:
        folder = tmp_path / name
        folder.mkdir()
        tokens = data.prepare_data(
            folder, byte_tokenizer(), [texts(tmp_path / f"{name}.jsonl", written)],
            seq_len=8, global_batch=1, eval_fraction=0.2, packing=packing,
        )  # fmt: skip
        return [set(ids_of(folder / file, tokens)) - {tokens.eos_id} for file in files]

    train, valid = letters("several", lines)
    assert valid
    assert not train & valid
    assert train | valid == set("".join(lines).encode())
    assert letters("one", [lines[0] * 30]) == [{97}, {97}]  # its end


def test_too_little_to_evaluate_on_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds 3 tokens"):
        prepared(tmp_path, texts(tmp_path / "a.jsonl", SEEN), texts(tmp_path / "b.jsonl", ["ab"]))


def test_another_held_out_set_makes_the_tokens_again(tmp_path: Path) -> None:
    train = texts(tmp_path / "a.jsonl", SEEN)
    _, first = prepared(tmp_path, train, texts(tmp_path / "b.jsonl", UNSEEN))
    _, second = prepared(tmp_path, train, texts(tmp_path / "c.jsonl", SEEN[:2]))
    assert first.key != second.key
    assert second.valid_documents == 2


@pytest.mark.parametrize(("epochs", "steps"), [(1, 3), (2, 5), (0.5, 2), (0.01, 1)])
def test_steps_of_epochs(tmp_path: Path, epochs: float, steps: int) -> None:
    texts(tmp_path / "a.jsonl", ["x" * 80])  # 81 tokens with the end: ten sequences of eight
    folder = tmp_path / "data"
    tokens = data.prepare_data(
        folder, byte_tokenizer(), [tmp_path / "a.jsonl"], seq_len=8, global_batch=4, eval_fraction=0
    )
    assert data.steps_of(tokens, epochs, seq_len=8, global_batch=4) == steps


def test_patterns_and_what_matches_nothing(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "c.txt"):
        texts(tmp_path / name, SEEN)
    found = data_paths.expanded_paths([tmp_path / "*.jsonl", tmp_path / "c.txt"])
    assert [Path(path).name for path in found] == ["a.jsonl", "b.jsonl", "c.txt"]
    assert len(data_paths.expanded_paths([str(tmp_path / "[ac].*")])) == 2
    assert data_paths.expanded_paths(["org/name[:20]"]) == ("org/name[:20]",)
    with pytest.raises(DataError, match="matches no file"):
        data_paths.expanded_paths([tmp_path / "*.parquet"])


TALK = [
    {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "go"},
]  # fmt: skip
RENDERED = {
    "chatml": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
    "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n",
    "llama-3": "<s><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nhello<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\ngo<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "zephyr": "<|user|>\nhi</s>\n<|assistant|>\nhello</s>\n<|user|>\ngo</s>\n<|assistant|>\n",
}


@pytest.mark.parametrize("name", sorted(RENDERED))
def test_a_template_by_name_writes_its_format(name: str) -> None:
    assert sorted(RENDERED) == shipped()
    words = {"bos_token": "<s>", "eos_token": "</s>"}
    templates = ChatTemplates({"default": file_of(name).read_text()}, words)
    assert templates.render(TALK, most=1000) == RENDERED[name]
    assert templates.marks


def test_an_unknown_template_names_the_nearest() -> None:
    with pytest.raises(OptionError) as caught:
        file_of("chatlm")
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("--chat-template-file chatml")


def test_lengths_that_contradict_each_other_are_rejected() -> None:
    from hocket.jobs.request import request

    with pytest.raises(HocketError, match="one of them"):
        request({"model": "tiny-llama", "steps": 3, "epochs": 1.0})
    with pytest.raises(HocketError, match="all that"):
        request({"model": "tiny-llama", "eval_data": "a", "eval_fraction": 0.1})


@pytest.mark.ranks
@pytest.mark.timeout(200)
def test_the_perplexity_of_a_run_is_that_of_transformers(tmp_path: Path) -> None:
    import torch
    import transformers

    import hocket

    train, valid = tmp_path / "a.txt", tmp_path / "b.txt"
    train.write_text("one melody is dealt note by note to several voices. " * 40)
    valid.write_text("one sounding while another rests, and so on. " * 6)
    run = hocket.train(
        "tiny-llama", data=[train], eval_data=[valid], epochs=0.5, seq_len=32, global_batch=8,
        layout="dp2", run=tmp_path / "run",
    )  # fmt: skip
    length = len(train.read_bytes()) + 1
    assert run.steps == math.ceil(0.5 * ((length - 1) // 32) / 8)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/model").eval()
    ids = torch.tensor([*valid.read_bytes(), 256])
    count = (len(ids) - 1) // 32
    inputs = ids[: count * 32].view(count, 32)
    labels = ids[1 : count * 32 + 1].view(count, 32)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(
            model(input_ids=inputs).logits.flatten(0, 1), labels.flatten()
        )
    assert rows[-1]["held_out_loss"] == pytest.approx(float(loss), abs=1e-4)
    assert rows[-1]["held_out_perplexity"] == pytest.approx(float(loss.exp()), rel=1e-3)

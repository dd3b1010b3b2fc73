"""Chats and completions: rendered by the model's template, loss on what the model said alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.models.chat_template import ChatTemplates
from hocket.spec.errors import DataError, HocketError
from hocket.training import data, data_paths
from hocket.training.dataset import IGNORED, BatchOrder, open_dataset
from hocket.training.documents import source_kinds, split_documents
from hocket.training.packing import rows_of
from hocket.training.tokenizer import Tokenizer, byte_tokenizer, train_tokenizer

pytestmark = pytest.mark.train
pytest.importorskip("tokenizers")

TURN = "<{{ m.role }}>{{ m.content }}<end>\n"
PLAIN = (
    "{% for m in messages %}" + TURN + "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>{% generation %}"
    "{{ m.content }}<end>\n{% endgeneration %}{% else %}" + TURN + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('|')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHATS = [
    [("system", "be brief"), ("user", "hi"), ("assistant", "hello"), ("user", "é?"),
     ("assistant", "\n naïve 猫")],
    [("user", "one"), ("assistant", "two")],
    [("user", "long " * 30), ("assistant", "short")],
]  # fmt: skip


def messages(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path: Path, template: str | None = PLAIN, tokenizer: Tokenizer | None = None) -> list[Any]:
    """(ids, learned) of every document."""
    sources = data_paths.find_sources([path]).sources
    templates = None if template is None else ChatTemplates({"default": template}, marked=True)
    found = split_documents(
        sources, source_kinds(sources, "auto"), tokenizer or byte_tokenizer(), templates,
        text_field="text", passed=lambda count: None,
    )  # fmt: skip
    return [(d.ids.tolist(), None if d.learned is None else d.learned.tolist()) for d in found]


def said(found: Any, tokenizer: Tokenizer) -> str:
    ids, learned = found
    return tokenizer.decode([i for i, one in zip(ids, learned, strict=True) if one], special=True)


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
@pytest.mark.parametrize("kind", ["bytes", "trained"])
def test_loss_falls_on_the_assistants_turns_and_nothing_else(kind, template, tmp_path) -> None:
    # Learned from the very texts: its tokens would reach over the turns' beginnings.
    words = ["<assistant>hello<end>\n<user>", "<assistant>\n naïve 猫<end>\n", "<assistant>two"]
    tokenizer = byte_tokenizer() if kind == "bytes" else train_tokenizer(words * 50, 400)
    path = write_lines(tmp_path / "x.jsonl", [{"messages": messages(c)} for c in CHATS])
    found = read(path, template, tokenizer)
    whole = ["".join(f"<{role}>{text}<end>\n" for role, text in chat) for chat in CHATS]
    assert [tokenizer.decode(ids) for ids, _ in found] == whole
    for chat, one in zip(CHATS, found, strict=True):
        wanted = "".join(f"{text}<end>\n" for role, text in chat if role == "assistant")
        assert said(one, tokenizer) == wanted


@pytest.mark.torch
def test_marks_are_those_of_transformers(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    byte_tokenizer().save(tmp_path / "tok")
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path / "tok")
    path = write_lines(tmp_path / "x.jsonl", [{"messages": messages(c)} for c in CHATS])
    for chat, (ids, learned) in zip(CHATS, read(path, MARKED), strict=True):
        theirs = oracle.apply_chat_template(
            messages(chat), chat_template=MARKED, return_dict=True,
            return_assistant_tokens_mask=True,
        )  # fmt: skip
        assert list(theirs["input_ids"]) == ids
        assert [bool(one) for one in theirs["assistant_masks"]] == learned


def test_every_form_gives_the_same_documents(tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": messages(chat)} for chat in CHATS]
    words = {"system": "system", "user": "human", "assistant": "gpt"}
    shared = [
        {"conversations": [{"from": words[role], "value": text} for role, text in chat]}
        for chat in CHATS
    ]
    write_lines(tmp_path / "a.jsonl", rows)
    write_lines(tmp_path / "b.jsonl", shared)
    (tmp_path / "c.json").write_text(json.dumps(rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "e")
    first = read(tmp_path / "a.jsonl")
    for name in ("b.jsonl", "c.json", "d.parquet", "e"):
        assert read(tmp_path / name) == first, name


def test_completions_are_learned_and_prompts_are_not(tmp_path) -> None:
    tokenizer = byte_tokenizer()
    pairs = [{"prompt": "2+2=", "completion": "4"}, {"prompt": "", "completion": "alone"}]
    found = read(write_lines(tmp_path / "x.jsonl", pairs), None)
    assert [said(one, tokenizer) for one in found] == ["4<|endoftext|>", "alone<|endoftext|>"]
    assert [tokenizer.decode(ids) for ids, _ in found] == ["2+2=4", "alone"]
    chat = {"prompt": messages(CHATS[0][:4]), "completion": messages(CHATS[0][4:])}
    for template in (PLAIN, MARKED):
        (one,) = read(write_lines(tmp_path / "y.jsonl", [chat]), template)
        assert said(one, tokenizer) == "\n naïve 猫<end>\n"  # the turn before it is given


def refusals() -> list[tuple[Any, str | None, str, str]]:
    user = {"role": "user", "content": "a"}
    return [
        ({"messages": []}, PLAIN, r"line 2: messages is empty", "leave such"),
        ({"messages": "hi"}, PLAIN, r"line 2: messages is a str", ""),
        ({"messages": [{**user, "role": "assistent"}]}, PLAIN, "has the role 'assistent'",
         "assistant"),
        ({"messages": [{"role": "user", "content": 3}]}, PLAIN, "its content is a int", ""),
        ({"conversations": [{"from": "gtp", "value": "x"}]}, PLAIN, "from 'gtp'", "gpt"),
        ({"messages": [user]}, None, "no chat template", "--chat-template-file"),
        ({"text": "plain"}, PLAIN, "line 2 has no field 'messages'", "--data-format text"),
        ({"messages": messages([("user", "a"), ("assistant", "x|y")] * 2)}, FORGETS,
         "renders the text up to the end of message 2 differently", "generation"),
         ({"messages": [user]}, "{{ raise_exception('no system') }}",
          "rejects the request: no system", ""),
    ]  # fmt: skip


@pytest.mark.parametrize(("record", "template", "says", "hint"), refusals())
def test_what_cannot_be_learned_is_refused(record, template, says, hint, tmp_path) -> None:
    good = {"messages": messages(CHATS[1])} if template != FORGETS else record
    path = write_lines(tmp_path / "x.jsonl", [good, record])
    with pytest.raises(HocketError, match=says) as caught:
        read(path, template)
    assert hint in (caught.value.hint or "")


def test_a_broken_line_is_named(tmp_path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"messages": messages(CHATS[1])}])
    path.write_text("\n" + path.read_text() + '{"messages": [\n')
    with pytest.raises(DataError, match="line 3 is not JSON"):
        read(path)


# --- rows ----------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 20), max_size=60), st.booleans())
def test_rows_hold_every_document_once_and_no_more_than_fits(lengths, shared) -> None:
    rows = rows_of(np.array(lengths, np.int64), 20, shared=shared)
    assert sorted(n for row in rows for n in row) == list(range(len(lengths)))
    assert all(sum(lengths[n] for n in row) <= 20 for row in rows)
    if shared:  # no two rows could have been one
        sums = sorted(sum(lengths[n] for n in row) for row in rows)
        assert len(sums) < 2 or sums[0] + sums[1] > 20


def prepared(tmp_path: Path, path: Path, **changes: Any) -> data.Tokens:
    options: dict[str, Any] = {
        "seq_len": 64, "global_batch": 1, "eval_fraction": 0.0,
        "templates": ChatTemplates({"default": PLAIN}, marked=True), **changes,
    }  # fmt: skip
    return data.prepare_data(tmp_path / "data", byte_tokenizer(), [path], **options)


@pytest.mark.parametrize("packing", ["documents", "none"])
def test_rows_keep_documents_apart(packing, tmp_path) -> None:
    chats = [[("user", "q" * n), ("assistant", "a" * (20 - n))] for n in range(1, 20)]
    path = write_lines(tmp_path / "x.jsonl", [{"messages": messages(c)} for c in chats])
    tokens = prepared(tmp_path, path, packing=packing, seq_len=128)
    dataset = open_dataset(tmp_path / "data", "tokens.bin", tokens, 128)
    assert len(dataset) == tokens.train_rows == (10 if packing == "documents" else 19)
    batch = dataset.batch(np.arange(len(dataset)))
    assert batch.positions is not None
    found = []
    for ids, labels, positions in zip(batch.ids, batch.labels, batch.positions, strict=True):
        learned = labels != IGNORED
        assert (labels[:-1][learned[:-1]] == ids[1:][learned[:-1]]).all()
        assert labels[-1] == IGNORED
        if packing == "none":
            assert (positions == np.arange(128)).all()
        for part in np.split(np.arange(128), np.flatnonzero(positions == 0)[1:]):
            assert (positions[part] == np.arange(part.size)).all()
            end = [i for i in part if learned[i]]
            assert all(i + 1 in part for i in end)  # nothing predicts the next document
            if end:
                found.append(bytes(labels[end].tolist()).decode())
    assert sorted(found) == sorted(f"{c[1][1]}<end>\n" for c in chats)
    assert tokens.learned_tokens == sum(map(len, found)) == dataset.learned(np.arange(len(dataset)))
    assert dataset.tokens_seen(len(dataset)) == tokens.train_tokens  # without padding
    resumed = open_dataset(tmp_path / "data", "tokens.bin", tokens, 128)
    resumed.restore(dataset.cursor(4))
    for samples in (7, 5, 3 * len(dataset) + 1):
        first = dataset.tokens_seen(samples % len(dataset))
        assert resumed.tokens_seen(samples) == samples // len(dataset) * tokens.train_tokens + first
    step = BatchOrder(4)
    assert dataset.learned(step.step_indices(2)) == int(
        (dataset.batch(step.indices(2, 0, 0)).labels != IGNORED).sum()
    )


def test_across_keeps_the_marks(tmp_path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"messages": messages(c)} for c in CHATS])
    tokens = prepared(tmp_path, path, packing="across", seq_len=16)
    dataset = open_dataset(tmp_path / "data", "tokens.bin", tokens, 16)
    batch = dataset.batch(np.arange(len(dataset)))
    learned = batch.labels[batch.labels != IGNORED]
    wanted = "".join(f"{t}<end>\n" for chat in CHATS for role, t in chat if role == "assistant")
    assert wanted.encode().startswith(bytes(learned.tolist()))
    assert learned.size > 20


def test_what_is_cut_off_is_counted(tmp_path) -> None:
    chats = [*CHATS, [("user", "u" * 100), ("assistant", "never seen")]]
    path = write_lines(tmp_path / "x.jsonl", [{"messages": messages(c)} for c in chats])
    tokens = prepared(tmp_path, path, seq_len=120)
    assert tokens.packing == "documents"
    whole = [len("".join(f"<{r}>{t}<end>\n" for r, t in chat).encode()) for chat in chats]
    assert tokens.truncated_documents == sum(size > 120 for size in whole) == 2
    assert tokens.truncated_tokens == sum(size - 120 for size in whole if size > 120)
    assert tokens.unlearned_documents == 2  # their answers were cut off
    assert f"lost {tokens.truncated_tokens}" in tokens.said(120)
    with pytest.raises(DataError, match="none of the 4 documents has a token in its first 8"):
        prepared(tmp_path, path, seq_len=8)
    with pytest.raises(DataError, match="fills 2 rows of 120 tokens; one step takes 5"):
        prepared(tmp_path, path, seq_len=120, global_batch=5)


def test_documents_are_held_out_whole_and_kept_files_are_found_again(tmp_path) -> None:
    chats = [[("user", f"q{n}"), ("assistant", f"answer {n}")] for n in range(50)]
    path = write_lines(tmp_path / "x.jsonl", [{"messages": messages(c)} for c in chats])
    tokens = prepared(tmp_path, path, eval_fraction=0.1)
    assert (tokens.train_documents, tokens.valid_documents) == (45, 5)
    stamp = (tmp_path / "data" / "tokens.bin").stat().st_mtime_ns
    assert prepared(tmp_path, path, eval_fraction=0.1) == tokens
    assert (tmp_path / "data" / "tokens.bin").stat().st_mtime_ns == stamp
    assert prepared(tmp_path, path, eval_fraction=0.1, packing="none").packing == "none"


def test_plain_text_in_rows_goes_on_in_further_rows(tmp_path) -> None:
    (tmp_path / "x.txt").write_text("abcdefgh" * 40)
    tokens = prepared(tmp_path, tmp_path / "x.txt", packing="documents", templates=None)
    assert (tokens.train_tokens, tokens.truncated_tokens) == (320, 0)  # the end token stood alone
    assert tokens.train_rows == 5

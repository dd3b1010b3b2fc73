"""`hocket generate --chat`: turns as plain transformers answers them, and what its lines do."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from hocket.cli.main import main

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("warm"), pytest.mark.timeout(200)]

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NEW = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from hocket.training.tokenizer import byte_tokenizer

    folder = tmp_path_factory.mktemp("chat") / "model"
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=160,
        eos_token_id=256, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def plain_turns(model: Path, turns: list[str]) -> list[list[int]]:
    """The tokens that transformers answers, one conversation."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    plain, words = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    messages: list[dict[str, str]] = []
    found = []
    for text in turns:
        messages.append({"role": "user", "content": text})
        written = words.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = torch.tensor([words.encode(written, add_special_tokens=False)])
        made = plain.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :].tolist()
        found.append([token for token in made if token != 256])
        messages.append({"role": "assistant", "content": words.decode(found[-1])})
    return found


class Person(io.StringIO):
    """Lines that a person types."""

    def isatty(self) -> bool:
        return True


def chat(model: Path, stdin: io.StringIO, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.stdin", stdin)
    return main(["generate", str(model), "--chat", "--max-new-tokens", str(NEW), *words])


@pytest.mark.parametrize("layout", ["dp1", "tp2.pp2"])
def test_turns_are_those_of_transformers(
    model: Path, layout: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = io.StringIO("one melody\n\nfor two voices\n/reset\none melody\n/exit\nnever asked\n")
    assert chat(model, lines, monkeypatch, "--layout", layout, "--json") == 0
    turns: list[dict[str, Any]] = [
        json.loads(line) for line in capsys.readouterr().out.splitlines()
    ]
    assert [turn["prompt"] for turn in turns] == ["one melody", "for two voices", "one melody"]
    first, second = plain_turns(model, ["one melody", "for two voices"])
    assert [turn["tokens"] for turn in turns] == [first, second, first]


def test_a_person_goes_on_after_an_error_and_reads_text_as_it_comes(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = Person("x" * 200 + "\nhello\n")
    assert chat(model, lines, monkeypatch) == 0
    out, err = capsys.readouterr()
    assert "the conversation has 218 tokens with this message; the model's context has 160" in err
    assert "hint: /reset begins a new conversation" in err
    from transformers import AutoTokenizer

    (answer,) = plain_turns(model, ["hello"])
    assert AutoTokenizer.from_pretrained(model).decode(answer) in out.replace("> ", "")


def test_what_is_rejected_before_ranks_start(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("hocket.jobs.chat.LLM.of", never)
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in model.iterdir():
        if file.name != "chat_template.jinja":
            (bare / file.name).symlink_to(file)
    assert chat(bare, io.StringIO("hi\n"), monkeypatch) == 2
    assert "has no chat template" in (err := capsys.readouterr().err)
    assert "--chat-template-file chatml" in err
    assert main(["generate", str(model), "--chat-template-file", "chatml", "--prompt", "x"]) == 2
    assert "without --chat" in capsys.readouterr().err
    assert chat(model, io.StringIO("hi\n"), monkeypatch, "--top-p", "7") == 2
    assert "top_p is 7" in capsys.readouterr().err

"""Sampling that a request leaves open is the model's; what a request says counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hocket.serving.defaults import SamplingDefaults, generation_settings
from hocket.serving.http.fields import CompletionFields
from hocket.serving.request import SamplingParams
from hocket.spec.errors import OptionError

pytest.importorskip("pydantic")

MODEL = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.05)


def asked(defaults: SamplingDefaults, **body: Any) -> SamplingParams:
    fields = CompletionFields.read(body)
    return fields.sampling(max_tokens=4, stop=(), vocab_size=99, defaults=defaults)


def chosen(found: SamplingParams) -> tuple[Any, ...]:
    return (
        found.temperature, found.top_p, found.top_k, found.min_p, found.repetition_penalty
    )  # fmt: skip


def test_what_is_left_open_is_the_models() -> None:
    assert chosen(asked(MODEL)) == (0.6, 0.95, 20, 0.1, 1.05)
    assert chosen(asked(SamplingDefaults())) == (1.0, None, None, None, 1.0)
    assert chosen(asked(MODEL, temperature=0, top_p=None)) == (0.0, 0.95, 20, 0.1, 1.05)


def test_what_is_said_counts() -> None:
    said = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    assert chosen(asked(MODEL, **said)) == (1.0, 1.0, None, None, 1.0)
    assert asked(MODEL, top_k=3).top_k == 3
    assert asked(MODEL, top_k=0).top_k is None


def test_settings_are_read(tmp_path: Path) -> None:
    assert generation_settings(None) == generation_settings(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.6, "top_k": 0, "eos_token_id": 2, "top_p": 1}))
    found = SamplingDefaults.of(generation_settings(tmp_path))
    assert found == SamplingDefaults(temperature=0.6, top_p=1)
    assert found.text() == "temperature 0.6, top_p 1"
    assert SamplingDefaults().text() == ""


@pytest.mark.parametrize("text", ["{", "[]", "\0", "[" * 100_000, '{"eos_token_id": 2'])
def test_a_torn_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(text)
    with pytest.raises(
        OptionError, match=r"generation_config\.json (cannot be read|is not a JSON)"
    ):
        generation_settings(tmp_path)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(OptionError, match="cannot be read"):
        generation_settings(tmp_path)


@pytest.mark.parametrize(
    "value",
    [{"temperature": -1}, {"temperature": "hot"}, {"top_p": 0}, {"top_k": 2.5}, {"min_p": True},
     {"repetition_penalty": 0}],
)  # fmt: skip
def test_what_no_request_could_have_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"generation_config.json: {next(iter(value))}") as caught:
        SamplingDefaults.of(value)
    assert caught.value.hint == "--generation-config none"

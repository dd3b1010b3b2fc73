"""Structured output: what is refused before it costs, and answers that obey whatever comes."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from hocket.serving.engine.structure import (
    MAX_REPEATS,
    Structures,
    StructureState,
    check_structure,
)
from hocket.spec.errors import OptionError
from tests.house.test_imports import loaded_by

pytest.importorskip("llguidance")
pytest.importorskip("tokenizers")

END = 256


class Words:
    """A tokenizer from the text of its file."""

    def __init__(self, text: str, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._text = text

    def to_json(self) -> str:
        return self._text


def bytes_words() -> Any:
    from hocket.training.tokenizer import byte_tokenizer

    return byte_tokenizer()


def pieces_words() -> Any:
    """A byte-level vocabulary with longer tokens, as models have."""
    from hocket.training.tokenizer import train_tokenizer

    texts = ['{"name": "value", "count": 12, "list": [true, false, null]}\n' * 4] * 20
    return train_tokenizer(iter(texts), 400)


def fallback_words() -> Any:
    """A vocabulary of word pieces with single bytes to fall back on, as SentencePiece has."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    pieces = [("<unk>", 0.0), ("</s>", 0.0)]
    pieces += [(f"<0x{value:02X}>", -9.0) for value in range(256)]
    pieces += [(piece, -2.0) for piece in ("\u2581", "{", "}", '"', ":", "\u2581a", "kind", "one")]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return Words(backend.to_str(), len(pieces))


@pytest.fixture(scope="module")
def structures() -> Any:
    made = Structures(bytes_words, 300, [END])
    yield made
    made.close()


def allowed(state: StructureState, barred: bool = False) -> list[int]:
    mask = state.mask(barred)
    assert not isinstance(mask, str), mask
    return [token for token in range(8 * len(mask)) if mask[token >> 3] >> (token & 7) & 1]


def answer(
    structures: Structures, structure: Any, seed: int, *, most: int = 300,
    ends: Sequence[int] = (END,),
) -> list[int]:  # fmt: skip
    """Tokens drawn evenly among those that may come, without the one that ended them."""
    chooser = random.Random(seed)
    state = structures.start(json.dumps(structure), ends, ())
    found: list[int] = []
    while len(found) < most:
        may = allowed(state)
        stops = [token for token in ends if token in may]
        # end as soon as it may, now and then: an even choice would go on for ever
        token = stops[0] if stops and chooser.random() < 0.5 else chooser.choice(may)
        if token in ends:
            return found
        state.take(token)
        found.append(token)
    return found


SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["one", "two"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["kind", "count"],
    "additionalProperties": False,
}


def test_whatever_is_drawn_obeys_the_schema(structures: Structures) -> None:
    for seed in range(30):
        tokens = answer(structures, {"type": "json_schema", "schema": SCHEMA}, seed)
        given = json.loads(bytes(tokens))
        assert given["kind"] in ("one", "two")
        assert 0 <= given["count"] <= 99
        assert set(given) <= {"kind", "count", "tags"}
        assert all(isinstance(one, bool) for one in given.get("tags", ()))
        assert isinstance(given.get("tags", []), list)


def test_whatever_is_drawn_matches_the_pattern(structures: Structures) -> None:
    for pattern in (r"[a-c]{2,5}-\d+", r"(yes|no|maybe)", r"\[(1,)*1\]", r"é?x"):
        for seed in range(10):
            tokens = answer(structures, {"type": "regex", "pattern": pattern}, seed)
            if len(tokens) < 300:
                assert re.fullmatch(pattern, bytes(tokens).decode())


@pytest.mark.parametrize("words", [bytes_words, pieces_words, fallback_words])
def test_every_kind_of_vocabulary_writes_json(words: Any) -> None:
    loaded = words()
    end = {"bytes_words": 256, "fallback_words": 1}.get(words.__name__, loaded.vocab_size - 1)
    # more rows than tokens, as padded embeddings have
    structures = Structures(lambda: loaded, loaded.vocab_size + 30, [end])
    schema = {"type": "json_schema", "schema": SCHEMA}
    import llguidance

    library = llguidance.LLTokenizer(loaded.to_json())
    lengths = set()
    for seed in range(8):
        tokens = answer(structures, schema, seed, ends=(end,))
        text = library.decode_bytes(tokens)
        assert json.loads(text)["kind"] in ("one", "two")
        lengths |= {len(library.decode_bytes([token])) for token in tokens}
    assert (max(lengths) > 1) == (words is not bytes_words)
    structures.close()


def test_a_json_object_is_one(structures: Structures) -> None:
    state = structures.start('{"type": "json_object"}', [END], ())
    assert [chr(token) for token in allowed(state)] == ["{"]
    for byte in b'{"a": [1, {"b": null}], "c": "\xc3\xa9"}':
        assert byte in allowed(state)
        state.take(byte)
    assert END in allowed(state)
    state.take(END)
    assert allowed(state) == [END]


def test_blanks_between_the_parts_of_json_have_a_bound(structures: Structures) -> None:
    state = structures.start('{"type": "json_object"}', [END], tuple(b"{\n"))
    for _ in range(32):
        assert ord(" ") in allowed(state)
        state.take(ord(" "))
    assert not {*b" \t\n"} & {*allowed(state)}
    # the schema's own word on it does not count
    loose = {"x-guidance": {"whitespace_pattern": "[ ]*"}, "type": "object"}
    loose = {"type": "json_schema", "schema": loose}
    state = structures.start(json.dumps(loose), [END], tuple(b"{" + b" " * 32))
    assert ord(" ") not in allowed(state)


def test_a_preempted_answer_goes_on_as_if_it_had_not_been(structures: Structures) -> None:
    schema = {"type": "json_schema", "schema": SCHEMA}
    text = b'{"kind": "two", "count": 42, "tags": [true]}'
    whole = structures.start(json.dumps(schema), [END], ())
    for cut in range(len(text) + 1):
        again = structures.start(json.dumps(schema), [END], tuple(text[:cut]))
        assert allowed(again) == allowed(whole)
        if cut < len(text):
            whole.take(text[cut])
    # told before it is compiled, too
    early = structures.start(json.dumps(schema), [END], tuple(text[:3]))
    early.take(text[3])
    late = structures.start(json.dumps(schema), [END], tuple(text[:4]))
    assert allowed(early) == allowed(late)


def test_tokens_that_end_come_when_the_answer_is_complete(structures: Structures) -> None:
    spec = '{"type": "regex", "pattern": "ab+"}'
    state = structures.start(spec, [END, ord("x")], tuple(b"a"))
    assert allowed(state) == [ord("b")]
    state.take(ord("b"))
    assert allowed(state) == [ord("b"), ord("x"), END]
    assert allowed(state, barred=True) == [ord("b")]
    # one that the pattern knows as well
    state = structures.start('{"type": "regex", "pattern": "ab?"}', [ord("b")], tuple(b"a"))
    assert ord("b") in allowed(state)
    # of a complete answer nothing but its end is left, barred or not
    state = structures.start('{"type": "regex", "pattern": "ab"}', [END], tuple(b"ab"))
    assert allowed(state, barred=True) == allowed(state) == [END]
    # no tokens of its own: the model's
    state = structures.start('{"type": "regex", "pattern": "ab"}', [], tuple(b"ab"))
    assert allowed(state) == [END]


def test_tokens_that_break_the_structure_are_reported(structures: Structures) -> None:
    state = structures.start('{"type": "json_object"}', [END], tuple(b'{"a": x'))
    assert "failed" in str(state.mask())
    assert state.mask() == state.mask()
    state.take(ord("{"))
    bad = structures.start('{"type": "regex", "pattern": "("}', [END], ())
    assert "cannot be used" in str(bad.mask())
    assert "not JSON" in str(structures.start("{", [END], ()).mask())
    assert allowed(structures.start('{"type": "json_object"}', [END], ())) == [ord("{")]


def test_a_vocabulary_without_an_end_takes_no_token_for_it() -> None:
    words = bytes_words()
    given = json.loads(words.to_json())
    given["added_tokens"] = []
    structures = Structures(lambda: Words(json.dumps(given), 256), 256, [])
    state = structures.start('{"type": "regex", "pattern": "a*"}', [ord("z")], ())
    assert allowed(state) == [ord("a"), ord("z")]
    state = structures.start('{"type": "regex", "pattern": "a"}', [], tuple(b"a"))
    assert "no token ends it" in str(state.mask())
    structures.close()


def test_a_tokenizer_that_cannot_be_read_fails_answers_and_nothing_else() -> None:
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    structures = Structures(lambda: Words(backend.to_str(), 3), 3, [2])
    assert "cannot read" in str(structures.start('{"type": "json_object"}', [2], ()).mask())

    def broken() -> Any:
        raise OptionError("there is none")

    structures = Structures(broken, 3, [2])
    assert structures.start('{"type": "json_object"}', [2], ()).mask() == "there is none"


def nested(depth: int) -> str:
    return '{"type": "json_schema", "schema": ' + '{"items": ' * depth + "{}" + "}" * depth + "}"


def pattern(text: str) -> str:
    return json.dumps({"type": "regex", "pattern": text})


def schema(**given: Any) -> str:
    return json.dumps({"type": "json_schema", "schema": given})


HOSTILE = {
    "no JSON": "{",
    "bytes": "\ud800",
    "a list": "[]",
    "no type": "{}",
    "another type": '{"type": "lark", "grammar": "start: start"}',
    "no pattern": '{"type": "regex"}',
    "a number": '{"type": "regex", "pattern": 3}',
    "no schema": '{"type": "json_schema"}',
    "false": '{"type": "json_schema", "schema": false}',
    "open group": pattern("("),
    "look-ahead": pattern("(?=a)b"),
    "back reference": pattern(r"(a)\1"),
    "deep pattern": pattern("(" * 30000 + ")" * 30000),
    "repeats": pattern(".*" * 3000),
    "long": pattern("a" * 60000),
    "itself": schema(**{"$ref": "#"}),
    "a circle": schema(**{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "deep": nested(400),
    "deeper": nested(60000),
    "deepest": "[" * 1000000,
    "elsewhere": schema(**{"$ref": "http://localhost:1/schema.json"}),
    "a file": schema(**{"$ref": "file:///etc/passwd"}),
    "not": schema(**{"not": {}}),
    "product": schema(
        allOf=[
            {"anyOf": [{"properties": {f"{name}{i}": {"type": "integer"}}} for name in "ab"]}
            for i in range(20)
        ]
    ),
    "multiple": schema(type="integer", multipleOf=982451653),
    "patterns": schema(properties={str(i): {"pattern": ".*" * 100} for i in range(20)}),
    "pattern names": schema(patternProperties={".*" * 300 + str(i): {} for i in range(20)}),
    "no type of that name": schema(type="nothing"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_is_refused(name: str, structures: Structures) -> None:
    with pytest.raises(OptionError) as refused:
        check_structure(HOSTILE[name])
    assert len(refused.value.message) < 500
    # what went round the check fails its own answer
    assert isinstance(structures.start(HOSTILE[name], [END], ()).mask(), str)
    assert allowed(structures.start('{"type": "json_object"}', [END], ())) == [ord("{")]


def test_why_it_is_refused_is_said_in_words() -> None:
    loop = {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}
    for text, reason in (
        (HOSTILE["false"], "no text obeys the schema false"),
        (HOSTILE["itself"], "leads back to itself"),
        (schema(**{"$ref": "#/$defs/a", "$defs": loop}), "leads back to itself"),
        (HOSTILE["not"], '"not"'),
    ):
        with pytest.raises(OptionError, match=reason):
            check_structure(text)


def test_one_of_is_any_of(structures: Structures) -> None:
    text = schema(oneOf=[{"type": "boolean"}, {"enum": [7, "x"]}])
    check_structure(text)
    assert allowed(structures.start(text, [END], ())) == sorted(map(ord, 'tf7"'))
    assert allowed(structures.start(text, [END], list(b"7"))) == [END]


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "json_object"}',
        '{"type": "json_schema", "schema": true}',
        schema(**SCHEMA),
        schema(enum=[f"value{i}" for i in range(2000)]),
        schema(properties={f"p{i}": {"type": "string", "format": "date"} for i in range(100)}),
        schema(**{"$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}},
                  "$ref": "#/$defs/n"}),
        pattern("|".join(f"choice {i}" for i in range(1500))),
        pattern(r"(a|b)*a(a|b){20}"),
        pattern(r"([a-z]{1,50}\.){1,20}[a-z]{2,10}"),
        pattern("".join(itertools.repeat("a?", MAX_REPEATS))),
    ],
)  # fmt: skip
def test_what_can_be_passes_and_compiles_in_the_ranks_too(
    text: str, structures: Structures
) -> None:
    check_structure(text)
    assert allowed(structures.start(text, [END], ()))


def test_steps_have_a_bound(structures: Structures) -> None:
    """A pattern that passes and whose states would fill the memory ends with an error."""
    text = pattern("a{1000000}")
    state = structures.start(text, [END], ())
    for _ in range(30):
        mask = state.mask()
        if isinstance(mask, str):
            assert "too many" in mask
            return
        state.take(ord("a"))
    pytest.fail("no bound was met")


def test_the_check_loads_no_torch() -> None:
    code = (
        "from hocket.serving.engine.structure import check_structure\n"
        'check_structure(\'{"type": "json_object"}\')'
    )
    assert not loaded_by(code) & {"torch", "transformers", "numpy"}


def test_without_the_library_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(OptionError, match="llguidance"):
        check_structure('{"type": "json_object"}')
    with pytest.raises(OptionError, match="llguidance"):
        Structures(bytes_words, 300)


@pytest.mark.torch
def test_the_sampler_obeys_structures_row_by_row() -> None:
    """Random logits, four structured rows among free ones, one preempted, one that fails."""
    import torch

    from hocket.serving.request import SamplingParams
    from hocket.serving.scheduling.admission import Admission
    from tests.serving import sampler_cases as cases
    from tests.serving.test_sampler import a_sampler

    spec = json.dumps({"type": "json_schema", "schema": SCHEMA})
    settings: list[dict[str, Any]] = [
        {"structure": spec, "stop": (END,)},
        {},
        {"structure": spec, "stop": (END,), "temperature": 1.0, "top_p": 0.95},
        {"structure": spec, "stop": (END,), "temperature": 1.0, "min_new_tokens": 60},
        {"structure": "{", "temperature": 1.0},
        {"structure": spec, "stop": (END,), "repetition_penalty": 1.2, "logprobs": 2},
    ]
    found: list[list[int]] = [[] for _ in settings]
    structures = Structures(bytes_words, 300, [END])
    for resumes in (False, True):
        sampler = a_sampler(300, structures=structures)
        for admission in cases.admissions(settings):
            sampler.admit(admission)
        said: list[list[int]] = [[] for _ in settings]
        for step in range(64):
            logits = cases.logits_of(len(settings), 300, step)
            logits[:, END] += 3
            logits[:, [9, 10, 32]] -= 30
            if resumes and step == 10:
                for i in (2, 5):
                    sampler.release(i)
                    admission = cases.admissions(settings)[i]
                    sampler.admit(
                        Admission(
                            slot=i, index=admission.index, sampling=admission.sampling,
                            prompt_length=admission.prompt_length, prompt=admission.prompt,
                            generated=tuple(said[i]),
                        )
                    )  # fmt: skip
            result = sampler.sample(
                logits,
                cases.decode_plan(step, list(range(len(settings))), len(cases.PROMPT) + step),
            )
            assert list(result.failed) == [4]
            assert "not JSON" in result.failed[4]
            assert result.tokens[1] == int(logits[1].argmax())
            for place, token in enumerate(result.tokens):
                said[place].append(token)
            assert torch.isfinite(torch.tensor(result.logprobs[5].logprob))
        if resumes:
            assert said == found
        found = said
    for place in (0, 2, 3, 5):
        text = bytes(found[place][: found[place].index(END)])
        assert json.loads(text)["kind"] in ("one", "two")
        # the end fills what is asked for beyond a complete answer
        assert set(found[place][len(text) :]) == {END}
    assert SamplingParams(**settings[0]).ends == {END}
    structures.close()

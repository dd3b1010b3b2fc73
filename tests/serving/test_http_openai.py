"""OpenAI's own client against a real server: what it sends is taken, what it gets is understood."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from hocket.serving.http.auth import Keys
from hocket.spec.errors import OptionError
from tests.serving.http_fake import FakeReplica
from tests.serving.http_live import MODEL, Live, live

openai = pytest.importorskip("openai")

PROMPT = "[user]hello[assistant]"


def client(server: Live, **options: Any) -> Any:
    values = {"api_key": "none", "max_retries": 0, "timeout": 30, **options}
    return openai.OpenAI(base_url=f"{server.url}/v1", **values)


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live() as found:
        yield found


@pytest.fixture
def ai(server: Live) -> Iterator[Any]:
    with client(server) as found:
        yield found


def chat(ai: Any, **options: Any) -> Any:
    values = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **options}
    return ai.chat.completions.create(**values)


def test_models(ai: Any) -> None:
    assert [model.id for model in ai.models.list()] == [MODEL]
    assert ai.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        ai.models.retrieve("another/model")
    assert caught.value.code == "model_not_found"


def test_a_chat(ai: Any) -> None:
    found = chat(ai)
    assert found.choices[0].message.content == (PROMPT * 2)[:24]
    assert found.choices[0].finish_reason == "stop"
    # The token that ended the answer was computed as well.
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(PROMPT), 25)
    assert found.usage.total_tokens == len(PROMPT) + 25
    again = chat(ai)
    assert again.usage.prompt_tokens_details.cached_tokens == len(PROMPT) - 1
    assert again.id != found.id


def test_a_chat_in_parts_of_every_role(ai: Any) -> None:
    found = chat(
        ai,
        messages=[
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "refusal": None, "name": "bot",
             "tool_calls": [{"id": "1", "type": "function",
                             "function": {"name": "f", "arguments": '{"x": 1}'}}]},
            {"role": "tool", "content": "2", "tool_call_id": "1"},
        ],
        max_tokens=200,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert found.choices[0].message.content.startswith(
        '[system]be kind[user]a[assistant]<tool_call>{"name": "f", "arguments": {"x": 1}}'
        "</tool_call>[tool]2[assistant]"
    )
    with pytest.raises(openai.BadRequestError, match="image_url"):
        chat(ai, messages=[{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}])  # fmt: skip


def test_a_chat_as_a_stream(ai: Any) -> None:
    chunks = list(chat(ai, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == (PROMPT * 2)[:24]
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 25
    assert all(chunk.usage is None for chunk in chunks[:-1])
    plain = list(chat(ai, stream=True))
    assert all(chunk.choices for chunk in plain)


def test_usage_in_every_chunk(ai: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(chat(ai, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 25


@pytest.mark.parametrize("stream", [False, True])
def test_n_answers(ai: Any, server: Live, stream: bool) -> None:
    messages = [{"role": "user", "content": f"a prompt of more than {stream} thirty-two tokens"}]
    found = chat(ai, messages=messages, n=3, seed=7, stream=stream)
    texts = {0: "", 1: "", 2: ""}
    if stream:
        for chunk in found:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        texts = {choice.index: choice.message.content for choice in found.choices}
        # One prompt, computed once: the others find it in the cache.
        assert found.usage.prompt_tokens == 62
    assert len(set(texts.values())) == 3
    assert [ord(texts[i][1]) - ord(texts[0][1]) for i in range(3)] == [0, 1, 2]
    seen = server.replica.seen[-3:]
    assert [request.index for request in seen] == [0, 1, 2]
    assert {request.sampling.seed for request in seen} == {7}


def test_settings_reach_the_engine(ai: Any, server: Live) -> None:
    chat(
        ai, temperature=0.5, top_p=0.9, seed=3, max_completion_tokens=9, max_tokens=100,
        presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={"104": 5, "5": -100},
        user="someone", stop=None, logprobs=None, top_logprobs=None, response_format=None,
        tools=None, metadata=None, store=None,
        extra_body={"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 2,
                    "ignore_eos": True, "stop_token_ids": [7], "deadline": 20,
                    "never_heard_of": {"a": [1]}, "cache_salt": "salt"},
        extra_headers={"X-Deadline-Seconds": "15"},
    )  # fmt: skip
    request = server.replica.seen[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0.5, 0.9, 4, 0.1,
    )  # fmt: skip
    assert (sampling.seed, sampling.max_new_tokens, sampling.min_new_tokens) == (3, 9, 2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert sampling.repetition_penalty == 1.2
    assert dict(sampling.logit_bias) == {104: 5, 5: -100}
    assert (sampling.stop, sampling.stop_tokens, sampling.ignore_eos) == ((256,), (7,), True)
    assert (request.user, request.salt, request.deadline) == ("someone", "salt", 15)
    chat(ai)
    plain = server.replica.seen[-1].sampling
    # Nothing of one request is left in the next; without a seed, one is drawn.
    assert (plain.temperature, plain.top_p, plain.logit_bias) == (1.0, None, ())
    assert plain.seed not in (None, 0, 3)
    assert plain.max_new_tokens == 512 - len(PROMPT)


def test_a_stop_string_ends_the_answer_and_the_request(ai: Any, server: Live) -> None:
    before = len(server.replica.cancelled)
    found = chat(ai, stop=["zzz", "hel"])
    assert found.choices[0].message.content == "[user]"
    assert (found.choices[0].finish_reason, found.choices[0].stop_reason) == ("stop", "hel")
    assert len(server.replica.cancelled) == before + 1
    chunks = [c.choices[0] for c in chat(ai, stop="hel", stream=True)]
    assert "".join(c.delta.content or "" for c in chunks) == "[user]"
    kept = chat(ai, stop="hel", extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].message.content == "[user]hel"
    later = chat(ai, stop="hel", extra_body={"min_tokens": 12})
    assert later.choices[0].message.content == (PROMPT * 2)[:24]
    token = chat(ai, extra_body={"stop_token_ids": [ord("h")]})
    assert token.choices[0].message.content == "[user]"
    assert token.choices[0].stop_reason == ord("h")


def test_logprobs_of_a_chat(ai: Any) -> None:
    found = chat(ai, logprobs=True, top_logprobs=2, max_tokens=3).choices[0].logprobs.content
    assert [one.token for one in found] == ["[", "u", "s"]
    assert found[0].bytes == [ord("[")]
    assert [(t.token, t.logprob) for t in found[1].top_logprobs] == [("u", -0.25), ("v", -1.25)]
    chunks = chat(ai, logprobs=True, max_tokens=3, stream=True)
    tokens = [
        one.token
        for chunk in chunks
        for one in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert tokens == ["[", "u", "s"]


def test_half_a_character_is_held_back(server: Live) -> None:
    text = "aé€😀 b"
    replica = FakeReplica(script=lambda request: list(text.encode()))
    with live(replica) as other, client(other) as ai:
        chunks = [c.choices[0].delta.content or "" for c in chat(ai, stream=True)]
        assert [c for c in chunks if c] == ["a", "é", "€", "😀", " ", "b"]
        found = chat(ai, logprobs=True).choices[0]
        assert found.message.content == text
        assert bytes(b for one in found.logprobs.content for b in one.bytes).decode() == text


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["abcab"]),
        (["abc", "de"], ["abcab", "deded"]),
        ([97, 98, 99], ["abcab"]),
        ([[97, 98, 99], [100, 101]], ["abcab", "deded"]),
    ],
)
def test_prompts_of_completions(ai: Any, prompt: Any, texts: list[str]) -> None:
    found = ai.completions.create(model=MODEL, prompt=prompt, max_tokens=5, temperature=0)
    assert [choice.text for choice in found.choices] == texts
    assert [choice.index for choice in found.choices] == list(range(len(texts)))
    parts = dict.fromkeys(range(len(texts)), "")
    for chunk in ai.completions.create(
        model=MODEL, prompt=prompt, max_tokens=5, temperature=0, stream=True
    ):
        parts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(parts.values()) == texts


def test_completions_end_after_sixteen_tokens(ai: Any) -> None:
    found = ai.completions.create(model=MODEL, prompt="ab")
    assert (found.choices[0].text, found.choices[0].finish_reason) == ("ab" * 8, "length")


def test_echo_and_logprobs(ai: Any) -> None:
    options = {"model": MODEL, "prompt": "abc", "max_tokens": 2, "echo": True, "temperature": 0}
    found = ai.completions.create(**options, logprobs=1).choices[0]
    assert found.text == "abcab"
    logprobs = found.logprobs
    assert logprobs.tokens == ["a", "b", "c", "a", "b"]
    assert logprobs.text_offset == [0, 1, 2, 3, 4]
    assert logprobs.token_logprobs == [None, -0.25, -0.25, -0.25, -0.25]
    assert logprobs.top_logprobs[0] is None
    assert logprobs.top_logprobs[1] == {"b": -0.25}
    chunks = list(ai.completions.create(**options, logprobs=1, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "abcab"
    logged = [token for c in chunks for token in c.choices[0].logprobs.tokens]
    offsets = [offset for c in chunks for offset in c.choices[0].logprobs.text_offset]
    assert (logged, offsets) == (["a", "b", "c", "a", "b"], [0, 1, 2, 3, 4])
    # The likelihood of a text alone, as evaluations ask for it.
    none = ai.completions.create(**{**options, "max_tokens": 0}, logprobs=1).choices[0]
    assert none.text == "abc"
    assert none.logprobs.token_logprobs == [None, -0.25, -0.25]
    assert none.finish_reason == "length"
    assert ai.completions.create(**options).choices[0].logprobs is None


def test_a_character_of_several_tokens_moves_offsets_once(ai: Any) -> None:
    options = {"model": MODEL, "prompt": "a\N{EURO SIGN}b", "max_tokens": 0, "echo": True}
    logged = ai.completions.create(**options, logprobs=0).choices[0]
    (chunk,) = ai.completions.create(**options, logprobs=0, stream=True)
    for found in (logged, chunk.choices[0]):
        assert found.text == "a\N{EURO SIGN}b"
        assert found.logprobs.text_offset == [0, 1, 1, 1, 2]


def test_bytes_that_are_no_text_keep_their_names(ai: Any) -> None:
    found = ai.completions.create(model=MODEL, prompt=[0xE2, 0x82], max_tokens=2, logprobs=0)
    assert found.choices[0].logprobs.tokens[0].startswith("bytes:\\x")


def test_the_best_of_some(ai: Any, server: Live) -> None:
    found = ai.completions.create(model=MODEL, prompt="ab", n=2, best_of=4, max_tokens=3)
    assert [choice.index for choice in found.choices] == [0, 1]
    assert len({r.id for r in server.replica.seen[-4:]}) == 4
    assert found.choices[0].logprobs is None
    # What was made counts, not what was chosen.
    assert found.usage.completion_tokens == 12
    with pytest.raises(openai.BadRequestError, match="best_of is 1"):
        ai.completions.create(model=MODEL, prompt="ab", n=2, best_of=1)
    with pytest.raises(openai.BadRequestError, match="streamed"):
        ai.completions.create(model=MODEL, prompt="ab", best_of=2, stream=True)


def test_a_response(ai: Any) -> None:
    found = ai.responses.create(model=MODEL, input="hello", instructions="be kind")
    assert found.output_text == "[system]be kind[user]hello"[:24]
    assert found.status == "completed"
    assert found.usage.output_tokens == 25
    cut = ai.responses.create(
        model=MODEL,
        input=[{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
        max_output_tokens=5,
    )
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.output_text == "[user"
    with pytest.raises(openai.BadRequestError, match="stores nothing") as caught:
        ai.responses.create(model=MODEL, input="on", previous_response_id=found.id)
    assert caught.value.param == "previous_response_id"


def test_a_response_as_a_stream(ai: Any) -> None:
    heard = list(ai.responses.create(model=MODEL, input="hello", stream=True))
    kinds = [event.type for event in heard]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in heard] == list(range(len(heard)))
    text = "".join(e.delta for e in heard if e.type == "response.output_text.delta")
    assert text == heard[-1].response.output_text == (PROMPT * 2)[:24]
    with ai.responses.stream(model=MODEL, input="hello") as stream:
        stream.until_done()
        assert stream.get_final_response().output_text == text


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
CALLED = 'Let me see. <tool_call>{"name": "weather", "arguments": {"town": "Oslo"}}</tool_call>'


@pytest.fixture(scope="module")
def caller() -> Iterator[Live]:
    def script(request: Any) -> list[int]:
        if request.sampling.structure:
            return list(b'{"name": "weather", "arguments": {"town": "Rome"}}')
        return list(CALLED.encode())

    def check(text: str) -> None:
        if json.loads(text).get("pattern") == "(":
            raise OptionError("the pattern does not end")

    replica = FakeReplica(script=script)
    with live(replica, check_structure=check, max_model_len=1024) as found:
        yield found


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(caller: Live, stream: bool) -> None:
    with client(caller) as ai:
        found = chat(ai, tools=[TOOL], stream=stream)
        if stream:
            deltas = [chunk.choices[0] for chunk in found]
            content = "".join(d.delta.content or "" for d in deltas)
            calls = [call for d in deltas for call in d.delta.tool_calls or []]
            finish = deltas[-1].finish_reason
        else:
            message = found.choices[0].message
            content, calls = message.content, message.tool_calls
            finish = found.choices[0].finish_reason
        assert content.strip() == "Let me see."
        assert finish == "tool_calls"
        assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [
            ("weather", {"town": "Oslo"})
        ]
        forced = chat(ai, tools=[TOOL], tool_choice={"type": "function",
                                                     "function": {"name": "weather"}})  # fmt: skip
        assert json.loads(forced.choices[0].message.tool_calls[0].function.arguments) == {
            "town": "Rome"
        }
        assert forced.choices[0].message.content is None
        structure = json.loads(caller.replica.seen[-1].sampling.structure)
        assert structure["schema"]["properties"]["name"] == {"const": "weather"}
        assert chat(ai, tools=[TOOL], tool_choice="none").choices[0].message.tool_calls is None


def test_tool_calls_of_responses(caller: Live) -> None:
    flat = {"type": "function", **TOOL["function"]}
    with client(caller) as ai:
        found = ai.responses.create(model=MODEL, input="weather?", tools=[flat])
        said, called = found.output
        assert said.content[0].text.strip() == "Let me see."
        assert (called.name, json.loads(called.arguments)) == ("weather", {"town": "Oslo"})
        with ai.responses.stream(model=MODEL, input="weather?", tools=[flat]) as stream:
            stream.until_done()
            assert stream.get_final_response().output[1].name == "weather"
        ai.responses.create(
            model=MODEL,
            tools=[flat],
            input=[
                {"role": "user", "content": "weather?"},
                {"type": "function_call", "call_id": called.call_id, "name": "weather",
                 "arguments": called.arguments},
                {"type": "function_call_output", "call_id": called.call_id, "output": "sun"},
            ],
        )  # fmt: skip
        tokens = bytes(caller.replica.seen[-1].tokens).decode()
        assert '"arguments": {"town": "Oslo"}' in tokens
        assert "[tool]sun" in tokens


def test_structures_reach_the_engine(caller: Live) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = {
        "json_object": {"response_format": {"type": "json_object"}},
        "json_schema": {"response_format": {
            "type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        "regex": {"extra_body": {"guided_regex": "a+"}},
    }  # fmt: skip
    with client(caller) as ai:
        for kind, options in asked.items():
            chat(ai, **options)
            assert json.loads(caller.replica.seen[-1].sampling.structure)["type"] == kind
        chat(ai, extra_body={"guided_choice": ["a.b", "c"]})
        pattern = json.loads(caller.replica.seen[-1].sampling.structure)["pattern"]
        assert pattern == r"(a\.b)|(c)"
        chat(ai, response_format={"type": "text"})
        assert caller.replica.seen[-1].sampling.structure is None
        with pytest.raises(openai.BadRequestError, match="does not end"):
            chat(ai, extra_body={"guided_regex": "("})
        with pytest.raises(openai.BadRequestError, match="both ask"):
            chat(ai, response_format={"type": "json_object"}, extra_body={"regex": "a"})
        with pytest.raises(openai.BadRequestError, match="at most 65536"):  # and is not compiled
            chat(ai, extra_body={"guided_json": {"enum": ["(" * 10] * 6000}})


def test_without_structured_output_it_is_refused() -> None:
    with live() as server, client(server) as ai:
        server.service.check_structure = None
        with pytest.raises(openai.BadRequestError, match="no structured output"):
            chat(ai, response_format={"type": "json_object"})


def test_errors_are_those_that_the_client_knows(ai: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="the context has 512") as caught:
        chat(ai, max_tokens=1000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        chat(ai, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        chat(ai, model="gpt-5")
    assert missing.value.code == "model_not_found"


def test_keys() -> None:
    with live(keys=Keys([("alice", "alices-key"), ("bob", "bobs-own-key")])) as server:
        with client(server, api_key="wrong-key") as ai, pytest.raises(openai.AuthenticationError):
            ai.models.list()
        for user, key in (("alice", "alices-key"), ("bob", "bobs-own-key")):
            with client(server, api_key=key) as ai:
                chat(ai, user="mallory", extra_body={"cache_salt": "bob/"})
            request = server.replica.seen[-1]
            assert (request.user, request.salt) == (user, f"{user}/bob/")


def test_full_lost_and_late() -> None:
    slow = FakeReplica(delay=0.05, length=1000, num_blocks=16, max_queue=0)
    with live(slow) as server, client(server) as ai:
        with pytest.raises(openai.RateLimitError) as caught:
            chat(ai)
        assert caught.value.response.headers["Retry-After"] == "3"
        slow.max_queue = 4
        with pytest.raises(openai.BadRequestError, match="cache of a replica") as big:
            chat(ai, max_tokens=300)
        assert big.value.code == "cache_size_exceeded"
        slow.ready = False
        with pytest.raises(openai.InternalServerError) as lost:
            chat(ai)
        assert lost.value.status_code == 503


def test_many_at_once(server: Live) -> None:
    async def main() -> list[str]:
        server.replica.max_queue = 1000
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as ai:

            async def one(number: int) -> str:
                text = ""
                async for chunk in await ai.completions.create(
                    model=MODEL, prompt=f"<{number}>", max_tokens=20, stream=True, temperature=0
                ):
                    text += chunk.choices[0].text
                return text

            return await asyncio.gather(*(one(number) for number in range(24)))

    for number, text in enumerate(asyncio.run(main())):
        prompt = f"<{number}>"
        assert text == (prompt * math.ceil(20 / len(prompt)))[:20]

"""No request, whatever it holds, can stop the next one from succeeding.

Each case throws something at a server; what comes back, if anything does, must be an error in
OpenAI's form or a proper answer, and then an ordinary request must succeed, with nothing left at
the replica.
"""

from __future__ import annotations

import itertools
import json
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hocket.spec.errors import OptionError
from tests.serving.http_fake import FakeReplica
from tests.serving.http_live import Live, error, events, live, split

CHAT, PLAIN, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
NORMAL = {"prompt": "abc", "max_tokens": 6, "temperature": 0}


def check(text: str) -> None:
    """As an engine's: a structure is looked at before any rank sees it."""
    found = json.loads(text)
    if "(" in found.get("pattern", ""):
        raise OptionError("the pattern is not understood")


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    replica = FakeReplica(num_blocks=24)  # 384 tokens, less than the context
    with live(
        replica,
        check_structure=check,
        max_body=1 << 20,
        body_seconds=1.0,
        render_seconds=1.0,
        send_seconds=1.0,
    ) as found:
        yield found


def well(server: Live) -> None:
    """An ordinary request succeeds, and nothing is left of any other."""
    status, _, body = server.post(PLAIN, NORMAL)
    assert status == 200, body
    assert json.loads(body)["choices"][0]["text"] == "abcabc"
    assert server.idle()
    assert server.replica.used == 0


def deep(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = {"a": found}
    return found


MESSAGE = {"role": "user", "content": "hi"}
REFUSED: dict[str, tuple[str, Any, int]] = {
    "a prompt larger than the context": (PLAIN, {"prompt": "x" * 600}, 400),
    "a prompt larger than the cache": (PLAIN, {"prompt": "x" * 400}, 400),
    "an answer larger than the cache": (PLAIN, {"prompt": "x", "max_tokens": 400}, 400),
    "a prompt of a megabyte": (PLAIN, {"prompt": "x" * 1_000_000}, 400),
    "a chat of a megabyte": (CHAT, {"messages": [{**MESSAGE, "content": "x" * 900_000}]}, 400),
    "n of a million": (PLAIN, {"prompt": "x", "n": 1_000_000}, 400),
    "n of a million in a chat": (CHAT, {"messages": [MESSAGE], "n": 1_000_000}, 400),
    "best_of of a million": (PLAIN, {"prompt": "x", "best_of": 1_000_000}, 400),
    "n of zero": (PLAIN, {"prompt": "x", "n": 0}, 400),
    "n below zero": (PLAIN, {"prompt": "x", "n": -1}, 400),
    "no tokens": (PLAIN, {"prompt": "x", "max_tokens": 0}, 400),
    "no tokens of a chat": (CHAT, {"messages": [MESSAGE], "max_tokens": 0}, 400),
    "tokens below zero": (PLAIN, {"prompt": "x", "max_tokens": -5}, 400),
    "too many tokens for any number": (PLAIN, {"prompt": "x", "max_tokens": 10**30}, 400),
    "a seed beyond 64 bits": (PLAIN, {"prompt": "x", "seed": 2**64}, 400),
    "half a token": (PLAIN, {"prompt": "x", "max_tokens": 1.5}, 400),
    "a number as text": (PLAIN, {"prompt": "x", "max_tokens": "5"}, 400),
    "a truth as number": (PLAIN, {"prompt": "x", "max_tokens": True}, 400),
    "an empty prompt": (PLAIN, {"prompt": ""}, 400),
    "no prompt": (PLAIN, {}, 400),
    "no prompts": (PLAIN, {"prompt": []}, 400),
    "many prompts": (PLAIN, {"prompt": ["x"] * 10_000}, 400),
    "prompts of two kinds": (PLAIN, {"prompt": ["x", 1]}, 400),
    "a prompt of an object": (PLAIN, {"prompt": {"file": "/etc/passwd"}}, 400),
    "a token that there is not": (PLAIN, {"prompt": [300]}, 400),
    "a token below zero": (PLAIN, {"prompt": [-1]}, 400),
    "a token beyond all": (PLAIN, {"prompt": [2**70]}, 400),
    "tokens of a whole body": (PLAIN, {"prompt": list(range(256)) * 500}, 400),
    "a suffix": (PLAIN, {"prompt": "x", "suffix": "y"}, 400),
    "a stop list of a megabyte": (PLAIN, {"prompt": "x", "stop": ["y" * 900_000]}, 400),
    "a stop list of thousands": (PLAIN, {"prompt": "x", "stop": ["y"] * 20_000}, 400),
    "an empty stop": (PLAIN, {"prompt": "x", "stop": [""]}, 400),
    "a stop of numbers": (PLAIN, {"prompt": "x", "stop": [1, 2]}, 400),
    "stop tokens by the thousand": (PLAIN, {"prompt": "x", "stop_token_ids": [1] * 9999}, 400),
    "many biases": (PLAIN, {"prompt": "x", "logit_bias": {str(i): 1 for i in range(5000)}}, 400),
    "a bias of no token": (PLAIN, {"prompt": "x", "logit_bias": {"-1": 1}}, 400),
    "a bias of a far token": (PLAIN, {"prompt": "x", "logit_bias": {"9" * 4000: 1}}, 400),
    "a bias too strong": (PLAIN, {"prompt": "x", "logit_bias": {"1": 1e9}}, 400),
    "a thousand log-probabilities": (PLAIN, {"prompt": "x", "logprobs": 1000}, 400),
    "a thousand alternatives": (
        CHAT, {"messages": [MESSAGE], "logprobs": True, "top_logprobs": 1000}, 400,
    ),
    "a temperature below zero": (PLAIN, {"prompt": "x", "temperature": -1}, 400),
    "a temperature without end": (PLAIN, b'{"prompt": "x", "temperature": 1e999}', 400),
    "a share of two": (PLAIN, {"prompt": "x", "top_p": 2}, 400),
    "a penalty of a million": (PLAIN, {"prompt": "x", "frequency_penalty": 1e6}, 400),
    "a deadline in the past": (PLAIN, {"prompt": "x", "deadline": -1}, 400),
    "another model": (PLAIN, {"prompt": "x", "model": "../../etc/passwd"}, 404),
    "a model's name of a megabyte": (PLAIN, {"prompt": "x", "model": "m" * 900_000}, 400),
    "a user of a megabyte": (PLAIN, {"prompt": "x", "user": "m" * 900_000}, 400),
    "no messages": (CHAT, {"messages": []}, 400),
    "messages that are none": (CHAT, {"messages": "hi"}, 400),
    "a message that is none": (CHAT, {"messages": ["hi"]}, 400),
    "a role that there is not": (CHAT, {"messages": [{**MESSAGE, "role": "root"}]}, 400),
    "a thousand thousand messages": (CHAT, {"messages": [MESSAGE] * 20_000}, 400),
    "an image": (
        CHAT,
        {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}]},
        400,
    ),
    "a template": (CHAT, {"messages": [MESSAGE], "chat_template": "{{ 1 }}"}, 400),
    "a template's secret": (
        CHAT, {"messages": [MESSAGE], "chat_template_kwargs": {"messages": []}}, 400,
    ),
    "tools that are none": (CHAT, {"messages": [MESSAGE], "tools": [{"type": "x"}]}, 400),
    "a thousand tools": (
        CHAT,
        {"messages": [MESSAGE], "tools": [
            {"type": "function", "function": {"name": "f"}}] * 1000},
        400,
    ),
    "a tool that is not there": (
        CHAT,
        {"messages": [MESSAGE], "tools": [{"type": "function", "function": {"name": "f"}}],
         "tool_choice": {"type": "function", "function": {"name": "g"}}},
        400,
    ),
    "a hostile pattern": (PLAIN, {"prompt": "x", "guided_regex": "(a+)+" * 1000}, 400),
    "a pattern of a megabyte": (PLAIN, {"prompt": "x", "guided_regex": "a" * 900_000}, 400),
    "a hostile schema": (
        CHAT,
        {"messages": [MESSAGE], "response_format": {
            "type": "json_schema", "json_schema": {"schema": {"pattern": deep(150)}},
            "pattern": "("}, "guided_regex": "("},
        400,
    ),
    "a schema of a megabyte": (PLAIN, {"prompt": "x", "guided_json": {"x": "y" * 900_000}}, 400),
    "a schema that is none": (PLAIN, {"prompt": "x", "guided_json": "[" * 5000}, 400),
    "a format that is none": (CHAT, {"messages": [MESSAGE], "response_format": {"type": 5}}, 400),
    "malformed JSON": (PLAIN, b'{"prompt": "x"', 400),
    "no JSON": (PLAIN, b"prompt=x", 400),
    "an array": (PLAIN, b"[1, 2]", 400),
    "null": (PLAIN, b"null", 400),
    "bad UTF-8": (PLAIN, b'{"prompt": "\xff\xfe"}', 400),
    "half a surrogate pair": (PLAIN, b'{"prompt": "\\ud800"}', 400),
    "no number": (PLAIN, b'{"prompt": "x", "temperature": NaN}', 400),
    "infinity": (PLAIN, b'{"prompt": "x", "temperature": -Infinity}', 400),
    "a number of many digits": (PLAIN, b'{"max_tokens": ' + b"9" * 100_000 + b"}", 400),
    "brackets": (PLAIN, b"[" * 500_000, 400),
    "a deep object": (PLAIN, json.dumps({"prompt": "x", "extra": deep(500)}).encode(), 400),
    "many empty lists": (PLAIN, b'{"prompt": [' + b"[]," * 300_000 + b"[]]}", 400),
    "a body too large": (PLAIN, {"prompt": "x" * 2_000_000}, 413),
    "nothing": (PLAIN, b" ", 400),
    "tokens that are none": ("/detokenize", {"tokens": [2**40]}, 400),
    "a prompt of tokens to tokenize": ("/tokenize", {"prompt": [1]}, 400),
    "an earlier response": (RESPONSES, {"input": "x", "previous_response_id": "resp_1"}, 400),
    "an item that there is not": (RESPONSES, {"input": [{"type": "computer_call"}]}, 400),
    "an input that is none": (RESPONSES, {"input": 5}, 400),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_and_the_next_succeeds(server: Live, name: str) -> None:
    path, body, expected = REFUSED[name]
    if isinstance(body, bytes):
        status, _, answer = server.post(path, None, data=body)
    else:
        status, _, answer = server.post(path, body)
    assert status == expected, answer[:500]
    told = error(answer)
    assert 0 < len(told["message"]) < 2000
    assert told["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    well(server)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 404),
        (b"DELETE /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 405),
        (b"GET /health HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n", 403),
        (b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n", 403),
        (b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
         404),
        (b"what is this\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 100_000, 431),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n"
         b"Content-Length: 2\r\nConnection: close\r\n\r\n{}", 415),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n"
         b"Connection: close\r\n\r\n{}", 413),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n"
         b"Connection: close\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
         b"Content-Length: 4\r\n\r\nzz\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: https://evil.example\r\n"
         b"Content-Length: 2\r\nConnection: close\r\n\r\n{}", 403),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Deadline-Seconds: nan\r\n"
         b"Content-Length: 2\r\nConnection: close\r\n\r\n{}", 400),
        # A body that is announced and does not come.
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{", 408),
    ],
)  # fmt: skip
def test_bytes_that_are_no_proper_request(server: Live, data: bytes, expected: int) -> None:
    status, _, body = split(server.raw(data))
    assert status == expected
    error(body)
    well(server)


@pytest.mark.parametrize("path", [CHAT, PLAIN, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 1])
def test_who_goes_away_frees_everything_at_once(path: str, stream: bool, after: int) -> None:
    replica = FakeReplica(delay=0.01, length=10_000, num_blocks=64)
    with live(replica, max_model_len=2048) as server:
        bodies: dict[str, dict[str, Any]] = {
            CHAT: {"messages": [MESSAGE], "max_tokens": 400, "n": 2},
            PLAIN: {"prompt": "x" * 40, "max_tokens": 400, "n": 2},
            RESPONSES: {"input": "x", "max_output_tokens": 900},
        }
        body = {**bodies[path], "stream": stream}
        data = json.dumps(body).encode()
        door = socket.create_connection(("127.0.0.1", server.port))
        door.sendall(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
            .encode() + data
        )  # fmt: skip
        end = time.monotonic() + 20
        while not replica.running and time.monotonic() < end:
            time.sleep(0.005)
        assert replica.used > 0
        if after and stream:
            assert b"200 OK" in door.recv(1000)
        # A reset rather than a polite end.
        door.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        door.close()
        assert server.idle()
        assert replica.used == 0
        replica.length = 24
        well(server)
        assert b"hocket_cancelled_total 1.0" in server.service.metrics.text()


def test_who_does_not_read_is_let_go() -> None:
    replica = FakeReplica(length=10**6, num_blocks=10**5, script=lambda r: [120] * 10**6)
    with live(replica, max_model_len=10**6, send_seconds=0.3) as server:
        data = json.dumps({"prompt": "x", "max_tokens": 500_000, "stream": True}).encode()
        with socket.socket() as door:
            door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            door.connect(("127.0.0.1", server.port))
            door.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                + f"Content-Length: {len(data)}\r\n\r\n".encode()
                + data
            )
            # The answer is ended, and others are answered meanwhile.
            assert server.get("/health")[0] == 200
            end = time.monotonic() + 30
            while not replica.cancelled and time.monotonic() < end:
                time.sleep(0.02)
            assert replica.cancelled
        replica.script = None
        replica.length = 24
        well(server)


def test_a_template_that_never_ends_stops_nobody() -> None:
    endless = (
        "{% if messages[0].content == 'endless' %}{% for a in range(99999) %}"
        "{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
        "{% if messages[0].content == 'much' %}{% for a in range(99999) %}"
        "{{ 'x' * 999 }}{% endfor %}{% endif %}"
        "{% if messages[0].content == 'huge' %}{{ 'x' * 99999999 }}{% endif %}"
        "{% if messages[0].content == 'bad' %}{{ raise_exception('no such chat') }}{% endif %}"
        "{% if messages[0].content == 'broken' %}{{ 1 + 'x' }}{% endif %}"
        "{{ messages[0].content }}"
    )
    with live(template=endless, render_seconds=0.5, max_rendered=100_000) as server:
        asked = {}
        for content in ("endless", "much", "huge", "bad", "broken"):
            status, _, body = server.post(CHAT, {"messages": [{**MESSAGE, "content": content}]})
            assert status == 400
            asked[content] = error(body)["message"]
            well(server)
        assert "longer than 0.5 s" in asked["endless"]
        assert "more than 100000 characters" in asked["much"]
        assert "99999999" in asked["huge"]
        assert "no such chat" in asked["bad"]
        assert server.post(CHAT, {"messages": [{**MESSAGE, "content": "abc"}]})[0] == 200


def test_a_model_without_a_template_says_what_helps() -> None:
    with live(template=None) as server:
        status, _, body = server.post(CHAT, {"messages": [MESSAGE]})
        assert status == 400
        assert "--chat-template-file" in error(body)["message"]
        well(server)


def test_deadlines_lost_replicas_and_faults_are_told() -> None:
    from hocket.serving.front.client import ReplicaLost
    from hocket.serving.request import Output

    def scripted(outputs: list[Any]) -> Any:
        class One(FakeReplica):
            def submit(self, request: Any) -> Any:
                stream = super().submit(request)
                self.drop(stream)
                for output in outputs:
                    if isinstance(output, Output):
                        output.id = request.id
                    stream.queue.put_nowait(output)
                stream.over = True
                return stream

        return One()

    half = Output(id="", tokens=[104, 105])
    cases = [
        (Output(id="", finish="deadline"), 504, "deadline_exceeded"),
        (Output(id="", finish="error", error="the sampler failed"), 500, "answer_failed"),
        (Output(id="", finish="abort"), 503, "service_unavailable"),
        (ReplicaLost("replica 0 died"), 503, "service_unavailable"),
        (RuntimeError("secret detail"), 500, "internal_error"),
        (None, 503, "service_unavailable"),
    ]
    for end, status, code in cases:
        with live(scripted([end])) as server:
            for stream in (False, True):
                found, headers, body = server.post(PLAIN, {**NORMAL, "stream": stream})
                assert (found, error(body)["code"]) == (status, code)
                assert ("retry-after" in headers) == (status == 503)
                assert b"secret" not in body
        with live(scripted([half, end])) as server:
            found, _, body = server.post(PLAIN, {**NORMAL, "stream": True})
            told = events(body)
            assert found == 200
            assert told[0]["choices"][0]["text"] == "hi"
            assert told[-2]["error"]["code"] == code
            assert told[-1] == "[DONE]"


def test_a_server_that_starts_or_ends_says_so() -> None:
    with live(FakeReplica(ready=False)) as server:
        assert server.get("/ready")[0] == 503
        assert server.get("/health")[0] == 200
        status, headers, _ = server.post(PLAIN, NORMAL)
        assert (status, headers["retry-after"]) == (503, "1")
        server.replica.ready = True
        assert server.get("/ready")[0] == 200
        well(server)
        server.service.closing = True
        assert server.get("/ready")[0] == 503
        assert server.post(PLAIN, NORMAL)[0] == 503


def test_running_requests_end_before_the_server_does() -> None:
    replica = FakeReplica(delay=0.02, length=10)
    with live(replica) as server:
        data = json.dumps({**NORMAL, "max_tokens": 20, "stream": True}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as door:
            door.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                + f"Content-Length: {len(data)}\r\n\r\n".encode()
                + data
            )
            while not replica.running:
                time.sleep(0.005)
            server.run(server.front.close(10.0))
            found = b""
            while part := door.recv(65536):
                found += part
        assert events(split(found)[2])[-1] == "[DONE]"
        with pytest.raises(ConnectionError):
            server.get("/health")


def test_too_many_requests_and_connections_are_told() -> None:
    replica = FakeReplica(delay=0.05, length=10_000, max_waiting=100)
    with live(replica, max_requests=3, max_connections=12) as server:
        data = json.dumps({"prompt": "x", "max_tokens": 200}).encode()
        whole = (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            + f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        doors = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
        for door in doors:
            door.sendall(whole)
        while len(replica.running) + len(replica.waiting) < 3:
            time.sleep(0.005)
        status, headers, body = server.post(PLAIN, NORMAL)
        assert (status, error(body)["code"]) == (429, "server_full")
        assert "retry-after" in headers
        assert server.get("/health")[0] == 200
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(9)]
        assert split(server.raw(b""))[0] == 503
        for door in (*doors, *idle):
            door.close()
        replica.length, replica.delay = 24, 0.0
        end = time.monotonic() + 10
        while server.replica.running and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.1)
        well(server)


# --- anything at all -------------------------------------------------------------------------

FIELDS = """
    prompt messages input model n best_of max_tokens max_completion_tokens max_output_tokens
    temperature top_p top_k min_p stop stream stream_options logprobs top_logprobs echo seed
    logit_bias user tools tool_choice response_format guided_json guided_regex guided_choice
    structured_outputs chat_template_kwargs deadline min_tokens ignore_eos stop_token_ids text
    instructions metadata suffix presence_penalty repetition_penalty cache_salt tokens
    skip_special_tokens continue_final_message include add_special_tokens
"""
INNER = ("role", "content", "type", "text", "a", "function", "name")
names = st.sampled_from(FIELDS.split())
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["user", "system", "json_object", "json_schema", "function", "auto"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(INNER), inner)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
counter = itertools.count()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([CHAT, PLAIN, RESPONSES, "/tokenize", "/detokenize"]),
    st.dictionaries(names, values, max_size=6),
    st.booleans(),
)
def test_any_fields(server: Live, path: str, body: dict[str, Any], whole: bool) -> None:
    if whole:
        body = {"prompt": "ab", "messages": [MESSAGE], "input": "x", "tokens": [1], **body}
    data = json.dumps(body).encode()
    status, _, answer = server.post(path, None, data=data)
    assert status in (200, 400, 404), (status, answer)
    if status != 200:
        error(answer)
    elif answer.startswith((b"data:", b"event:")):
        assert events(answer)[-1] == "[DONE]"
    else:
        json.loads(answer)
    if next(counter) % 5 == 0:
        well(server)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.sampled_from([CHAT, PLAIN, RESPONSES]))
def test_any_bytes(server: Live, data: bytes, path: str) -> None:
    status, _, answer = server.post(path, None, data=data or b"{}")
    assert status == 400
    error(answer)
    if next(counter) % 5 == 0:
        well(server)

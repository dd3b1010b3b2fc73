"""No request, whatever it holds, can stop the next one from succeeding.

Each case throws something at a server; what comes back, if anything does, must be an error in
OpenAI's form or a proper answer, and then an ordinary request must succeed, with nothing left at
the replica.
"""

from __future__ import annotations

import dataclasses
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
from tests.serving.http_hostile import CHAT, MESSAGE, PLAIN, REFUSED, RESPONSES
from tests.serving.http_live import Live, error, events, live, split

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


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_and_the_next_succeeds(server: Live, name: str) -> None:
    path, body, expected = REFUSED[name]
    if isinstance(body, bytes):
        status, _, answer = server.post(path, None, data=body)
    else:
        status, _, answer = server.post(path, body)
    assert status == expected, answer[:500]
    failure = error(answer)
    assert 0 < len(failure["message"]) < 2000
    assert failure["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
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
        end = time.monotonic() + 60
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
            end = time.monotonic() + 60
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


def test_deadlines_lost_replicas_and_faults_are_reported() -> None:
    from hocket.serving.front.client import ReplicaLost
    from hocket.serving.request import Output

    class Scripted(FakeReplica):
        """Tells what it was given, whatever is asked."""

        outputs: tuple[Any, ...] = ()

        def submit(self, request: Any) -> Any:
            stream = super().submit(request)
            self.drop(stream)
            for output in self.outputs:
                if isinstance(output, Output):
                    output = dataclasses.replace(output, id=request.id)
                stream.queue.put_nowait(output)
            stream.over = True
            return stream

    half = Output(id="", tokens=[104, 105])
    cases = [
        (Output(id="", finish_reason="deadline"), 504, "deadline_exceeded"),
        (Output(id="", finish_reason="error", error="the sampler failed"), 500, "answer_failed"),
        (Output(id="", finish_reason="abort"), 503, "service_unavailable"),
        (ReplicaLost("replica 0 died"), 503, "service_unavailable"),
        (RuntimeError("secret detail"), 500, "internal_error"),
        (None, 503, "service_unavailable"),
    ]
    replica = Scripted()
    with live(replica) as server:
        for end, status, code in cases:
            replica.outputs = (end,)
            for stream in (False, True):
                found, headers, body = server.post(PLAIN, {**NORMAL, "stream": stream})
                assert (found, error(body)["code"]) == (status, code)
                assert ("retry-after" in headers) == (status == 503)
                assert b"secret" not in body
            replica.outputs = (half, end)
            found, _, body = server.post(PLAIN, {**NORMAL, "stream": True})
            failure = events(body)
            assert found == 200
            assert failure[0]["choices"][0]["text"] == "hi"
            assert failure[-2]["error"]["code"] == code
            assert failure[-1] == "[DONE]"


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


def test_what_outlasts_the_server_gets_an_answer_and_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Half of a body, a whole answer and a stream that is not read, when the time is over."""
    replica = FakeReplica(delay=0.001, length=10**6, num_blocks=10**5)
    with live(replica, max_model_len=10**6) as server:
        bodies = [{**NORMAL, "max_tokens": 10**5, "stream": stream} for stream in (False, True)]
        datas = [b"{", *(json.dumps(body).encode() for body in bodies)]
        doors = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in datas]
        for door, data in zip(doors, datas, strict=True):
            length = len(data) + (data == b"{")
            door.sendall(f"POST {PLAIN} HTTP/1.1\r\nHost: localhost\r\n".encode())
            door.sendall(f"Content-Length: {length}\r\n\r\n".encode() + data)
        assert doors[2].recv(1) == b"H"
        while len(replica.running) < 2:
            time.sleep(0.005)
        server.run(server.front.close(0.2))
        for door in doors[:2]:
            found = b""
            while part := door.recv(65536):
                found += part
            status, headers, body = split(found)
            assert (status, headers["retry-after"]) == (503, "1")
            assert error(body)["message"] == "the server is ending"
        for door in doors:
            door.close()
        assert server.idle()
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("cut", [None, 40, 150])
@pytest.mark.parametrize("chunked", [False, True])
def test_an_offer_of_another_protocol_is_passed_over(
    server: Live, cut: int | None, chunked: bool
) -> None:
    """What Java's HTTP client sends: `Upgrade: h2c` with every request, and its body."""
    body = json.dumps(NORMAL).encode()
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    head = f"POST {PLAIN} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings"
    offer = "Upgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA"
    kind = "Content-Type: application/json"
    first = f"{head}\r\n{length}\r\n{offer}\r\n{kind}\r\n\r\n".encode() + sent
    last = first.replace(b"Connection: Upgrade", b"Connection: close, Upgrade")
    for whole in (last, first + last):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as door:
            for part in (whole,) if cut is None else (whole[:cut], whole[cut:]):
                door.sendall(part)
                time.sleep(0.01)
            answer = b""
            while found := door.recv(65536):
                answer += found
        count = 1 if whole is last else 2
        assert answer.count(b"HTTP/1.1 200 OK") == answer.count(b'"text":"abcabc"') == count
    well(server)


def test_other_protocols_are_not_spoken(server: Live) -> None:
    host = b"Host: localhost\r\n"
    offer = b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n"
    ready = b"GET /ready HTTP/1.1\r\n" + host
    found = server.raw((ready + offer) * 400 + ready + b"Connection: close\r\n\r\n")
    assert found.count(b"HTTP/1.1 200 OK") == 401
    for to in (b"localhost:80", b"/", b"a:1"):
        data = b"CONNECT " + to + b" HTTP/1.1\r\n" + host + b"\r\n"
        assert split(server.raw(data))[0] == 400
    well(server)


def test_too_many_requests_and_connections_are_reported() -> None:
    replica = FakeReplica(delay=0.05, length=10_000, max_queue=100)
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
        end = time.monotonic() + 60
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

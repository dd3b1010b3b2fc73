"""Text of answers: pieces, stop strings, tokens' bytes; templates, tools, keys, the gate."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hocket
from hocket.models.chat_template import ChatTemplates
from hocket.serving.front.text import StopStrings, TextPieces
from hocket.serving.front.words import TokenizerFace
from hocket.serving.http.app import POST
from hocket.serving.http.auth import Keys
from hocket.serving.http.docs_page import EXAMPLES
from hocket.serving.http.errors import ApiError
from hocket.serving.http.settings import is_loopback
from hocket.serving.http.tools import Tools, ToolText
from hocket.spec.errors import HocketError, ModelError, OptionError
from hocket.training.tokenizer import byte_tokenizer, train_tokenizer
from tests.serving.http_live import live

TEXTS = [
    "plain text of some length",
    "naïve café, 😀😀 日本語のテキスト",
    "tabs\tand\nlines\n\n",
    " a  b ",
]


def fallback_words() -> TokenizerFace:
    """A tokenizer as those of Llama 2 and Gemma: blocks for spaces, bytes for what it lacks."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ("▁", "h", "e", "l", "o", "w", "r", "d", "▁hello", "▁world"):
        vocabulary[piece] = len(vocabulary)
    merges = [("▁h", "ello"), ("▁", "h")]
    for left, right in merges:
        vocabulary.setdefault(left, len(vocabulary))
        vocabulary.setdefault(right, len(vocabulary))
        vocabulary.setdefault(left + right, len(vocabulary))
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("▁", "h")], byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return TokenizerFace(backend.to_str())


ALL_WORDS = {
    "bytes": lambda: TokenizerFace(byte_tokenizer().to_json()),
    "trained": lambda: TokenizerFace(train_tokenizer(TEXTS * 20, 300).to_json()),
    "fallback": fallback_words,
}


@pytest.fixture(scope="module", params=ALL_WORDS)
def words(request: pytest.FixtureRequest) -> TokenizerFace:
    return ALL_WORDS[request.param]()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("repeated", [1, 30])
@pytest.mark.parametrize("at_once", [1, 3])
def test_pieces_add_up_to_the_text(
    words: TokenizerFace, text: str, repeated: int, at_once: int
) -> None:
    ids = words.encode(text * repeated, special=False)
    pieces = TextPieces(words.decode)
    streamed = [pieces.extend(ids[i : i + at_once]) for i in range(0, len(ids), at_once)]
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(streamed)
    streamed.append(pieces.end())
    assert "".join(streamed) == pieces.text == words.decode(ids)


@given(st.lists(st.integers(0, 255), max_size=120))
def test_any_bytes_become_text_and_none_is_lost(ids: list[int]) -> None:
    calls: list[int] = []

    def decode(some: Any) -> str:
        calls.append(len(some))
        return bytes(some).decode(errors="replace")

    pieces = TextPieces(decode)
    streamed = "".join(pieces.add(token) for token in ids) + pieces.end()
    assert streamed == bytes(ids).decode(errors="replace")
    assert max(calls, default=0) <= 64, "the cost of a token grows with the text"


@given(st.lists(st.integers(0, 265), max_size=60))
def test_any_tokens_of_a_byte_fallback_vocabulary(ids: list[int]) -> None:
    words = FALLBACK
    pieces = TextPieces(words.decode)
    streamed = "".join(pieces.add(token) for token in ids) + pieces.end()
    whole = words.decode(ids)
    if "\N{REPLACEMENT CHARACTER}" not in whole + streamed:
        assert streamed == whole


FALLBACK = fallback_words()


def first_stop(text: str, strings: list[str]) -> tuple[str, str | None]:
    """What a reader of the whole text would find."""
    for end in range(1, len(text) + 1):
        found = [s for s in strings if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_stop_strings_end_a_text_where_they_begin(parts: list[str], strings: list[str]) -> None:
    stops, streamed, found = StopStrings(strings), "", None
    whole = "".join(parts)
    for part in parts:
        text, found = stops.feed(part)
        streamed += text
        assert whole.startswith(streamed)
        if found is not None:
            break
    else:
        streamed += stops.end()
    assert (streamed, found) == first_stop(whole, strings)


def test_what_cannot_become_a_stop_string_is_reported_at_once() -> None:
    stops = StopStrings(["stop", "other"])
    assert stops.feed("a st") == ("a ", None)
    assert stops.feed("ep s") == ("step ", None)
    assert stops.feed("to") == ("", None)
    assert stops.feed("p now") == ("", "stop")


def test_bytes_of_tokens(words: TokenizerFace) -> None:
    for text in TEXTS:
        ids = words.encode(text, special=False)
        joined = b"".join(map(words.token_bytes, ids)).decode()
        assert joined in (text, " " + text)  # some tokenizers put a space before a text
    assert words.token_bytes(10**6) == b""


# --- templates -----------------------------------------------------------------------------------


def render(text: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    messages = messages or [{"role": "user", "content": "hi"}]
    return ChatTemplates({"default": text}, {"bos_token": "<s>"}).render(
        messages, most=10_000, **options
    )


def test_templates_see_what_those_of_transformers_see() -> None:
    text = (
        "{{ bos_token }}{%- set ns = namespace(n=0) -%}\n"
        "{% for message in messages %}\n"
        "{% set ns.n = ns.n + 1 %}{% if ns.n > 9 %}{% break %}{% endif %}\n"
        "<{{ message['role'] }}>{% generation %}{{ message.content | trim }}{% endgeneration %}\n"
        "{% endfor %}"
        "{{ {'a': 'é<>'} | tojson }}{{ strftime_now('%Y')[:2] }}"
    )
    assert render(text) == '<s><user>hi{"a": "é<>"}20'


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__ }}",
        "{{ 'x' * 100000000 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ range(999999999) | list }}",
        "{{ namespace(__init__=1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'x' as y %}",
        "{{ 'x' * 20000 }}",
    ],
)
def test_templates_cannot_reach_out(text: str) -> None:
    with pytest.raises((ApiError, ModelError)):
        print(render(text))


def test_the_last_message_can_be_continued() -> None:
    text = "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The answ"}]
    assert render(text, messages, continue_last=True) == "[user]q</s>[assistant]The answ"


def test_a_prompt_far_too_long_is_refused_by_its_beginning() -> None:
    from tokenizers import Tokenizer, models

    with live(max_model_len=256) as server:
        words, seen = server.service.words, []
        encode = words.encode

        def noted(text: str, **options: Any) -> list[int]:
            seen.append(len(text))
            return encode(text, **options)

        words.encode = noted  # type: ignore[method-assign]
        for path, body in (
            ("/v1/completions", {"prompt": "long " * 200_000, "max_tokens": 1}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 10**6}]}),
        ):
            status, _, found = server.post(path, body)
            assert status == 400, found
            error = json.loads(found)["error"]
            assert error["code"] == "context_length_exceeded"
            assert error["message"].startswith("the first 4096 of the prompt's 1000")
        assert seen == [4096, 4096]
        # One that has few tokens, however many characters, is let through.
        model = models.WordLevel({"<unk>": 0}, unk_token="<unk>")
        server.service.words = TokenizerFace(Tokenizer(model).to_str())
        assert server.run(server.service.encode("x" * 10**6, param="prompt")) == [0]


def test_templates_are_read_from_a_folder(tmp_path: Path) -> None:
    assert ChatTemplates.read(tmp_path) is None
    settings = {
        "chat_template": [
            {"name": "default", "template": "D"},
            {"name": "tool_use", "template": "T{{ tools }}"},
        ],
        "bos_token": {"content": "<s>"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = ChatTemplates.read(tmp_path)
    assert found is not None
    assert found.render([], most=99) == "D"
    assert found.render([], tools=[{"a": 1}], most=99).startswith("T")
    assert found.words == {"bos_token": "<s>"}
    (tmp_path / "chat_template.jinja").write_text("J")
    found = ChatTemplates.read(tmp_path)
    assert found is not None
    assert found.render([], most=99) == "J"
    own = tmp_path / "own.jinja"
    own.write_text("{{ bos_token }}O")
    found = ChatTemplates.read(tmp_path, own)
    assert found is not None
    assert found.render([], most=99) == "<s>O"
    own.write_text("{% if %}")
    with pytest.raises(ModelError, match="cannot be read"):
        ChatTemplates.read(tmp_path, own)
    with pytest.raises(OptionError, match="cannot be read"):
        ChatTemplates.read(tmp_path, tmp_path / "none.jinja")


# --- tools ---------------------------------------------------------------------------------------

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '{"name": "weather", "arguments": {"town": "Oslo"}}'


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("template", "text", "said", "calls"),
    [
        ("tools <tool_call>", f"Hm.<tool_call>\n{CALL}\n</tool_call>", "Hm.", 1),
        ("tools <tool_call>", f"<tool_call>{CALL}</tool_call> <tool_call>{CALL}</tool_call>", " ",
         2),
        ("tools <tool_call>", "a <tool and <tool_call> b", "a <tool and <tool_call> b", 0),
        ("tools <tool_call>", "<tool_call>{]</tool_call>.", "<tool_call>{]</tool_call>.", 0),
        ("tools <tool_call>", '<tool_call>{"name": "rm"}</tool_call>',
         '<tool_call>{"name": "rm"}</tool_call>', 0),
        ("tools [TOOL_CALLS]", f"[TOOL_CALLS][{CALL}, {CALL}]", "", 2),
        ("tools [TOOL_CALLS]", "[TOOL x", "[TOOL x", 0),
        ('tools "parameters"', '{"name": "weather", "parameters": {"town": "Oslo"}}', "", 1),
        ('tools "parameters"', '<|python_tag|>{"name": "weather", "parameters": {}}', "", 1),
        ('tools "parameters"', "It is {sunny}.", "It is {sunny}.", 0),
        ('tools "parameters"', '{"some": "JSON"}', '{"some": "JSON"}', 0),
    ],
)  # fmt: skip
def test_calls_are_found_in_the_text(
    template: str, text: str, said: str, calls: int, size: int
) -> None:
    tools = Tools.read([WEATHER], None, ChatTemplates({"default": template}))
    found = ToolText(tools)
    streamed = "".join(found.feed(text[i : i + size]) for i in range(0, len(text), size))
    streamed += found.end()
    assert streamed == said
    assert [call.name for call in found.calls] == ["weather"] * calls


def test_a_call_without_end_is_text_and_bounded() -> None:
    tools = Tools.read([WEATHER], None, ChatTemplates({"default": "tools <tool_call>"}))
    found = ToolText(tools)
    streamed = found.feed("<tool_call>") + "".join(found.feed("x" * 1000) for _ in range(200))
    assert streamed + found.end() == "<tool_call>" + "x" * 200_000


def test_tools_without_a_template_for_them_are_refused() -> None:
    with pytest.raises(ApiError, match="no tools"):
        Tools.read([WEATHER], None, ChatTemplates({"default": "{{ messages }}"}))


# --- keys and the gate ---------------------------------------------------------------------------


def test_keys_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\nalice alices-secret\nan-unnamed-key\n")
    keys = Keys.read(file)
    assert len(keys) == 2
    assert keys.user(b"Bearer alices-secret") == "alice"
    assert keys.user(b"bearer alices-secret") == "alice"
    unnamed = keys.user(b"Bearer an-unnamed-key")
    assert unnamed is not None
    assert "unnamed" not in unnamed
    for wrong in (b"Bearer alices-secre", b"Bearer ", b"alices-secret", b"Basic YTpi", None, b""):
        assert keys.user(wrong) is None
    for bad in ("", "# nothing\n", "short\n", "one two three-three\n"):
        file.write_text(bad)
        with pytest.raises(OptionError):
            Keys.read(file)
    with pytest.raises(HocketError, match="cannot be read"):
        Keys.read(tmp_path / "none")


def test_every_route_but_health_needs_the_key() -> None:
    with live(keys=Keys([("me", "a-key-of-mine")])) as server:
        routes = ["/v1/models", "/v1/models/x", "/nowhere", "/tokenize", "/openapi.json",
                  "/v1/completions", "/metrics", "/health/", "//health"]  # fmt: skip
        for path in routes:
            assert server.get(path)[0] == 401, path
            assert server.post(path, {"prompt": "x"})[0] == 401, path
            assert server.post(path, {}, {"Authorization": "Bearer nope-nope"})[0] == 401, path
        assert server.get("/health")[0] == 200
        status, _, page = server.get("/docs")
        assert status == 200
        assert hocket.__version__.encode() not in page
        assert server.get("/version")[0] == 401
        assert server.get("/ready")[0] == 200
        status, headers, body = server.get("/")
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert b"<title>" in body
        own = {"Authorization": "Bearer a-key-of-mine"}
        assert server.get("/v1/models", **own)[0] == 200
        assert hocket.__version__.encode() in server.get("/version", **own)[2]
        assert server.get("/", **own)[0] == 200
        assert not server.replica.seen
        for path in ("/metrics", "/nowhere"):
            with pytest.raises(HTTPError, match="401") as stranger:
                urlopen(server.metrics + path)
            assert b"hocket_" not in stranger.value.read()
        asked = Request(f"{server.metrics}/metrics", headers=own)
        assert b"hocket_running" in urlopen(asked).read()


def test_headers_of_every_answer() -> None:
    with live() as server:
        for path in ("/", "/health", "/nowhere"):
            _, headers, _ = server.get(path, **{"X-Request-Id": "my-id.1"})
            assert headers["x-request-id"] == "my-id.1"
            assert headers["x-content-type-options"] == "nosniff"
            assert "access-control-allow-origin" not in headers
        _, headers, _ = server.get("/", **{"X-Request-Id": "http://169.254.169.254/" + "x" * 99})
        assert headers["x-request-id"].isalnum(), "an id that is none is not repeated"
        assert "unsafe" not in headers["content-security-policy"]
        for name in ("localhost:1", "[::1]:9", "127.0.0.1", "a.localhost"):
            assert server.get("/health", Host=name)[0] == 200
        for name in ("evil.example", "127.0.0.1.evil.example", "192.168.0.1", ""):
            assert server.get("/health", Host=name)[0] == 403
        twice = b"GET /health HTTP/1.1\r\nHost: evil.example\r\nHost: localhost\r\n"
        assert server.raw(twice + b"Connection: close\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_pages_of_allowed_sites_may_ask() -> None:
    origin = {"Origin": "https://app.example"}
    with live(origins=("https://app.example",), keys=Keys([("me", "a-key-of-mine")])) as server:
        head = "OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += "Origin: https://app.example\r\nAccess-Control-Request-Method: POST\r\n\r\n"
        answer = server.raw(head.encode())
        assert answer.startswith(b"HTTP/1.1 204")
        assert b"access-control-allow-origin: https://app.example" in answer
        own = {"Authorization": "Bearer a-key-of-mine", **origin}
        status, headers, _ = server.get("/v1/models", **own)
        assert (status, headers["access-control-allow-origin"]) == (200, "https://app.example")
        assert server.get("/v1/models", **origin)[0] == 401


def test_metrics_are_on_their_own_port() -> None:
    with live() as server:
        server.post("/v1/completions", {"prompt": "abc", "max_tokens": 5})
        text = urlopen(f"{server.metrics}/metrics").read().decode()
        assert "hocket_completion_tokens_total 5.0" in text
        assert 'hocket_running{replica="0"} 0.0' in text
        assert "hocket_time_to_first_token_seconds_count 1.0" in text
        assert "hocket_time_per_output_token_seconds_count 1.0" in text
        assert 'hocket_http_responses_total{route="/v1/completions",status="200"} 1.0' in text
        assert server.get("/metrics")[0] == 404


def test_addresses_of_this_machine() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.8.8", "::1", "[::1]")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))


def test_the_openapi_document_describes_every_route() -> None:
    with live() as server:
        document = json.loads(server.get("/openapi.json")[2])
        posts = {path for path, ways in document["paths"].items() if "post" in ways}
        assert posts == set(POST)
        names: list[str] = []

        def walk(part: object) -> None:
            """Every reference leads somewhere; every operation has a name of its own."""
            if isinstance(part, dict):
                if "$ref" in part:
                    place: object = document
                    for key in part["$ref"].removeprefix("#/").split("/"):
                        assert isinstance(place, dict)
                        place = place[key]
                names.extend([part["operationId"]] if "operationId" in part else [])
                for one in part.values():
                    walk(one)
            elif isinstance(part, list):
                for one in part:
                    walk(one)

        walk(document)
        assert len(names) == len(set(names)) == len(document["paths"])
        for path, ways in document["paths"].items():
            if "get" in ways:
                assert server.get(path.replace("{name}", "fake"))[0] in (200, 404), path
        chat = document["components"]["schemas"]["ChatFields"]["properties"]
        assert {"messages", "temperature", "stream", "tools"} <= set(chat)
        assert "security" not in document


def test_the_page_of_the_routes_shows_every_route_and_field_and_loads_nothing() -> None:
    with live() as server:
        document = json.loads(server.get("/openapi.json")[2])
        _, headers, body = server.get("/docs")
        page = body.decode()
        assert "unsafe" not in headers["content-security-policy"]
        assert "script-src 'none'" in headers["content-security-policy"]
        assert not re.search(r"""(src|href)=["'](?!data:|openapi\.json|\./)""", page)
        for path in document["paths"]:
            assert f" {path}</code>" in page, path
        for schema in document["components"]["schemas"].values():
            for name in schema["properties"]:
                assert name in page, name
        # Each command's body is one that the route takes.
        for path, body in EXAMPLES.items():
            assert server.post(path, body)[0] in (200, 403), path


def test_an_unknown_route_is_answered_with_the_known_ones() -> None:
    with live() as server:
        status, _, body = server.post("/v1/embeddings", {"input": "x"})
        assert status == 404
        message = json.loads(body)["error"]["message"]
        assert message.startswith("there is no /v1/embeddings; this server has ")
        document = json.loads(server.get("/openapi.json")[2])
        assert all(path in message for path in document["paths"]), message
        assert b"metrics are on --metrics-port" in server.get("/metrics")[2]
        with pytest.raises(HTTPError) as lost:
            urlopen(f"{server.metrics}/nowhere")
        assert b"this server has /metrics" in lost.value.read()

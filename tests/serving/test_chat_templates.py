"""Chats as transformers writes them: the forms of well-known templates, message by message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from hocket.models.chat_template import ChatTemplates, TemplateRefusal  # noqa: E402
from hocket.spec.errors import ModelError  # noqa: E402

pytestmark = pytest.mark.train

LLAMA = """\
{{- bos_token }}
{%- if tools is not none %}
    {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""  # noqa: E501

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content or '' %}
        {%- if '</think>' in content and loop.index0 < ns.last_query_index %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""  # noqa: E501

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and message == user_messages[-1] %}
            {{- "[AVAILABLE_TOOLS]" + tools | tojson + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST]" + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST]" + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls %}
        {{- "[TOOL_CALLS]" + (message.tool_calls | map(attribute="function") | list | tojson) }}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- "[TOOL_RESULTS]" + {"content": message.content} | tojson + "[/TOOL_RESULTS]" }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}\
{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}\
{% endif %}\
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}\
{{ '<start_of_turn>' + role + '
' + message['content'] | trim + '<end_of_turn>
' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model
'}}{% endif %}
"""

CHATML = """\
{% for message in messages %}
    {{'<|im_start|>' + message['role'] + '\\n'}}{% generation %}{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>' + '\\n'}}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""  # noqa: E501

FORMS = {"llama": LLAMA, "qwen": QWEN, "mistral": MISTRAL, "gemma": GEMMA, "chatml": CHATML}

USER = {"role": "user", "content": " What is 2 < 3, in «Jinja»?\n"}
SAID = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTrue."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "é<"}}}
    ],
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [{"role": "system", "content": "Be kind."}, USER],
    "turns": [USER, SAID, {"role": "user", "content": "Why?"}],
    "called": [USER, CALL, {"role": "tool", "content": '{"sum": 5}'}],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds <two> numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def theirs() -> Any:
    from tokenizers import Tokenizer, models

    made = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **TOKENS)


def both(theirs: Any, form: str, chat: list[dict[str, Any]], **options: Any) -> tuple[Any, Any]:
    """What transformers writes, and what we write; None where it is refused."""
    text = FORMS[form]
    last = options.pop("last", False)
    tools, switches = options.pop("tools", None), options.pop("switches", {})
    try:
        wanted = theirs.apply_chat_template(
            chat, chat_template=text, tools=tools, tokenize=False,
            add_generation_prompt=not last, continue_final_message=last, **switches,
        )  # fmt: skip
    except Exception:
        wanted = None
    try:
        found = ChatTemplates({"default": text}, TOKENS).render(
            chat, tools=tools, switches=switches, continue_last=last, most=10_000
        )
    except TemplateRefusal:
        found = None
    return wanted, found


@pytest.mark.parametrize("form", FORMS)
def test_chats_are_written_identically(form: str, theirs: Any) -> None:
    written = 0
    for name, chat in CHATS.items():
        for tools in (None, TOOLS):
            wanted, found = both(theirs, form, chat, tools=tools)
            assert found == wanted, (name, bool(tools))
            written += wanted is not None
    assert written >= 4, "what both refuse is no comparison"
    wanted, found = both(theirs, form, CHATS["one"], switches={"enable_thinking": False})
    assert found == wanted
    assert ("<think>" in found) == (form == "qwen")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("begun", ["The answer is", "It is ", " So", "What"])
def test_answers_are_continued_identically(form: str, begun: str, theirs: Any) -> None:
    chat = [USER, {"role": "assistant", "content": begun}]
    wanted, found = both(theirs, form, chat, last=True)
    assert wanted is not None
    assert found == wanted
    assert found.rstrip().endswith(begun.strip())


@pytest.mark.parametrize(
    "text",
    [
        "{% if %}",
        "{% break %}",
        "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
        "{% if 1 %}" * 20_000 + "{% endif %}" * 20_000,
        "{{ " + "+".join("1" * 50_000) + " }}",
        "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "9" * 200_000 + " }}",
    ],
    ids=["syntax", "break", "brackets", "ifs", "sum", "loops", "digits"],
)
def test_what_is_no_template_is_reported(text: str) -> None:
    with pytest.raises(ModelError, match="the chat template 'default' cannot be read") as raised:
        ChatTemplates({"default": text})
    assert raised.value.hint == "--chat-template-file FILE"


def test_a_template_file_of_other_bytes_is_reported(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"cannot be read: .*chat_template.jinja: 'utf-8' codec"):
        ChatTemplates.read(tmp_path)

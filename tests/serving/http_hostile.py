"""Requests that no server may suffer from: what is asked, and the status that answers it.

They suit a server whose context has 512 tokens and whose cache holds 384, of a byte tokenizer,
with bodies of a megabyte at most.
"""

from __future__ import annotations

import json
from typing import Any

CHAT, PLAIN, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


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

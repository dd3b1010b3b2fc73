"""Mutations: JSON values, texts and bytes, changed at random places by what readers trip over."""

from __future__ import annotations

import copy
import json
import random
import re
import struct
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 255, 2**16, 2**31 - 1, 2**31, 2**63, 2**70, 10**400, 0.5,
    -0.0, 1e-300, 1e308, float("nan"), float("inf"), -float("inf"), "", " ", "0", "-1", "nan", "O",
    "float16", ">u2", "uint64", "../../x", "/etc/passwd", "/dev/zero", "\x00", "\ud800", "e" * 9,
    "x" * 5000, "{{ 7 * 7 }}", "evil.Model", "auto", "dp2.tp2", "1f1b", [], {}, [[]], [None],
    {"": None}, [0] * 50, {"auto_map": {"AutoConfig": "evil.Model"}}, {"__class__": "x"},
)  # fmt: skip
KEYS = ("auto_map", "", "x", "dtype", "trust_remote_code", "__init__", "self", "version", "model")
TOKENS = (
    "0", "-1", "1e999", "99999999999999999999", "nan", "inf", "null", "true", "[", "]", "{", "}",
    '"', "\\", ",", ":", "=", "\x00", "\n", "\r\n", " ", "#", "'", "\ufeff", "\u202e", "F", "B",
    "SEND_F", "[[", "]]", ".", "..", "/", "*",
)  # fmt: skip
NUMBERS = (b"9" * 5000, b"1" + b"0" * 18, b"1000000000")
"""More digits than int() reads, more than a loop ends after, and more than memory holds."""


DEEP = "so deep that a parser gives up"


def deep(count: int) -> Any:
    """A list in a list, so many times."""
    found: Any = 0
    for _ in range(count):
        found = [found]
    return found


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside of a value; at most some thousand."""
    found = [path]
    if isinstance(value, dict):
        for key in value:
            found += places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 30)):
            found += places(value[index], (*path, index))
    return found[:5000]


def mutated(value: Any, rng: random.Random) -> Any:
    """A JSON value with one to four changes."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        where = rng.choice(places(value))
        if not where:
            if rng.random() < 0.05:
                value = rng.choice(VALUES)
            continue
        inside = value
        for key in where[:-1]:
            inside = inside[key]
        key, old = where[-1], inside[where[-1]]
        action = rng.randrange(10)
        if action < 4:
            inside[key] = copy.deepcopy(rng.choice(VALUES))
        elif action == 4:
            del inside[key]
        elif action == 5 and isinstance(inside, dict):
            inside[rng.choice(KEYS)] = inside.pop(key)
        elif action == 6 and isinstance(inside, list):
            inside.insert(key, copy.deepcopy(old))
        elif action == 7:
            other: Any = value
            for step in rng.choice(places(value)):
                other = other[step]
            inside[key] = copy.deepcopy(other)
        elif action == 8 and type(old) in (int, float) and abs(old) < 2**63:
            inside[key] = rng.choice((-old, old + 1, old * 1000, old / 3, old - 1, int(old) << 40))
        elif action == 9:
            inside[key] = rng.choice((deep(3), deep(60), DEEP))
    return value


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Bytes with one to four changes: flipped, cut, repeated, or with other words in them; and a
    tenth of them with a number that is far too large."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 2, 8, 64)))
        action = rng.randrange(7)
        if action == 0:
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        elif action == 1:
            data = data[:at] + data[end:]
        elif action == 2:
            data = data[:end] + data[at:end] * rng.choice((1, 2, 40)) + data[end:]
        elif action == 3 and rng.random() < 0.3:
            data = data[:at]
        elif action in (4, 5):
            data = data[:at] + rng.choice(TOKENS).encode() + data[at + (action == 5) :]
        elif action == 6:
            digits = [i for i, byte in enumerate(data) if 48 <= byte < 58]
            if digits:
                at = rng.choice(digits)
                data = data[:at] + rng.choice(TOKENS[:5]).encode() + data[at + 1 :]
    numbers = list(re.finditer(rb"\d+", data)) if rng.random() < 0.1 else []
    if numbers:
        number = rng.choice(numbers)
        data = data[: number.start()] + rng.choice(NUMBERS) + data[number.end() :]
    return data


def text_of(value: Any) -> bytes:
    """JSON as a stranger may write it: with NaN, and with half of a surrogate pair."""
    text = json.dumps(value, ensure_ascii=True)
    return text.replace(f'"{DEEP}"', "[" * 5000 + "]" * 5000).encode()


def json_file(data: bytes, rng: random.Random) -> bytes:
    """A JSON file: its values changed, or its bytes."""
    if rng.random() < 0.25:
        return damaged(data, rng)
    return text_of(mutated(json.loads(data), rng))


def json_lines(data: bytes, rng: random.Random) -> bytes:
    """A file of JSON lines, with a line changed."""
    if rng.random() < 0.3:
        return damaged(data, rng)
    lines = data.splitlines()
    for at in rng.sample(range(len(lines)), rng.choice((1, 2))):
        lines[at] = text_of(mutated(json.loads(lines[at]), rng))
    return b"\n".join(lines) + b"\n"


def checksummed(data: bytes, rng: random.Random) -> bytes:
    """A JSON file with a checksum of its own, which the stranger has computed again."""
    from hocket.spec.files import json_crc32

    value = mutated(json.loads(data), rng)
    if not isinstance(value, dict) or rng.random() < 0.1:
        return damaged(data, rng)
    inner = value.get("manifest")
    if isinstance(inner, dict):
        value["crc32"] = json_crc32(inner)
    else:
        value.pop("crc32", None)
        value["crc32"] = json_crc32(value)
    return text_of(value)


def safetensors(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file: its header's values, its length, or its bytes."""
    action = rng.random()
    if action < 0.15:
        return damaged(data, rng)
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = data[8 : 8 + length], data[8 + length :]
    if action < 0.25:
        length = rng.choice((0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1))
        return struct.pack("<Q", length) + header + rest
    header = json_file(header, rng)
    return struct.pack("<Q", len(header)) + header + rest

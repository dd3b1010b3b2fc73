"""Request traces: arrival, prompt and answer length of every request, read from a file.

    CSV            a header line, then one request a line
    JSON lines     one object a line

Columns and keys, each under its own name or one that published traces use: `arrival` (seconds),
`prompt_tokens` (`input_length`, `ContextTokens`), `output_tokens` (`output_length`,
`GeneratedTokens`). Other columns are not read.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hocket.spec.errors import OptionError
from hocket.spec.files import MOST_TEXT, parse_json, read_text
from hocket.spec.service import Service

NAMES = {
    "arrival": ("arrival", "arrival_s", "arrival_seconds"),
    "prompt_tokens": ("prompt_tokens", "prompt_len", "input_length", "ContextTokens"),
    "output_tokens": ("output_tokens", "output_len", "output_length", "GeneratedTokens"),
}
"""What is read, by the names that it may have."""

MOST_REQUESTS = 200_000
"""Of a file: what is simulated in minutes."""

MOST_TOKENS = 10_000_000
"""Of a prompt or an answer."""

MOST_SECONDS = 1e9
"""Of an arrival: thirty years."""

EXAMPLE = '{"arrival": 0.25, "prompt_tokens": 512, "output_tokens": 128}'


@dataclasses.dataclass(frozen=True)
class RequestTrace:
    """Requests in the order of their arrival: seconds since the first, tokens, tokens."""

    arrivals: tuple[float, ...]
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def rate(self) -> float:
        """Requests per second: all over the time from the first to the last arrival; of requests
        that all arrive at once, their number."""
        return len(self) / (self.arrivals[-1] or 1.0)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        return max(a + b for a, b in zip(self.prompts, self.outputs, strict=True))

    @property
    def prompt_len(self) -> int:
        """Mean tokens of a prompt, rounded."""
        return max(1, round(sum(self.prompts) / len(self)))

    @property
    def output_len(self) -> int:
        """Mean tokens of an answer, rounded."""
        return max(1, round(sum(self.outputs) / len(self)))

    def under(self, service: Service) -> RequestTrace:
        """The trace as a service asks for it: faster where that has a higher rate, longer where its
        mean lengths are; itself where both are its own."""
        pace = self.rate / service.requests_per_second
        prompt = service.prompt_len / self.prompt_len
        output = service.output_len / self.output_len
        if (pace, prompt, output) == (1.0, 1.0, 1.0):
            return self
        return RequestTrace(
            tuple(pace * seconds for seconds in self.arrivals),
            tuple(max(1, round(prompt * tokens)) for tokens in self.prompts),
            tuple(max(1, round(output * tokens)) for tokens in self.outputs),
        )


def read_trace(path: str | Path) -> RequestTrace:
    """The requests of a file, sorted by arrival.

    Raises:
        OptionError: no such file, one that is too large, or a line that is not a request, with its
            number.
    """
    path = Path(path)
    try:
        text = read_text(path, most_bytes=MOST_TEXT).removeprefix("\ufeff")
    except OSError as error:
        reason = error.strerror or str(error)
        raise OptionError(f"--trace {path}: {reason}", hint="--trace FILE") from None
    except ValueError as error:
        why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
        raise OptionError(f"--trace {path}: {why}") from None
    rows = _json_lines(path, text) if text.lstrip()[:1] == "{" else _csv_lines(path, text)
    found: list[tuple[float, int, int]] = []
    for line, row in rows:
        if len(found) == MOST_REQUESTS:
            raise OptionError(
                f"--trace {path}: more than {MOST_REQUESTS:,} requests",
                hint=f"head -n {MOST_REQUESTS} {path} > shorter",
            )
        found.append(
            (
                _number(path, line, row, "arrival"),
                _tokens(path, line, row, "prompt_tokens"),
                _tokens(path, line, row, "output_tokens"),
            )
        )
    if not found:
        raise OptionError(f"--trace {path} holds no requests", hint=f"lines as {EXAMPLE}")
    found.sort(key=lambda one: one[0])
    start = found[0][0]
    arrivals, prompts, outputs = zip(*found, strict=True)
    return RequestTrace(tuple(seconds - start for seconds in arrivals), prompts, outputs)


def _json_lines(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    # Not splitlines: U+2028 and others may stand in a string.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise _bad(path, number, f"it is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise _bad(path, number, f"it is {type(row).__name__}, not an object")
        yield number, row


def _csv_lines(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(text.splitlines(), strict=True)
    try:
        names = reader.fieldnames or ()
        for what, spellings in NAMES.items():
            if not set(spellings) & set(names):
                shown = ", ".join(str(name)[:40] for name in names[:8]) or "none"
                raise OptionError(
                    f"--trace {path} has no column {what}; its columns: {shown}",
                    hint=f"a header arrival,prompt_tokens,output_tokens; or lines as {EXAMPLE}",
                )
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise _bad(path, reader.line_num, f"it is not CSV: {error}") from None


def _bad(path: Path, line: int, why: str) -> OptionError:
    return OptionError(f"--trace {path}, line {line}: {why}", hint=f"lines as {EXAMPLE}")


def _number(path: Path, line: int, row: Mapping[str, Any], what: str) -> float:
    value = next((row[name] for name in NAMES[what] if row.get(name) is not None), None)
    if value is None:
        raise _bad(path, line, f"it has no {what}")
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise _bad(path, line, f"{what} is {str(value)[:40]!r}, not a number") from None
    if not (math.isfinite(number) and 0 <= number <= MOST_SECONDS):
        raise _bad(path, line, f"{what} is {number:g}; it is a number from 0 to {MOST_SECONDS:g}")
    return number


def _tokens(path: Path, line: int, row: Mapping[str, Any], what: str) -> int:
    number = _number(path, line, row, what)
    if number != int(number) or not 1 <= number <= MOST_TOKENS:
        raise _bad(
            path, line, f"{what} is {number:g}; it is a whole number from 1 to {MOST_TOKENS:,}"
        )
    return int(number)

"""Structure: which tokens may come next, so that an answer obeys a JSON schema or a pattern.

    text of `SamplingParams.structure`                 answers that obey it
    {"type": "json_object"}                      one JSON object
    {"type": "json_schema", "schema": {...}}     JSON that the schema admits
    {"type": "regex", "pattern": "..."}          texts that match from end to end

Grammars are llguidance's (MIT, a wheel without requirements): an Earley parser over a lexer of
regular-expression derivatives, built lazily, so that no schema or pattern has an automaton to
explode, and every phase has a bound. What it is given here is bounded besides: patterns cost it
time that its own bounds do not count. It reads no files and fetches nothing that a schema names.
`oneOf` is taken as `anyOf`: that no second branch admits an answer too is not looked at.

The front calls `check_structure`: what it lets pass compiles in the ranks as well, in bounded time.
In the ranks `Structures` compiles in a thread, during the forward pass. An answer that was
preempted is taken up by giving its state the tokens of it.

Imports no torch: the front has none.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hocket.spec.errors import HocketError, OptionError
from hocket.spec.install import install_line

MAX_PATTERN = 32768
"""Most characters of all regular expressions of a structure."""
MAX_REPEATS = 512
"""Most repetitions (* + ? {n,m}) in all of them: 3000 times ".*" would take seconds to parse."""

_WHITESPACE = r"\n?[ \t]{0,32}"
"""Between the parts of JSON. Without a bound, a model that likes blanks writes nothing else."""
_REPEAT = re.compile(r"\\.|([*+?{])", re.DOTALL)


def _limits(library: Any) -> Any:
    """A few milliseconds for a step, tenths of a second to build, some megabytes of states."""
    return library.LLParserLimits(
        initial_lexer_fuel=300_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=10_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ModuleNotFoundError:
        raise OptionError(
            "structured output needs llguidance", hint=install_line("serve")
        ) from None


def check_structure(text: str) -> None:
    """Refuse what no answer can obey, or what costs too much; torch-free.

    Takes up to some tenths of a second, most of it without Python's lock: call it in a thread.

    Raises:
        OptionError: not a structure; a schema or pattern that is malformed, not supported, too
            large, or that no text obeys.
    """
    library = _library()
    grammar = _grammar(library, text)
    matcher = library.LLMatcher(_bytes_alone(), grammar, log_level=0, limits=_limits(library))
    first = matcher.compute_bitmask() if not matcher.is_error() else b""
    if matcher.is_error():
        raise OptionError(f"the structure cannot be used: {_reason(matcher)}")
    if not any(first):
        raise OptionError("no text obeys the structure")


def _grammar(library: Any, text: str) -> str:
    """llguidance's form of a structure. Raises OptionError."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"the structure is not JSON: {error}") from None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "regex":
        pattern = given.get("pattern")
        if not isinstance(pattern, str):
            raise OptionError("a structure of type regex has a pattern, a text")
        _bound_patterns([pattern])
        return str(library.LLMatcher.grammar_from_regex(pattern))
    if kind == "json_object":
        schema: Any = {"type": "object"}
    elif kind == "json_schema":
        schema = given.get("schema")
        schema = {} if schema is True else schema
        if schema is False:
            raise OptionError("no text obeys the schema false")
        if not isinstance(schema, dict):
            raise OptionError("a structure of type json_schema has a schema, an object")
        try:
            _bound_patterns(_patterns(schema))
        except RecursionError:
            raise OptionError("the structure's schema is nested too deeply") from None
    else:
        raise OptionError(
            f"the structure's type is {kind!r}; it must be json_object, json_schema or regex"
        )
    try:
        return str(
            library.LLMatcher.grammar_from_json_schema(
                json.dumps(schema),
                overrides={
                    "whitespace_pattern": _WHITESPACE,
                    "lenient": False,
                    "coerce_one_of": True,
                },
            )
        )
    except (ValueError, RecursionError) as error:
        raise OptionError(f"the structure's schema cannot be used: {error}") from None


def _patterns(schema: Any) -> list[str]:
    """Every text of a schema that is read as a regular expression, and some that are not."""
    found: list[str] = []
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key == "pattern" and isinstance(value, str):
                found.append(value)
            if key == "patternProperties" and isinstance(value, dict):
                found += value
            found += _patterns(value)
    elif isinstance(schema, list):
        for value in schema:
            found += _patterns(value)
    return found


def _bound_patterns(patterns: list[str]) -> None:
    length = sum(map(len, patterns))
    if length > MAX_PATTERN:
        raise OptionError(
            f"the structure's regular expressions have {length} characters; most: {MAX_PATTERN}"
        )
    repeats = sum(bool(m[1]) for pattern in patterns for m in _REPEAT.finditer(pattern))
    if repeats > MAX_REPEATS:
        raise OptionError(
            f"the structure's regular expressions have {repeats} repetitions; most: {MAX_REPEATS}"
        )


def _reason(matcher: Any) -> str:
    """The first lines of what the library says, without what it was given."""
    message = str(matcher.get_error()).replace("<non-verbose/>", "").strip()
    if message.startswith("panic"):
        # A fault of the library's, which it catches. The rest of the line is its own source.
        return "it is malformed"
    if "NoExtensionBias" in message:
        return "a $ref leads back to itself with nothing in between"
    return " ".join(message.split())[:300]


class _Bytes:
    """A tokenizer of 256 bytes, as llguidance asks for one."""

    def __init__(self) -> None:
        self.eos_token_id = 256
        self.bos_token_id = None
        self.tokens = [bytes([value]) for value in range(256)] + [b"<end>"]
        self.special_token_ids = [256]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@functools.cache
def _bytes_alone() -> Any:
    library = _library()
    return library.LLTokenizer(library.TokenizerWrapper(_Bytes()))


class TokenizerProtocol(Protocol):
    """A tokenizer (`hocket.training.tokenizer.Tokenizer`)."""

    vocab_size: int

    def to_json(self) -> str:
        """The text of its tokenizer.json."""


class Structures:
    """Makes the states of answers, on the rank that samples.

    The tokenizer is read in the thread that compiles, from the first moment on: a server is ready
    before a large vocabulary has been read. Where it cannot be read, answers with a structure
    fail.

    Args:
        load: gives the tokenizer, whose tokens' bytes are read from its tokenizer.json.
        vocab_size: of the model.
        ends: the model's tokens that end a text.
    """

    def __init__(
        self, load: Callable[[], TokenizerProtocol], vocab_size: int, ends: Sequence[int] = ()
    ) -> None:
        self._library = _library()
        self._limits = _limits(self._library)
        self.vocab_size = vocab_size
        self._ends = [token for token in ends if token < vocab_size]
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "structures")
        self._tokenizer = self._worker.submit(self._read, load)

    def start(self, text: str, ends: Sequence[int], generated: Sequence[int]) -> StructureState:
        """The state after `generated`, compiled in a thread.

        Args:
            text: of `SamplingParams.structure`.
            ends: tokens that end this answer; they may come when it is complete. None: those of
                the model, which then fill what is asked for beyond it.
            generated: the answer so far.
        """
        compiling = self._worker.submit(self._compile, text)
        return StructureState(compiling, ends or self._ends, generated)

    def close(self) -> None:
        """End the thread."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _read(self, load: Callable[[], TokenizerProtocol]) -> tuple[Any, int | None]:
        words = load()
        text, size, phantom = words.to_json(), words.vocab_size, None
        ends = [token for token in self._ends if token < size]
        if not ends:
            # The library takes some token for the end where none is named. So one is added, which
            # is then never let come.
            text, phantom, ends, size = _with_end(text, size), size, [size], size + 1
        try:
            tokenizer = self._library.LLTokenizer(
                text, n_vocab=max(size, self.vocab_size), eos_token=ends
            )
        except ValueError as error:
            raise OptionError(
                f"structured output cannot read the model's tokenizer: {str(error)[:300]}"
            ) from None
        return tokenizer, phantom

    def _compile(self, text: str) -> tuple[Any, int | None]:
        tokenizer, phantom = self._tokenizer.result()
        grammar = _grammar(self._library, text)
        matcher = self._library.LLMatcher(tokenizer, grammar, log_level=0, limits=self._limits)
        return matcher, phantom


def _with_end(tokenizer: str, number: int) -> str:
    """A tokenizer.json with one special token more."""
    given = json.loads(tokenizer)
    token = {"id": number, "content": "<|no token|>", "special": True, "normalized": False}
    token |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    given["added_tokens"] = [*(given.get("added_tokens") or ()), token]
    return json.dumps(given)


class StructureState:
    """One answer under a structure.

    Args:
        compiling: gives the matcher, and the token that was added to its tokenizer.
        ends, generated: as of `Structures.start`.
    """

    def __init__(
        self,
        compiling: concurrent.futures.Future[tuple[Any, int | None]],
        ends: Sequence[int],
        generated: Sequence[int],
    ) -> None:
        self._compiling: concurrent.futures.Future[tuple[Any, int | None]] | None = compiling
        self._ends = frozenset(ends)
        self._said = list(generated)
        self._matcher: Any = None
        self._phantom: int | None = None
        self._failed: str | None = None
        self._ended = False

    def mask(self, barred: bool = False) -> bytearray | str:
        """One bit for each token that may come, the lowest first; a text says why none can.

        Args:
            barred: tokens that end the answer must not come yet. They do where nothing else can:
                a complete answer is not made a wrong one.
        """
        matcher = self._ready()
        if self._failed is not None:
            return self._failed
        self._ended = self._ended or (matcher.is_stopped() and not matcher.is_error())
        found = bytearray(matcher.compute_bitmask())
        if self._ended:
            found = bytearray(len(found))
        elif matcher.is_error():
            self._failed = f"the structure failed: {_reason(matcher)}"
            return self._failed
        if self._phantom is not None:
            found[self._phantom >> 3] &= ~(1 << (self._phantom & 7))
        complete = self._ended or matcher.is_accepting()
        if barred:
            going_on = found.copy()
            for token in self._ends:
                going_on[token >> 3] &= ~(1 << (token & 7))
            if any(going_on):
                return going_on
        if complete:
            for token in self._ends:
                found[token >> 3] |= 1 << (token & 7)
        if not any(found):
            self._failed = "the answer is complete, and no token ends it"
            return self._failed
        return found

    def take(self, token: int) -> None:
        """The answer goes on with `token`."""
        if self._compiling is not None:
            self._said.append(token)
            return
        if self._failed is not None or self._ended:
            return
        # A token that ends the answer may be one that the grammar knows as well.
        if token in self._ends and not self._matcher.validate_tokens([token]):
            self._ended = True
        elif not self._matcher.consume_token(token):
            self._failed = f"the structure failed: {_reason(self._matcher)}"

    def _ready(self) -> Any:
        if self._compiling is not None:
            compiling, self._compiling = self._compiling, None
            try:
                self._matcher, self._phantom = compiling.result()
            except HocketError as error:
                self._failed = error.message
                return None
            if self._matcher.is_error():
                self._failed = f"the structure cannot be used: {_reason(self._matcher)}"
                return None
            for token in self._said:
                self.take(token)
            self._said = []
        return self._matcher

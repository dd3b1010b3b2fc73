"""ChatTemplates: messages to the text that a model was trained on, by its own template.

A template is a program in Jinja. It comes with the model, or from the operator's file, never from
a request; it runs sandboxed, sees plain data alone, and its output is bounded. A server renders in
a separate process (`serving.front.renderer`), which ends when it takes too long or too much.

The names that templates may use are those that transformers gives them.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from hocket.spec.errors import ModelError, OptionError, nearest
from hocket.spec.files import read_object

MOST_TEMPLATE = 1 << 20
"""Bytes of a template."""
MOST_REPEATED = 1 << 24
"""Characters or items that one multiplication may make."""

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")

SWITCHES = frozenset(("enable_thinking", "thinking", "reasoning_effort", "date_string"))
"""What `chat_template_kwargs` may hold: switches that models' templates know."""


BEGIN, END = "\ufdd0", "\ufdd1"
"""What stands around the model's own words where `marked` is asked for: code points that Unicode
keeps out of text."""


SHIPPED = Path(__file__).with_name("chat_templates")
"""Templates that come with hocket, by name: those of ChatML, Llama 3 and Zephyr."""


def shipped() -> list[str]:
    """Names of the templates that come with hocket."""
    return sorted(file.stem for file in SHIPPED.glob("*.jinja"))


def file_of(text: str) -> Path:
    """The file of a template that is named by its path, or by the name of one of `shipped`.

    Raises:
        OptionError: there is neither, or it cannot be read.
    """
    path = Path(text).expanduser()
    if path.exists():
        try:
            path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(
                f"chat_template_file {path} cannot be read: {error}",
                hint="--chat-template-file chatml, or none: the tokenizer's own template",
            ) from None
        return path
    if text in shipped():
        return SHIPPED / f"{text}.jinja"
    raise OptionError(
        f"chat_template_file {text}: there is no such file, and no template of that name",
        hint=f"--chat-template-file {nearest(text, shipped()) or 'chatml'}; known: "
        f"{', '.join(shipped())}",
    )


class TemplateRefusal(ModelError):
    """A template that refuses the messages it is given, or writes too much."""


class _Generation(Extension):
    """`{% generation %}` marks what the model says, for training; elsewhere it is its content."""

    tags = {"generation"}  # noqa: RUF012
    marked = False

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        if not self.marked:
            return inside
        begin, end = (
            nodes.Output([nodes.TemplateData(mark, lineno=line)], lineno=line)
            for mark in (BEGIN, END)
        )
        return [begin, *inside, end]


class _Marked(_Generation):
    """As its parent, with `BEGIN` and `END` around the content."""

    marked = True


class _Sandbox(ImmutableSandboxedEnvironment):
    """As the library's, and no operator makes more than it should."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("a chat template has no use for powers")
        for one, other in ((left, right), (right, left)):
            listed = isinstance(one, str | list | tuple) and isinstance(other, int)
            if listed and len(one) * other > MOST_REPEATED:
                raise SecurityError(f"a chat template repeats {len(one)} items {other} times")
        return super().call_binop(context, operator, left, right)


class _Namespace(Namespace):
    """The library's, without names of the interpreter."""

    def __init__(*args: Any, **values: Any) -> None:
        self, args = args[0], args[1:]
        values = dict(*args, **values)
        for name in values:
            _Namespace._check(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        Namespace.__setitem__(self, name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a chat template may not store {name!r}")


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form[:100])


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # The library's own writes HTML entities, which no model has seen.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def template_environment(*, marked: bool = False) -> Environment:
    """Where templates run; `marked`: with `BEGIN` and `END` around what the model says."""
    generation = _Marked if marked else _Generation
    found = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[generation, loopcontrols])
    found.filters["tojson"] = _json
    found.globals = {
        "raise_exception": _raise,
        "strftime_now": _now,
        "namespace": _Namespace,
        "dict": dict,
        "range": found.globals["range"],
    }
    return found


class ChatTemplates:
    """The templates of one model.

    Args:
        texts: by name; `default` is used, and `tool_use` where there are tools, if it is there.
        words: texts of special tokens, such as `bos_token`, which templates write.
        marked: whether the model's own words are put between `BEGIN` and `END`, where the template
            says which they are (`marks`).

    Raises:
        ModelError: a template that is no Jinja, or too long.
    """

    def __init__(
        self,
        texts: Mapping[str, str],
        words: Mapping[str, str] | None = None,
        *,
        marked: bool = False,
    ) -> None:
        self.texts = dict(texts)
        self.words = dict(words or {})
        self._compiled = {}
        where = template_environment(marked=marked)
        for name, text in self.texts.items():
            if len(text) > MOST_TEMPLATE:
                raise ModelError(
                    f"the chat template {name!r} has {len(text)} characters; "
                    f"at most {MOST_TEMPLATE}"
                )
            try:
                self._compiled[name] = where.from_string(text)
            except (TemplateError, SyntaxError, ValueError, OverflowError) as error:
                raise _unreadable(name, str(error)) from None
            except (RecursionError, MemoryError) as error:  # a template is a program
                raise _unreadable(name, f"it is too deep or too large ({error})") from None

    def text(self, tools: bool) -> str:
        return self.texts[used(self.texts, tools)]

    @property
    def has_tools(self) -> bool:
        return has_tools(self.texts)

    @property
    def marks(self) -> bool:
        """Whether the template says by `{% generation %}` what the model's own words are."""
        return _MARKS.search(self.text(False)) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        switches: Mapping[str, Any] | None = None,
        continue_last: bool = False,
        prompt: bool = True,
        most: int,
    ) -> str:
        """The prompt, up to where the model begins to speak.

        Args:
            messages: each with `role` and `content`. tools: as in OpenAI's requests.
            switches: of `SWITCHES`.
            continue_last: the last message is the beginning of the answer.
            prompt: False renders the messages alone, and nothing where the model would begin.
            most: characters of the prompt.

        Raises:
            TemplateRefusal: the template refuses the messages, or writes too much.
        """
        values: dict[str, Any] = {**self.words, **(switches or {})}
        values["messages"] = list(messages)
        values["tools"] = list(tools) if tools else None
        values["documents"] = None
        values["add_generation_prompt"] = prompt and not continue_last
        parts: list[str] = []
        size = 0
        try:
            for part in self._compiled[used(self.texts, bool(tools))].generate(values):
                size += len(part)
                if size > most:
                    raise TemplateRefusal(f"the chat has more than {most} characters")
                parts.append(part)
        except TemplateRefusal:
            raise
        except TemplateError as error:
            raise TemplateRefusal(
                f"the model's chat template rejects the request: {error}"
            ) from None
        except Exception as error:  # a template is a program: what it meets may be of any kind
            kind = type(error).__name__
            raise TemplateRefusal(f"the model's chat template failed: {kind}: {error}") from None
        text = "".join(parts)
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a template may write what no text holds
            raise TemplateRefusal(f"the model's chat template failed: {error}") from None
        return _continued(text, messages) if continue_last else text

    @classmethod
    def read(
        cls, directory: Path | None, file: Path | None = None, *, marked: bool = False
    ) -> ChatTemplates | None:
        """The templates of a tokenizer's folder, or the one in `file`; None if there is none.

        Raises:
            OptionError: `file` cannot be read. ModelError: a template cannot be.
        """
        texts, words = written_templates(directory, file)
        return cls(texts, words, marked=marked) if texts else None


def used(texts: Mapping[str, str], tools: bool) -> str:
    if tools and "tool_use" in texts:
        return "tool_use"
    return "default" if "default" in texts else next(iter(texts))


def has_tools(texts: Mapping[str, str]) -> bool:
    """Whether templates say anything of tools."""
    return "tool_use" in texts or "tools" in texts[used(texts, True)]


def written_templates(
    directory: Path | None, file: Path | None = None
) -> tuple[dict[str, str], dict[str, str]]:
    """The texts and the words of `ChatTemplates` in a tokenizer's folder, or the text in `file`.

    Raises:
        OptionError: `file` cannot be read. ModelError: a template cannot be.
    """
    settings = read_object(directory / "tokenizer_config.json") if directory else {}
    words = {
        name: text
        for name, value in settings.items()
        if name.endswith("_token") and (text := _content(value)) is not None
    }
    if file is not None:
        try:
            return {"default": file.read_text(encoding="utf-8").replace("\r\n", "\n")}, words
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"--chat-template-file {file} cannot be read: {error}") from None
    texts: dict[str, str] = {}

    def take(name: str, path: Path) -> None:
        try:
            texts[name] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(name, f"{path}: {error}") from None

    given = settings.get("chat_template")
    if isinstance(given, str):
        texts["default"] = given
    elif isinstance(given, list):
        for one in given:
            if isinstance(one, dict) and isinstance(one.get("template"), str):
                texts[str(one.get("name", "default"))] = one["template"]
    if directory is not None:
        for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
            take(path.stem, path)
        own = directory / "chat_template.jinja"
        if own.is_file():
            take("default", own)
    return texts, words


def _unreadable(name: str, why: str) -> ModelError:
    return ModelError(
        f"the chat template {name!r} cannot be read: {why}", hint="--chat-template-file FILE"
    )


def _continued(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """The prompt up to the end of the last message's content."""
    last = str(messages[-1].get("content") or "")
    for found in (last, last.rstrip(), last.strip()):
        at = text.rfind(found) if found else -1
        if at >= 0:
            return text[: at + len(found)]
    raise TemplateRefusal("the last message has no content that could be continued")


def _content(value: Any) -> str | None:
    """The text of a special token: itself, or inside an object."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else None

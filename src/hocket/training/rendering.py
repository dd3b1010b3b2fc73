"""Rendering: a conversation as the text a model reads, and which characters of it are learned.

    <user>hi<end><assistant>hello<end>
                            ==========      spans, [start, stop)

Where the template says by `{% generation %}` what the model's own words are, those are the spans.
Where it does not, a turn is the difference of two renderings: up to where the model begins to
speak, and with the turn. That is exact only if each rendering begins the whole one; a template
that writes a turn otherwise once others follow (leaving out thoughts, say) is refused.

Never imports torch.
"""

from __future__ import annotations

from hocket.models.chat_template import BEGIN, END, ChatTemplates, TemplateRefusal
from hocket.spec.errors import DataError
from hocket.training.conversation import Conversation, PromptAnswer

Spans = list[tuple[int, int]]

MOST = 1 << 26
"""Characters of one conversation."""


def render(
    found: Conversation | PromptAnswer, templates: ChatTemplates | None, where: str
) -> tuple[str, Spans]:
    """The whole text and its learned spans, in order; an empty list where nothing is learned.

    Args:
        templates: made with `marked`; may be None for a `PromptAnswer`.
        where: file and line, for what is said of a mistake.

    Raises:
        DataError: the template refuses the messages, or renders no exact turns.
    """
    if isinstance(found, PromptAnswer):
        start, text = len(found.prompt), found.prompt + found.completion
        return text, [(start, len(text))] if found.completion else []
    assert templates is not None
    for message in found.messages:
        content = message.get("content") or ""
        if BEGIN in content or END in content:
            raise DataError(f"{where} holds U+FDD0 or U+FDD1, which Unicode keeps out of text")
    try:
        if templates.marks:
            return _marked(found, templates)
        return _by_difference(found, templates, where)
    except TemplateRefusal as refusal:
        raise DataError(f"{where}: {refusal.message}") from None


def _marked(found: Conversation, templates: ChatTemplates) -> tuple[str, Spans]:
    text = templates.render(found.messages, tools=found.tools, prompt=False, most=MOST)
    head, *rest = text.split(BEGIN)
    parts, size = [head], len(head)
    spans: Spans = []
    for piece in rest:
        inside, _, after = piece.partition(END)
        if inside:
            spans.append((size, size + len(inside)))
        parts += [inside, after]
        size += len(inside) + len(after)
    if found.first:
        given = templates.render(
            found.messages[: found.first], tools=found.tools, prompt=False, most=MOST
        )
        start = len(given.replace(BEGIN, "").replace(END, ""))
        spans = [span for span in spans if span[0] >= start]
    return "".join(parts), spans


def _by_difference(found: Conversation, templates: ChatTemplates, where: str) -> tuple[str, Spans]:
    def rendered(count: int, *, prompt: bool) -> str:
        return templates.render(found.messages[:count], tools=found.tools, prompt=prompt, most=MOST)

    text = rendered(len(found.messages), prompt=False)
    spans: Spans = []
    for turn in found.turns:
        before = rendered(turn, prompt=True) if turn else ""
        last = turn + 1 == len(found.messages)
        through = text if last else rendered(turn + 1, prompt=False)
        for part, what in ((before, "what comes before"), (through, "the text up to the end of")):
            if not text.startswith(part):
                at = next(
                    (i for i, (a, b) in enumerate(zip(part, text, strict=False)) if a != b),
                    min(len(part), len(text)),
                )
                raise DataError(
                    f"{where}: the chat template renders {what} message {turn + 1} differently by "
                    f"itself than in the conversation: {part[at : at + 20]!r} and "
                    f"{text[at : at + 20]!r} at character {at}. So the assistant's turns cannot "
                    "be determined exactly",
                    hint="--chat-template-file FILE, a template with {% generation %} marks",
                )
        if len(before) < len(through):
            spans.append((len(before), len(through)))
    return text, spans

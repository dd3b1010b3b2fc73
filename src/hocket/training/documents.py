"""Documents: records and texts as token ids, with a mark on every token that loss falls on.

    record -> conversation -> text and learned spans -> ids, learned (one flag a token)

A token is learned if the first character it stands for lies in a learned span. Where a token would
reach over the beginning of a span, the text is cut there and both sides are encoded by themselves,
as they are when a model continues a prompt. Never imports torch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hocket.models.chat_template import ChatTemplates, file_of
from hocket.spec.errors import DataError, OptionError
from hocket.training import conversation, data_sources
from hocket.training.conversation import CHAT, TEXT, Conversation, PromptAnswer
from hocket.training.corrupt import CorruptRecords
from hocket.training.data_paths import Source
from hocket.training.rendering import Spans, render
from hocket.training.token_files import character_batches
from hocket.training.tokenizer import Ids, Tokenizer

Learned = npt.NDArray[np.bool_]

BATCH_CHARACTERS = 1_000_000
"""Characters encoded at once: an encoding with its places holds some hundred bytes a token."""


@dataclasses.dataclass(frozen=True)
class Document:
    """One document.

    Attributes:
        ids: of its tokens.
        learned: whether loss falls on a token; None: on all of them.
    """

    ids: Ids
    learned: Learned | None = None


def source_kinds(sources: Sequence[Source], data_format: str) -> list[str]:
    """What each source holds: `text`, `chat` or `completion`.

    `auto` asks the fields of the first record; a format that is named holds for all that is not
    a text file.
    """
    if data_format == "auto":
        return [conversation.format_of(data_sources.fields(source)) for source in sources]
    if data_format != TEXT:
        for source in sources:
            if source.kind == "text" and source.named:
                raise DataError(
                    f"data {source.path} is a text file and holds no {data_format} records",
                    hint="JSON lines, parquet or a `datasets` directory",
                )
    return [TEXT if source.kind == "text" else data_format for source in sources]


def templates_of(
    tokenizer: Tokenizer, directory: Path | None, file: str | None
) -> ChatTemplates | None:
    """The chat templates that training renders with, or None where there are none.

    Args:
        tokenizer: gives the texts of special tokens.
        directory: of the tokenizer or the model.
        file: a template that the user names instead: a path, or a name of those shipped.

    Raises:
        OptionError: the file cannot be read. ModelError: a template cannot be.
    """
    found = ChatTemplates.read(directory, None if file is None else file_of(file), marked=True)
    if found is not None and tokenizer.eos is not None:
        found.words.setdefault("eos_token", tokenizer.eos)
    return found


def split_documents(
    sources: Sequence[Source],
    held: Sequence[str],
    tokenizer: Tokenizer,
    templates: ChatTemplates | None,
    *,
    text_field: str,
    passed: Callable[[int], None],
    corrupt: CorruptRecords | None = None,
) -> Iterator[Document]:
    """Every document of some sources, in their order.

    Args:
        held: what each source holds (`source_kinds`).
        text_field: of sources that hold text.
        passed: called with the number of characters read, as the work goes on.
        corrupt: skips records that cannot be read or rendered; None: the first raises.

    Raises:
        DataError: what cannot be read or rendered, with its file and line.
        OptionError: chat data, and no template.
    """
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    corrupt = corrupt or CorruptRecords()
    for source, kind in zip(sources, held, strict=True):
        if kind == TEXT:
            read = data_sources.source_documents([source], text_field, corrupt)
            for texts in character_batches(read, len, BATCH_CHARACTERS):
                for ids in tokenizer.encode_batch(texts):
                    if ids.size:
                        yield Document(np.concatenate([ids, np.array(end, np.uint32)]))
                passed(sum(map(len, texts)))
            continue
        begin = np.array(tokenizer.begin_ids(), np.uint32)
        stop = np.array(end, np.uint32)
        rendered = _rendered(source, kind, templates, corrupt)
        for together in character_batches(rendered, lambda one: len(one[0]), BATCH_CHARACTERS):
            for (text, spans, plain), (ids, learned) in zip(
                together, _encoded(tokenizer, together), strict=True
            ):
                if plain and text:
                    ids = np.concatenate([begin, ids, stop])
                    first, last = np.zeros(begin.size, bool), np.full(stop.size, bool(spans))
                    learned = np.concatenate([first, learned, last])
                yield Document(ids, learned)
            passed(sum(len(text) for text, *_ in together))


Rendered = tuple[str, Spans, bool]


def _rendered(
    source: Source, kind: str, templates: ChatTemplates | None, corrupt: CorruptRecords
) -> Iterator[Rendered]:
    """(text, learned spans, whether begin and end tokens are still to be added) of each record."""
    for record, place in data_sources.source_records(source, corrupt):
        where = f"data {source.path}, {place}"
        try:
            found: Conversation | PromptAnswer = conversation.read_conversation(record, kind, where)
        except DataError as error:
            corrupt.skip(error)
            continue
        if isinstance(found, Conversation) and templates is None:
            raise OptionError(
                f"data {source.path} holds {'chats' if kind == CHAT else 'messages'}, and the "
                "model directory has no chat template to render them with",
                hint="--chat-template-file chatml, or one of your own: --chat-template-file FILE",
            )
        try:
            rendered = render(found, templates, where)
        except DataError as error:
            corrupt.skip(error)
            continue
        yield *rendered, isinstance(found, PromptAnswer)


def _encoded(tokenizer: Tokenizer, together: Sequence[Rendered]) -> Iterator[tuple[Ids, Learned]]:
    encoded = tokenizer.encode_placed([text for text, *_ in together])
    for (text, spans, _), (ids, places) in zip(together, encoded, strict=True):
        cuts = [start for start, _ in spans if start and _reached_over(places, start)]
        if not cuts:
            yield ids, _learned(places, spans)
            continue
        edges = [0, *cuts, len(text)]
        parts = tokenizer.encode_placed([text[a:b] for a, b in itertools.pairwise(edges)])
        places = np.concatenate([at + first for (_, at), first in zip(parts, edges, strict=False)])
        yield np.concatenate([ids for ids, _ in parts]), _learned(places, spans)


def _reached_over(places: npt.NDArray[np.int64], at: int) -> bool:
    """Whether no token ends at `at`: one reaches over it, or (where tokenizers leave spaces out of
    a token's place) the space before `at` belongs to the token after it."""
    before = places[places[:, 0] < at]
    return before.size == 0 or int(before[-1, 1]) != at


def _learned(places: npt.NDArray[np.int64], spans: Spans) -> Learned:
    """Whether each token's first character lies in a span; spans are in order and apart."""
    if not spans:
        return np.zeros(len(places), bool)
    starts, stops = np.array(spans, np.int64).T
    span = np.searchsorted(starts, places[:, 0], side="right") - 1
    return (span >= 0) & (places[:, 0] < stops[span])

"""Which tensor lies in which safetensors file of a Hugging Face directory, by the files' headers.

Torch-free, and done in milliseconds: a file that is missing or cut short is found before anything
is started.
"""

from __future__ import annotations

import re
from pathlib import Path

from hocket.spec.errors import CheckpointError, WeightsError
from hocket.spec.files import parse_json
from hocket.spec.tensor_file import TensorFile

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

_MOST_TENSORS = 250_000
_LARGEST_INDEX = 100_000_000
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|head|output_projection)\.weight$")
_EMBEDDING = re.compile(
    r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings|embeddings|tokens_embed|w)\.weight$"
)
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")
_COMPARED = 4 << 20


def headers(directory: Path) -> dict[str, TensorFile]:
    """The file of each tensor, opened, by the names in the files.

    Args:
        directory: holds `model.safetensors`, or shards and their index.

    Raises:
        WeightsError: a file is missing or damaged, two hold the same name, or the index cannot be
            read or names a file that is not in its folder.
    """
    index = directory / INDEX
    where: dict[str, TensorFile] = {}
    for name in files_of(index) if index.exists() else [SINGLE]:
        if Path(name).name != name:
            raise WeightsError(f"{index} names {name!r}, which is not a file in its folder")
        try:
            file = TensorFile(directory / name, most_tensors=_MOST_TENSORS)
        except CheckpointError as error:
            raise WeightsError(error.message) from None
        for key in file.entries:
            if key in where:
                raise WeightsError(
                    f"{printable_key(key)} is both in {name} and in {where[key].path}"
                )
            where[key] = file
    return where


def has_own_head(directory: Path) -> bool:
    """Whether an output head is stored whose values are not those of the token embedding, which is
    stored too: transformers ties no such two, whatever the configuration says.

    Raises:
        WeightsError: as `headers`.
        CheckpointError: a file has become shorter, or the disk does not answer.
    """
    where = headers(directory)
    head = next((key for key in where if _HEAD.search(key)), None)
    if head is None:
        return False
    entry = where[head].entries[head]
    for key, file in where.items():
        other = file.entries[key]
        if not _EMBEDDING.search(key) or other.shape != entry.shape:
            continue
        if other.dtype != entry.dtype:
            return True
        for first in range(0, entry.num_bytes, _COMPARED):
            both = [bytearray(min(_COMPARED, entry.num_bytes - first)) for _ in range(2)]
            where[head].read_into(head, first, memoryview(both[0]))
            file.read_into(key, first, memoryview(both[1]))
            if both[0] != both[1]:
                return True
    return False


def untrained_layers(directory: Path, layers: int) -> str:
    """That a checkpoint has layers behind the model's own, which no run trains; empty where it has
    none: those of multi-token prediction (DeepSeek-V3, GLM 4.5). Raises WeightsError: as `headers`.
    """
    numbers = {int(found[1]) for key in headers(directory) if (found := _LAYER.match(key))}
    beyond = sorted(number for number in numbers if number >= layers)
    if not beyond:
        return ""
    names = " and ".join(f"model.layers.{number}" for number in beyond)
    return (
        f"the weights of {names} (multi-token prediction) are neither trained nor exported: the "
        f"model in transformers has {layers} layers"
    )


def printable_key(key: str) -> str:
    """A name of a file, as it may be printed: it may be anything."""
    return key if key.isprintable() and len(key) <= 200 else repr(key[:200])


def files_of(index: Path) -> list[str]:
    """The files that an index names; what lies in them, they say themselves. Raises
    WeightsError."""
    try:
        if index.stat().st_size > _LARGEST_INDEX:
            raise ValueError(f"it has {index.stat().st_size} bytes")
        table = parse_json(index.read_text())["weight_map"]
        if not all(isinstance(name, str) for name in table.values()):
            raise ValueError("its weight_map names something else than files")
        for name in set(table.values()):
            if name != Path(name).name or not name.isprintable():
                raise ValueError(f"its weight_map names {name!r}, not a file in its folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = error if isinstance(error, OSError | ValueError) else repr(error)
        raise WeightsError(f"{index} cannot be read: {why}"[:500]) from None
    return sorted(set(table.values()))

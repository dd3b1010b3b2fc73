"""The demo's text: what every machine with Python has, its standard library's sources and docs."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from hocket.spec.errors import DataError
from hocket.spec.files import named

LARGEST = 6_000_000
"""Characters taken; enough for a tokenizer and some thousand steps of a small model."""

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__",
            "encodings", "idlelib", "lib2to3", "ensurepip", "turtledemo"}  # fmt: skip


def standard_library() -> Iterator[tuple[str, str]]:
    """(relative path, text) of the library's files: its docs first, then its sources by name.

    Tables of characters, tests and bundled packages are left out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        file
        for file in root.rglob("*")
        if file.suffix in (".py", ".txt", ".rst")
        and not _SKIPPED & set(file.relative_to(root).parts)
    ]
    for file in sorted(files, key=lambda f: (f.parent.name != "pydoc_data", str(f))):
        try:
            yield file.relative_to(root).as_posix(), file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue


def write_corpus(to: Path, largest: int = LARGEST) -> int:
    """Write the text as JSON lines, one file of the library each; the characters written.

    Raises:
        DataError: this Python has no library sources, as in a frozen application.
    """
    count = 0
    to.parent.mkdir(parents=True, exist_ok=True)
    with named(to), to.open("w", encoding="utf-8") as out:
        for path, text in standard_library():
            if count >= largest:
                break
            out.write(json.dumps({"path": path, "text": text}) + "\n")
            count += len(text)
    if count < 100_000:
        raise DataError(
            f"this Python's standard library holds only {count} characters of source text",
            hint="hocket train tiny-llama --data FOLDER_OF_TEXT --tokenizer train",
        )
    return count

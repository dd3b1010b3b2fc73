"""The models that can be named without a directory."""

from __future__ import annotations


def known() -> list[tuple[str, str]]:
    """(name, one line with its source) of every model of the catalogue."""
    from hocket.catalogue import models

    return [(name, models.note(name)) for name in models.names()]

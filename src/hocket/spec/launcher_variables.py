"""Launcher variables: whole numbers that torchrun or Slurm set in the environment of a rank."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hocket.spec.errors import LayoutError


def launcher_number(
    environment: Mapping[str, str],
    name: str,
    default: int | None = None,
    *,
    least: int = 0,
    most: int = 2**31 - 1,
) -> int:
    """The number that a launcher set; `default` where the variable is absent or empty.

    Raises:
        LayoutError: another text, or a number out of range, with what sets the variable.
    """
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    if not re.fullmatch("[0-9]{1,10}", text) or not least <= int(text) <= most:
        by = "Slurm" if name.startswith("SLURM_") else "torchrun, or a launcher like it,"
        raise LayoutError(
            f"{name} is {text[:60]!r} in the environment; {by} sets it to a whole number from "
            f"{least} to {most}",
            hint=f"unset {name}",
        )
    return int(text)

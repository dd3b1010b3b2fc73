"""The extra that a verb needs: where it is missing, the line that installs it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

from hocket.spec.errors import OptionError

EXTRAS = {
    "train": (
        "torch", "transformers", "safetensors", "tokenizers", "datasets", "pyarrow", "jinja2",
    ),
    "serve": (
        "torch", "transformers", "safetensors", "tokenizers", "jinja2", "starlette", "uvicorn",
        "httptools", "pydantic", "prometheus_client",
    ),
}  # fmt: skip
"""Modules that each extra installs and its verbs cannot do without."""

_TRAINED = "train demo check chaos compare tour generate export rehearse probe"
NEEDS = {**dict.fromkeys(_TRAINED.split(), "train"), "serve": "serve"}
"""The extra of each verb; verbs that are not listed run from the base install."""


TRANSFORMERS = ("5.23", "5.24")
"""The first version of transformers that is supported, and the first that is not: functions of its
attention are replaced by name, and a release that renames one would fail in the middle of a run."""


def require_extra(verb: str) -> None:
    """Reject a verb whose extra is not installed, or with a transformers that is not supported.

    Raises:
        OptionError: with the packages that are missing.
    """
    extra = NEEDS.get(verb)
    if extra is None:
        return
    missing = [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise OptionError(
            f"hocket {verb} needs packages that are not installed: {', '.join(missing)}",
            hint=install_line(f"hocket[{extra}]"),
        )
    found = importlib.metadata.version("transformers")
    oldest, beyond = TRANSFORMERS
    if not _numbers(oldest) <= _numbers(found) < _numbers(beyond):
        raise OptionError(
            f"transformers {found} is installed; hocket works with {oldest} and before {beyond}",
            hint=f"pip install 'transformers>={oldest},<{beyond}'",
        )


def install_line(package: str) -> str:
    """The command that installs a package into this environment, by the tool that made it."""
    for receipt, tool in (("uv-receipt.toml", "uv tool"), ("pipx_metadata.json", "pipx")):
        if (Path(sys.prefix) / receipt).exists():
            return f"{tool} install --force '{package}'"
    return f"pip install '{package}'"


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])

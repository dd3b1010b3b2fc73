"""The extra that a verb needs: where it is missing, the line that installs it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

from hocket.spec.errors import OptionError
from hocket.spec.install import install_line

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
            hint=install_line(extra),
        )
    found = importlib.metadata.version("transformers")
    oldest, beyond = TRANSFORMERS
    if not _numbers(oldest) <= _numbers(found) < _numbers(beyond):
        raise OptionError(
            f"transformers {found} is installed; hocket works with {oldest} and before {beyond}",
            hint=f"pip install 'transformers>={oldest},<{beyond}'",
        )


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])

"""The extra that a verb needs: where it is missing, the line that installs it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

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

NEEDS = {
    **dict.fromkeys(
        (
            "train",
            "demo",
            "check",
            "chaos",
            "compare",
            "tour",
            "generate",
            "export",
            "rehearse",
            "probe",
        ),
        "train",
    ),
    "serve": "serve",
}
"""The extra of each verb; verbs that are not listed run from the base install."""


def require_extra(verb: str, arguments: Sequence[str]) -> None:
    """Reject a verb whose extra is not installed; its help is printed all the same.

    Raises:
        OptionError: with the packages that are missing.
    """
    extra = NEEDS.get(verb)
    if extra is None or {"-h", "--help"} & set(arguments):
        return
    missing = [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise OptionError(
            f"hocket {verb} needs packages that are not installed: {', '.join(missing)}",
            hint=f"pip install 'hocket[{extra}]'",
        )

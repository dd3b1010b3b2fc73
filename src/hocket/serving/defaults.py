"""Defaults: how a model wants its tokens chosen, where a request does not say.

Its makers write that into generation_config.json, with the tokens that end a text. Of the fields
there, temperature, top_p, top_k, min_p and repetition_penalty are taken, whatever `do_sample` says:
a request to an OpenAI server samples unless its temperature is 0. Never imports torch.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hocket.serving.request import SamplingParams
from hocket.spec.errors import OptionError
from hocket.spec.files import parse_json

FILE = "generation_config.json"
AUTO, NONE = "auto", "none"

LARGEST = 2.0**31
"""Of a number in generation_config.json."""
_AGAIN = "copy it again from where the model is from; a model needs none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """Sampling where a request names none; None: OpenAI's (temperature 1, nothing cut off)."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def of(cls, settings: dict[str, Any]) -> SamplingDefaults:
        """From the fields of a generation_config.json.

        Raises:
            OptionError: a value that no request could have.
        """
        found: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            value = settings.get(field.name)
            if value is None or (field.name == "top_k" and value in (0, -1)):
                continue
            number = int if field.name == "top_k" else (int, float)
            try:
                if isinstance(value, bool) or not isinstance(value, number):
                    raise OptionError(f"{field.name} is {value!r}; a number is needed")
                if not abs(value) <= LARGEST:
                    raise OptionError(f"{field.name} is beyond any request's: {LARGEST:g}")
                one: Any = {field.name: value}
                SamplingParams(max_new_tokens=1, **one)
            except OptionError as error:
                raise OptionError(
                    f"{FILE}: {error.message}", hint="--generation-config none"
                ) from None
            found[field.name] = value
        return cls(**found)

    def text(self) -> str:
        """What it holds, as in `temperature 0.6, top_p 0.9`; empty for nothing."""
        held = dataclasses.asdict(self).items()
        return ", ".join(f"{name} {value:g}" for name, value in held if value is not None)


def generation_settings(directory: Path | None) -> dict[str, Any]:
    """The fields of a model's generation_config.json; none where it has no such file.

    Raises:
        OptionError: a file that cannot be read, or is not a JSON object: the tokens that end a text
            may stand in it, and an answer would not end.
    """
    if directory is None:
        return {}
    file = directory / FILE
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(f"{file} cannot be read: {error}", hint=_AGAIN) from None
    if not isinstance(found, dict):
        raise OptionError(f"{file} is not a JSON object", hint=_AGAIN)
    return found

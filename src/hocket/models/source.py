"""ModelSource: where a model comes from, found without torch or transformers.

NAME is ...                                   config from            weights
a directory with config.json and safetensors  its config.json        its files
a directory with config.json alone            its config.json        random, by seed
a config.json                                 the file               random, by seed
a run folder                                  its exported model/    its exported model/
a folder of checkpoints (checkpoint-10 ...)   the last one's         the last one's
a name of the catalogue                       the catalogue          random, by seed
org/name[@revision] of the Hub, or its page   its config.json        its files, in the cache
an adapter of PEFT, folder or Hub name        its base model's       its base model's, merged

Of a multimodal model all of these give the language model inside (`models.text_part`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hocket.models import fetched, hub, merged, quantization, registry, repo_id, text_part
from hocket.models.base_weights import require_base
from hocket.models.dimensions import Dimensions, dimensions
from hocket.models.weight_headers import INDEX, SINGLE, has_own_head, headers
from hocket.spec import checkpoint, run_names
from hocket.spec.errors import CUTOFF, ModelError, nearest, unknown
from hocket.spec.files import parse_json, read_object
from hocket.spec.run import RunFolder, RunSpec

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_FOREIGN = (
    "_attn_implementation",
    "_attn_implementation_internal",
    "attn_implementation",
    "_experts_implementation",
    "experts_implementation",
    "kernel_config",
    "use_kernels",
    "quantization_config",
    "compression_config",
)  # keys that name code to run: a model file never chooses that; or how its weights are stored
_OTHER_TASKS = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMaskedLM",
)
_LARGEST_CONFIG = 8_000_000
_FLOATS = ("Infinity", "-Infinity", "NaN")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        name: what the user wrote.
        config: its Hugging Face configuration, without keys that name code to run.
        directory: the Hugging Face directory, None for a catalogue name or a bare file.
        weights: directory that holds safetensors weights; None: random from the seed.
        tokenizer: directory that holds a tokenizer, None if there is none.
        trust_remote_code: run code that the directory brings along.
        repo: of the Hub, `org/name@commit`; None where it does not come from there.
    """

    name: str
    config: dict[str, Any]
    directory: Path | None = None
    weights: Path | None = None
    tokenizer: Path | None = None
    trust_remote_code: bool = False
    repo: str | None = None

    @functools.cached_property
    def dimensions(self) -> Dimensions:
        """The sizes a layout must divide. Raises ModelError where one is missing."""
        return dimensions(self.config)

    @property
    def code(self) -> Path | None:
        """Directory whose own model code is run, None for models of transformers itself."""
        return self.directory if self.trust_remote_code and "auto_map" in self.config else None


def resolve_model(
    name: str | os.PathLike[str], *, trust_remote_code: bool = False, weights: bool = True
) -> ModelSource:
    """Find a model by directory, file, run folder, catalogue name or Hub name, and check it.

    A model of the Hub that the cache does not hold is downloaded: with `weights` all of it, else
    its configuration.

    Args:
        name: see the table above.
        trust_remote_code: allow a directory whose configuration names its own code.
        weights: False takes the configuration alone, even where there are weights.

    Raises:
        ModelError: nothing of that name, an unreadable configuration, a model type that the
            installed transformers does not know or has no causal language model for, code that
            is not trusted, pickled weights, or weights quantized in a way that is not read.
    """
    text = os.fspath(name)
    path = Path(text).expanduser()
    if path.is_dir():
        return _directory(text, path, trust_remote_code, weights)
    if path.is_file() and path.suffix == ".json":
        config = _check(text, _read_config(path), trust_remote_code=False)
        return ModelSource(name=text, config=config)

    from hocket.catalogue import models as catalogue

    if text in catalogue.model_names():
        return ModelSource(name=text, config=_check(text, catalogue.config(text), False))
    if path.exists():
        raise fetched.unread_format(
            text, [path.name], fetched.base_in(path.with_name("README.md"))
        ) or ModelError(
            f"{text} is a file; a model is a directory, a config.json or a name",
            hint=f"data is given after the model: hocket train MODEL --data {text}",
        )
    repo = repo_id.parse_repo(text)
    if repo is not None:
        try:
            return _of_hub(text, repo, trust_remote_code, weights)
        except ModelError as error:
            runs = run_names.nearest_run(path)
            if runs is None:
                raise
            raise ModelError(
                f"there is no directory {text}, and no such model of the Hub: {error.message}",
                hint=runs,
            ) from None
    if os.sep in text or text.startswith((".", "~")):
        near = nearest(path.name, catalogue.model_names())
        raise ModelError(
            f"there is no directory {text}, and the catalogue has no such name",
            hint=f"did you mean the catalogue's {near!r}?"
            if near
            else "a model of the Hub is named by its id: Qwen/Qwen3-0.6B",
        )
    near = _same_size(text, catalogue.model_names())
    other = nearest(text, catalogue.model_names(), cutoff=CUTOFF)
    raise ModelError(
        f"unknown model {text!r}: there is no directory and no model of the catalogue of that name",
        hint=f"did you mean {near!r}?"
        if near
        else f"the catalogue has {other!r}, another model; a model of the Hub is named ORG/NAME"
        if other
        else "hocket models\n        or a directory with config.json and safetensors weights, a "
        "run folder, ORG/NAME on the Hub",
    )


def _same_size(text: str, names: Iterable[str]) -> str | None:
    """The nearest name whose numbers are those of a text: qwen3-8b is no spelling of qwen3-4b."""
    numbers = re.findall(r"\d+", text)
    return nearest(text, (name for name in names if re.findall(r"\d+", name) == numbers))


def _of_hub(text: str, repo: repo_id.RepoId, trust_remote_code: bool, weights: bool) -> ModelSource:
    folder = fetched.fetched_directory(repo, weights=False, code=trust_remote_code)
    here = repo.at(folder)
    found = _directory(text, folder, trust_remote_code, False, here)
    if not weights:
        return found
    # What is large is downloaded once the configuration is known to be one that is read.
    folder = fetched.fetched_directory(here, weights=True, code=trust_remote_code)
    return _directory(text, folder, trust_remote_code, True, here)


def fetch_again(spec: RunSpec) -> None:
    """Download the model of a run from the Hub, at the commit that the run began with, where the
    cache does not hold it. Raises ModelError."""
    repo = _repo_of(spec)
    if repo is not None and spec.weights is not None and not Path(spec.weights).is_dir():
        fetched.fetched_directory(repo, weights=True, code=spec.options.trust_remote_code)


def _repo_of(spec: RunSpec) -> repo_id.RepoId | None:
    """The repository at a commit that a run's model is, None where it is something else."""
    repo = repo_id.parse_repo(spec.model)
    return repo if repo is not None and repo.commit else None


def require_own_base(folder: RunFolder, spec: RunSpec) -> None:
    """Raise WeightsError where the weights of a run with LoRA are others than it began with."""
    weights = None if spec.base is None else run_source(spec).weights
    if weights is not None:
        require_base(f"the adapter in {folder.path}", spec.base, weights)


def run_source(spec: RunSpec) -> ModelSource:
    """The source that a RunSpec describes: nothing is looked up again, but in the Hub's cache.

    Code is run as `spec.options` allows, and `RunFolder.load` takes that from the command.

    Raises:
        ModelError: the model brings its own code, and the command does not allow it to be run.
    """
    if "auto_map" in spec.config and not spec.options.trust_remote_code:
        raise _untrusted(spec.model)
    directory = Path(spec.model).expanduser()
    weights = Path(spec.weights) if spec.weights else None
    repo = _repo_of(spec)
    snapshot = None if repo is None else hub.cached(repo)
    if snapshot is not None and weights is not None and not weights.is_dir():
        weights = snapshot  # another host, or another HF_HOME
    return ModelSource(
        name=spec.model if repo is None else repo.id,
        config=_without_foreign(spec.config),
        directory=directory if directory.is_dir() else weights or snapshot,
        weights=weights,
        trust_remote_code=spec.options.trust_remote_code,
        repo=None if repo is None else str(repo),
    )


def _untrusted(name: str) -> ModelError:
    """The error of a model whose code this command was not allowed to run."""
    return ModelError(
        f"{name} brings its own code (auto_map in its configuration), which would be executed",
        hint="read that code first, then add --trust-remote-code",
    )


def _directory(
    name: str,
    path: Path,
    trust_remote_code: bool,
    weights: bool,
    repo: repo_id.RepoId | None = None,
) -> ModelSource:
    """The source that a directory is; `repo`: whose snapshot it is."""
    if (path / "run.json").exists():
        exported = path / "model", path / "adapter"
        if not any((one / two).exists() for one, two in zip(exported, fetched.CONFIG, strict=True)):
            raise _not_exported(name, path)
        path = exported[0] if (exported[0] / "config.json").exists() else exported[1]
    if not (path / "config.json").exists():
        path = _last_checkpoint(path) or path
    if not (path / "config.json").exists():
        if (path / fetched.ADAPTER_CONFIG).exists():
            return _adapted(name, path, trust_remote_code, weights)
        raise ModelError(
            f"{path} is not a Hugging Face directory: it has no config.json",
            hint=f"ls {shlex.quote(str(path))}\n        for the directory with config.json and "
            "safetensors weights, or the run folder, in it",
        )
    config = _check(
        name,
        _read_config(path / "config.json"),
        trust_remote_code,
        lambda: fetched.base_in(path / "README.md") if repo is None else fetched.base_of(repo),
        path if weights else None,
    )
    stored = _weights(path) if weights else None
    values = {**registry.defaults(str(config["model_type"])).values, **config}
    if stored is not None and values.get("tie_word_embeddings", True) and has_own_head(stored):
        config = {**config, "tie_word_embeddings": False}
    return ModelSource(
        name=name,
        config=config,
        directory=path,
        repo=None if repo is None else str(repo),
        weights=stored,
        tokenizer=path if any((path / file).exists() for file in _TOKENIZERS) else None,
        trust_remote_code=trust_remote_code,
    )


def _adapted(name: str, path: Path, trust_remote_code: bool, weights: bool) -> ModelSource:
    """An adapter's base, with the adapter merged where weights are asked for."""
    found = merged.adapter(name, path)
    try:
        base = resolve_model(found.base, trust_remote_code=trust_remote_code, weights=weights)
    except ModelError as error:
        raise ModelError(
            f"{name} is an adapter of {found.base}, which cannot be used: {error.message}",
            hint=error.hint,
        ) from error
    if not weights:
        return dataclasses.replace(base, name=name, repo=None)
    if base.weights is None:
        raise ModelError(f"{name} is an adapter of {found.base}, which has no weights")
    made = merged.merged_directory(name, found, base.weights)
    own = _directory(name, made, trust_remote_code, weights)
    return own if own.tokenizer is not None else dataclasses.replace(own, tokenizer=base.tokenizer)


def _last_checkpoint(path: Path) -> Path | None:
    """Of a folder in which transformers' Trainer saved `checkpoint-N`: the last one that is whole,
    None of any other folder. Trainer renames a checkpoint when it is complete."""
    found = [
        (int(folder.name.rpartition("-")[2]), folder)
        for folder in path.glob("checkpoint-*")
        if folder.name.rpartition("-")[2].isdecimal() and (folder / "config.json").exists()
    ]
    return max(found)[1] if found else None


def _not_exported(name: str, path: Path) -> ModelError:
    """Of a run folder without a model; the hint makes one of what the run holds."""
    said = read_object(path / "run.json")
    if said.get("command") == "serve":
        return ModelError(
            f"{name} is the folder of a server, which holds no model",
            hint=f"the model that it served: {said.get('model')}",
        )
    options = said.get("options")
    lora = isinstance(options, dict) and options.get("lora_rank") is not None
    if not (path / "adapter").is_dir() and not checkpoint.checkpoints(path / "checkpoints"):
        return ModelError(
            f"the run folder {name} holds neither a model nor a checkpoint to make one of",
            hint="train with --save-every, or let the run reach its end",
        )
    to = path / "model"
    if to.exists():  # something else lies there, which the export does not replace
        to = path.with_name(f"{path.name}-model")
    return ModelError(
        f"the run folder {name} holds no exported model",
        hint=_export(path, to) + (" --merge" if lora else ""),
    )


def _export(run: Path, to: Path) -> str:
    return f"hocket export {shlex.quote(str(run))} --to {shlex.quote(str(to))}"


def _weights(path: Path) -> Path | None:
    if (path / INDEX).exists() or (path / SINGLE).exists():
        return path
    other = fetched.unread_format(
        str(path), (file.name for file in path.iterdir()), fetched.base_in(path / "README.md")
    )
    if other is not None:
        raise other
    shards = sorted(path.glob("model*.safetensors"))
    if shards:
        raise ModelError(
            f"{path} contains {shards[0].name} but no {INDEX} that maps tensors to files",
            hint="copy that file too, or save the model again with transformers",
        )
    return None


def _read_config(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > _LARGEST_CONFIG:
            raise ModelError(f"{file} has {file.stat().st_size} bytes: that is not a configuration")
        config = parse_json(file.read_text(), object_hook=_number)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds a {type(config).__name__}, not a JSON object")
    return config


def _number(value: dict[str, Any]) -> Any:
    """A float that JSON does not have, as transformers saves it: `{"__float__": "Infinity"}`."""
    text = value.get("__float__")
    return float(text) if len(value) == 1 and isinstance(text, str) and text in _FLOATS else value


def _check(
    name: str,
    config: dict[str, Any],
    trust_remote_code: bool,
    base: Callable[[], str | None] = lambda: None,
    folder: Path | None = None,
) -> dict[str, Any]:
    """A configuration without keys that name code to run; of a multimodal model that of the
    language model inside.

    `base` gives the model that this one was made from, for what is said of a quantized one;
    `folder` holds its weights.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f"the configuration of {name} has no model_type")
    quantization.parse_quantization(name, config, base)
    if "auto_map" in config:
        if not trust_remote_code:
            raise _untrusted(name)
        return _without_foreign(config)
    if same := registry.renamed_types().get(model_type):
        model_type, config = same, {**config, "model_type": same}
    if model_type not in registry.config_classes():
        message, hint = unknown("model type", model_type, registry.causal_classes())
        raise ModelError(f"{name}: {message.split(';')[0]} (transformers knows others)", hint=hint)
    architecture = registry.causal_classes().get(model_type)
    alone = architecture is not None and not architecture.endswith("ForConditionalGeneration")
    if not alone or isinstance(config.get("text_config"), dict):
        stored = folder is not None and any((folder / file).exists() for file in (INDEX, SINGLE))
        inside = text_part.text_config(config, headers(folder) if folder and stored else ())
        if inside is not None:
            return _check(name, inside, trust_remote_code)
    if not alone:
        why = "transformers has none of the language model inside"
        if "text_config" in registry.defaults(model_type).values and "text_config" not in config:
            why = "its text_config, which describes the language model inside, is missing"
        raise ModelError(
            f"{name} is of type {model_type!r}, which is not a text-only causal language model, "
            f"and {why}",
            hint="a text-only model of the family",
        )
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise ModelError(f"architectures is {architectures!r:.60} in {name}; it is a list of names")
    for other in architectures:
        if str(other).endswith(_OTHER_TASKS):
            raise ModelError(f"{name} was saved as {other}, not as a causal language model")
    if _is_encoder(model_type, config):
        raise ModelError(
            f"{name} is an encoder: every token of a {model_type} sees those after it, "
            "so there is nothing to predict",
            hint='"is_decoder": true in its config.json makes it a causal language model',
        )
    return _without_foreign(config)


def _is_encoder(model_type: str, config: dict[str, Any]) -> bool:
    """Whether the type attends both ways unless its configuration says `is_decoder`.

    GPT-NeoX has the field and never reads it.
    """
    if config.get("is_decoder") or model_type.startswith("gpt_neox"):
        return False
    return registry.defaults(model_type).values.get("is_decoder") is False


def _without_foreign(config: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_foreign(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _FOREIGN
    }

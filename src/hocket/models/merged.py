"""Merged: a LoRA adapter of PEFT and its base model as one directory, in the user's cache.

    W' = W + s B A      s = alpha / r, or alpha / sqrt(r) (rsLoRA)

LoRA: Hu et al. 2021, arXiv:2106.09685, section 4.1; rsLoRA: Kalajdzievski 2023, arXiv:2312.03732.
Tensors are read, merged and written one file of the base at a time, by a process of its own, so
that resolving a model never imports torch. Of the adapter's configuration numbers alone are
used: nothing that it names is imported.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hocket.models import quantization
from hocket.models.base_weights import METADATA, require_base
from hocket.models.fetched import ADAPTER, ADAPTER_CONFIG
from hocket.models.weight_headers import INDEX, SINGLE, headers, printable_key
from hocket.spec import downloads
from hocket.spec.errors import CheckpointError, ModelError
from hocket.spec.files import MALFORMED, parse_json, read_text
from hocket.spec.tensor_file import TensorFile
from hocket.spec.user_cache import cache_folder

_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_PLAIN = (
    "peft_type", "task_type", "auto_mapping", "inference_mode", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out", "use_rslora",
    "init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "runtime_config", "ensure_weight_tying",
)  # fmt: skip
"""Switches, lists and tables of peft's configuration that leave W' as it is above. Any other that
is set is of another method (DoRA, KaSA), or of some layers alone."""
_LARGEST_RANK = 1_000_000
_DRAWN = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that draw A and B. The others (PiSSA, OLoRA) also change W."""
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A LoRA adapter.

    Attributes:
        folder: of its two files. base: its base model, as its configuration names it, with the
            revision. scale: s. transposed: weights lie as [in, out], as GPT-2's do.
    """

    folder: Path
    base: str
    scale: float
    transposed: bool


def adapter(name: str, folder: Path) -> Adapter:
    """The adapter of a directory.

    Raises:
        ModelError: its configuration cannot be read, names no base, or is of another method.
    """
    file = folder / ADAPTER_CONFIG
    try:
        config = parse_json(read_text(file))
        method = config.get("peft_type")
        rank, alpha = int(config.get("r") or 0), float(config.get("lora_alpha") or 0)
    except (OSError, *MALFORMED) as error:
        raise ModelError(f"{file} cannot be read: {error}") from None
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(
            f"{name} holds an adapter, and its {ADAPTER_CONFIG} does not name its base model",
            hint="add it to its base with peft: merge_and_unload(), then save_pretrained(DIR)",
        )
    other = [
        key
        for key, value in config.items()
        if key not in _PLAIN and (value is True or (isinstance(value, list | dict) and value))
    ]
    drawn = config.get("init_lora_weights", True)
    if not any(drawn is each or (drawn == each and isinstance(drawn, str)) for each in _DRAWN):
        other.append(f"init_lora_weights {drawn!r:.40}")
    if method == "LORA" and not (0 < rank <= _LARGEST_RANK and math.isfinite(alpha)):
        other.append(f"r {config.get('r')!r:.20} and lora_alpha {config.get('lora_alpha')!r:.20}")
    if method != "LORA" or config.get("bias", "none") != "none" or other:
        what = f"with {', '.join(other)}" if other else f"of type {method}, bias included"
        raise ModelError(
            f"{name} holds an adapter {what}; adapters are read that are plain LoRA",
            hint="add it to its base with peft: merge_and_unload(), then save_pretrained(DIR)",
        )
    if isinstance(config.get("revision"), str) and not Path(base).exists():
        base = f"{base}@{config['revision']}"
    return Adapter(
        folder=folder,
        base=base,
        scale=alpha / (math.sqrt(rank) if config.get("use_rslora") else rank),
        transposed=bool(config.get("fan_in_fan_out")),
    )


def merged_directory(name: str, found: Adapter, base: Path) -> Path:
    """The merged model, made if the cache does not hold it.

    Args:
        base: directory of the base's safetensors.

    Raises:
        ModelError: the adapter's file is missing or damaged, or does not fit the base, or the base
            is quantized.
    """
    if (how := quantization.of_directory(base)) is not None:
        raise ModelError(
            f"{name} is an adapter of {found.base}, whose weights are quantized ({how.method}): "
            "an adapter is merged into weights in fp32, bf16 or fp16",
            hint="name the model that its base was quantized from in "
            f"base_model_name_or_path of {found.folder / ADAPTER_CONFIG}",
        )
    file = found.folder / ADAPTER
    if not file.exists():
        raise ModelError(
            f"{name} holds {ADAPTER_CONFIG} and no {ADAPTER}",
            hint="save the adapter again with peft, which writes safetensors",
        )
    require_base(f"the adapter {name}", _trained_on(file), base)
    files = [file, *sorted(path for path in base.iterdir() if path.is_file())]
    stamps = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    key = hashlib.sha256(repr([stamps, found.scale, found.transposed]).encode()).hexdigest()[:24]
    to = cache_folder("merged") / key
    if (to / "config.json").exists():
        return to
    aside = to.with_name(f".{key}.{os.getpid()}")
    aside.mkdir(parents=True)
    total = sum(p.stat().st_size for p in base.glob("*.safetensors"))
    try:
        with downloads.following(f"{name}: merging the adapter with its base") as follow:
            follow(0, total)
            job = [found.folder, base, aside, found.scale, int(found.transposed)]
            ours = str(Path(__file__).resolve().parents[2])
            path = os.pathsep.join([ours, *filter(None, [os.environ.get("PYTHONPATH")])])
            done = subprocess.run(
                [sys.executable, "-m", "hocket.models.merged", *map(str, job)],
                stdout=subprocess.PIPE, text=True, check=False,
                env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip
            if done.returncode:
                why = done.stdout.strip() or f"exit status {done.returncode}"
                raise ModelError(f"{name} cannot be merged with its base: {why}")
            follow(total, total)
        _copy_rest(found.folder, base, aside)
        aside.rename(to)
    except OSError:
        if not (to / "config.json").exists():  # else another process was faster
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return to


def _trained_on(file: Path) -> str | None:
    """The fingerprint of the base that an adapter's file names, if it names one."""
    try:
        with TensorFile(file) as opened:
            recorded = opened.metadata.get(METADATA)
    except CheckpointError:  # damaged, which the merge reports
        return None
    return printable_key(recorded) if isinstance(recorded, str) else None


def _copy_rest(folder: Path, base: Path, to: Path) -> None:
    """What is no weight: the base's, and the adapter's own tokenizer over it."""
    own = any((folder / name).exists() for name in _TOKENIZER)
    for source in (base, folder) if own else (base,):
        for file in source.iterdir():
            if file.suffix not in (".json", ".jinja", ".model", ".txt", ".py", ".tiktoken"):
                continue
            if file.name not in (INDEX, ADAPTER_CONFIG):
                shutil.copyfile(file, to / file.name)


def _merge_tensors(folder: Path, base: Path, to: Path, scale: float, transposed: bool) -> None:
    """Write the base's tensors, merged, into `to`. Raises ModelError."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    from hocket.models.weights import require_finite

    with safe_open(folder / ADAPTER, framework="pt") as opened:
        pairs = _pairs(opened.keys())
        files = sorted({file.path.name for file in headers(base).values()})
        weight_map: dict[str, str] = {}
        merged: set[str] = set()
        for number, file in enumerate(files, 1):
            name = (
                SINGLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
            )
            tensors = {}
            with safe_open(base / file, framework="pt") as weights:
                for key in weights.keys():  # noqa: SIM118  it is no dictionary
                    tensors[key] = weights.get_tensor(key)
            for key in tensors.keys() & pairs.keys():
                a, b = (opened.get_tensor(part) for part in pairs[key])
                if not (a.is_floating_point() and b.is_floating_point()):
                    raise ModelError(f"the adapter of {key} is of {a.dtype} and {b.dtype}")
                for part, value in zip(pairs[key], (a, b), strict=True):
                    require_finite(part, value, folder)
                delta = scale * (b.to(torch.float32) @ a.to(torch.float32))
                delta = delta.T if transposed else delta
                weight = tensors[key]
                if delta.shape != weight.shape:
                    raise ModelError(
                        f"{key} is {list(weight.shape)} in the base, {list(delta.shape)} in the "
                        "adapter"
                    )
                tensors[key] = (weight.to(torch.float32) + delta).to(weight.dtype).contiguous()
                merged.add(key)
            save_file(tensors, to / name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, name)
    if pairs.keys() - merged:
        raise ModelError(f"the base has no {sorted(pairs.keys() - merged)[0]}")
    if len(files) > 1:
        index: Mapping[str, Any] = {"metadata": {}, "weight_map": weight_map}
        (to / INDEX).write_text(json.dumps(index))


def _pairs(names: list[str]) -> dict[str, tuple[str, str]]:
    """The names of A and B by that of the weight they are added to."""
    found = {}
    for name in names:
        if name.startswith(_PREFIX) and name.endswith((_A, _B)):
            if name.endswith(_A):
                stem = name.removesuffix(_A)
                if f"{stem}{_B}" not in names:
                    raise ModelError(f"the adapter has {name} without its B")
                found[f"{stem.removeprefix(_PREFIX)}.weight"] = (name, f"{stem}{_B}")
            continue
        raise ModelError(f"the adapter has {name}, which is not a LoRA of a linear layer")
    return found


if __name__ == "__main__":
    _folder, _base, _to, _scale, _transposed = sys.argv[1:]
    try:
        _merge_tensors(Path(_folder), Path(_base), Path(_to), float(_scale), _transposed == "1")
    except Exception as error:  # safetensors and torch raise many kinds for files that do not fit
        print(
            error.message if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
        )
        sys.exit(1)

"""LoRA as peft knows it: which layers its words name, its configuration, its files' names.

The parallel layers are `runtime.lora`'s. What they are called in a file, what a configuration says
and how adapters are merged is peft's own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.spec.errors import HocketError, ModelError, OptionError, nearest
from hocket.spec.imports import plain_bitsandbytes
from hocket.spec.run import ALL_LINEAR, TrainOptions, target_words

if TYPE_CHECKING:
    from torch import nn

    from hocket.models.source import ModelSource

PREFIX = "base_model.model."
"""What peft puts before a module's name."""

_CONV1D = "Conv1D"


def linear_layers(model: nn.Module) -> list[str]:
    """Names of the layers that can be adapted; the output head is not among them, as in peft."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return [
        name for name, module in model.named_modules() if is_linear(module) and module is not head
    ]


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer; a parameter that another module multiplies with (a
    router, stacked experts) is none."""
    from torch import nn

    return isinstance(module, nn.Linear) or type(module).__name__ == _CONV1D


def targets_of(model: nn.Module, targets: str | None) -> tuple[str, ...]:
    """Names of the layers that `--lora-targets` means, in the model's order.

    A word means every module of that name, or whose name ends in a dot and it.

    Raises:
        OptionError: a word that names no module (the nearest names are given), or one that names
            something else than linear layers.
        ModelError: a model without linear layers, an adapted head that shares its weight, or layers
            that peft takes for the model's experts.
    """
    found = _named(model, targets)
    _require_found_by_peft(model, found)
    return found


def _named(model: nn.Module, targets: str | None) -> tuple[str, ...]:
    layers = linear_layers(model)
    words = target_words(targets)
    if not words:
        if not layers:
            raise ModelError(f"{type(model).__name__} has no linear layers that LoRA could adapt")
        return tuple(layers)
    names = [name for name, _ in model.named_modules() if name]
    head = model.get_output_embeddings()  # type: ignore[operator]
    found: set[str] = set()
    for word in words:
        meant = [name for name in names if _means(word, name)]
        if not meant:
            leaves = sorted({name.rpartition(".")[2] for name in layers})
            near = nearest(word, leaves)
            raise OptionError(
                f"--lora-targets: {type(model).__name__} has no module {word!r}; its linear "
                f"layers are {', '.join(leaves)}",
                hint=f"--lora-targets {near or ALL_LINEAR}",
            )
        for name in meant:
            if model.get_submodule(name) is head:
                if getattr(model, "all_tied_weights_keys", None):
                    raise ModelError(
                        f"{name} is tied to the embedding; LoRA cannot adapt it alone",
                        hint="leave it out of --lora-targets",
                    )
            elif name not in layers:
                kind = type(model.get_submodule(name)).__name__
                raise OptionError(
                    f"--lora-targets: {name} is a {kind}; LoRA adapts linear layers",
                    hint=f"--lora-targets {ALL_LINEAR}",
                )
        found |= set(meant)
    return tuple(name for name in names if name in found)


def _require_found_by_peft(model: nn.Module, names: tuple[str, ...]) -> None:
    """Raise ModelError for layers that an adapter could not be loaded into. Where experts were
    linear layers once and are stacked now, peft reads the names that they had as names of the
    stack, and adapts no other layer of such a name (a shared expert, a dense layer's MLP)."""
    if all(parameter.dim() < 3 for parameter in model.parameters()):
        return
    with plain_bitsandbytes():
        from peft import LoraConfig
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    def lost(leaf: str) -> bool:
        config = LoraConfig(r=1, target_modules=[leaf])
        try:
            convert_peft_config_for_transformers(config, model, None)
        except ValueError:  # a part of what is stacked
            return True
        return leaf not in (config.target_modules or ())

    wrong = [leaf for leaf in _leaves(names) if lost(leaf)]
    if wrong:
        others = [leaf for leaf in _leaves(names) if leaf not in wrong]
        others = others or [leaf for leaf in _leaves(linear_layers(model)) if not lost(leaf)]
        kind = model.config.model_type  # type: ignore[union-attr]
        raise ModelError(
            f"--lora-targets: peft takes {', '.join(wrong)} of {kind} for its experts, so that no "
            "adapter of its other layers of these names could be loaded",
            hint=f"--lora-targets {'-'.join(others)}",
        )


def _leaves(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _means(word: str, name: str) -> bool:
    return name == word or name.endswith(f".{word}")


def alpha_of(options: TrainOptions) -> float:
    """The scale's numerator: as given, else twice the rank."""
    assert options.lora_rank is not None
    return options.lora_alpha if options.lora_alpha is not None else 2.0 * options.lora_rank


def peft_config(model: nn.Module, options: TrainOptions, base: Path | str | None = None) -> Any:
    """peft's own configuration of these options.

    Args:
        model: the whole model, on the meta device or real.
        base: directory of the weights that the adapter belongs to.
    """
    with plain_bitsandbytes():
        from peft import LoraConfig

    names = targets_of(model, options.lora_targets)
    leaves = sorted({name.rpartition(".")[2] for name in names})
    every = [name for name, _ in model.named_modules()]
    exact = {n for n in every if any(_means(leaf, n) for leaf in leaves)} == set(names)
    alpha = alpha_of(options)
    return LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=None if base is None else str(base),
        r=options.lora_rank or 0,
        lora_alpha=int(alpha) if math.isclose(alpha, int(alpha)) else alpha,  # type: ignore[arg-type]
        lora_dropout=options.lora_dropout,
        target_modules=leaves if exact else list(names),
        bias="none",
        fan_in_fan_out=any(type(model.get_submodule(n)).__name__ == _CONV1D for n in names),
        inference_mode=True,
    )


def peft_model(model: nn.Module, options: TrainOptions) -> Any:
    """`model`, which holds values, changed in place by peft: its adapters are trained."""
    with plain_bitsandbytes():
        from peft import get_peft_model

    config = peft_config(model, options)
    config.inference_mode = False
    return get_peft_model(model, config)  # type: ignore[arg-type]


def plain_name(name: str) -> str:
    """Our name of a parameter of a peft model: without its prefix and the adapter's name."""
    return name.removeprefix(PREFIX).replace(".default.", ".").replace(".base_layer.", ".")


def saved_name(name: str) -> str:
    """The name under which peft saves our parameter."""
    return f"{PREFIX}{name}"


def merge_adapter(adapter: Path, base: ModelSource, to: Path, options: TrainOptions) -> None:
    """Write the base with the adapter added to its weights, in the base's own dtype.

    The whole model lies in this process's memory while it is merged; peft does it. Of the adapter's
    directory only its tensors are read: a configuration of peft can name modules to import, and a
    directory without safetensors is looked for on the Hub, or unpickled.

    Args:
        adapter: directory of `adapter_model.safetensors`.
        base: of the weights; its code is run only if it is trusted.
        options: of the run that trained the adapter.

    Raises:
        ModelError: the base cannot be loaded, or the adapter is not of these options.
        CheckpointError: the adapter's file is missing or damaged.
    """
    import transformers

    with plain_bitsandbytes():
        from peft import PeftModel

    from hocket.models.skeleton import config_of
    from hocket.spec.tensor_file import TensorFile

    with TensorFile(adapter / "adapter_model.safetensors"):
        pass
    assert base.weights is not None
    config = config_of(base.config, code=base.code, training=False)
    bars: Any = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # peft asks transformers by a name that transformers gives up.
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("error", message="Found missing adapter keys")
            model = transformers.AutoModelForCausalLM.from_pretrained(
                base.weights,
                config=config,
                dtype="auto",
                attn_implementation="eager",
                use_safetensors=True,
                trust_remote_code=base.code is not None,
                local_files_only=True,
            )
            trained = peft_config(model, options, base.weights)
            merged = PeftModel.from_pretrained(model, str(adapter), config=trained)
            merged.merge_and_unload().save_pretrained(to)
    except (OSError, HocketError):
        raise
    except Exception as error:  # transformers and peft raise many kinds for files that do not fit
        raise ModelError(
            f"the adapter in {adapter} cannot be merged into {base.weights}: {error}"
        ) from error
    finally:
        if shown:
            bars.enable_progress_bar()

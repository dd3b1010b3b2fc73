"""The skeleton: a whole causal language model on the meta device, without a byte of weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import initialization

from hocket.models.cores import look_at_modules
from hocket.models.experts import loop_in_fp64
from hocket.models.failure import raise_if_exhausted
from hocket.spec.errors import ModelError, unknown

ATTENTION = ("sdpa", "eager")
_REGISTERED: set[str] = set()
_WARNS = "warn_if_padding_and_no_attention_mask"


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Make `function` an attention implementation that `build_skeleton` takes by `name`.

    It is called as transformers' own are, `(module, query, key, value, attention_mask, **kwargs)
    -> (output, None)`, and gets no mask: none is ever built for it.
    """
    transformers.AttentionInterface.register(name, function)
    _REGISTERED.add(name)


def _cause(error: BaseException) -> str:
    """What was found wrong, without the names of the validators that came upon it."""
    while isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        error = error.__cause__
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def config_of(
    values: dict[str, Any],
    *,
    dropout: float | None = None,
    code: Path | None = None,
    router_loss: bool = True,
    training: bool = True,
) -> transformers.PreTrainedConfig:
    """The transformers configuration of a dictionary; for training, with no cache.

    Args:
        values: a Hugging Face configuration dictionary.
        dropout: overrides every dropout probability; 0 also ends what else is random in training
            (layer drop, router jitter). None: as configured.
        code: directory whose own configuration class is used (trusted remote code).
        router_loss: whether a switch that adds a router's auxiliary loss stays on. It changes no
            logits: generation and traces switch it off.
        training: False keeps what only concerns inference, as `use_cache`.

    Raises:
        ModelError: transformers refuses the configuration; its reason is given.
    """
    values = copy.deepcopy(values)
    values.pop("transformers_version", None)
    kind = values.get("model_type")
    try:
        if code is not None:
            config = transformers.AutoConfig.from_pretrained(code, trust_remote_code=True)
            for key, value in values.items():
                if key not in ("auto_map", "architectures", "model_type"):
                    setattr(config, key, value)
        else:
            model_type = values.pop("model_type")
            config = transformers.AutoConfig.for_model(model_type, **values)
    except Exception as error:  # transformers raises many kinds for a configuration that is wrong
        raise_if_exhausted(error)
        of = code or kind or "no model_type"
        raise ModelError(
            f"transformers rejects the model's configuration ({of}): {_cause(error)}"
        ) from error
    if not training:
        return config
    config.use_cache = False
    for key in ("output_attentions", "output_hidden_states"):
        if getattr(config, key, False):
            setattr(config, key, False)
    if not router_loss and getattr(config, "output_router_logits", False):
        config.output_router_logits = False
    if dropout is not None:
        _set_dropout(config, dropout)
    return config


def build_skeleton(
    config: dict[str, Any] | transformers.PreTrainedConfig,
    *,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    dropout: float | None = None,
    code: Path | None = None,
    device: str | torch.device = "meta",
    router_loss: bool = True,
) -> nn.Module:
    """Build the whole model; on the meta device unless specified otherwise, and never initialised.

    The attention implementation is always given, so that a configuration cannot choose one. A
    family that has no fused attention gets `eager`, unless another one than `sdpa` was asked for.
    `router_loss` as for `config_of`, where `config` is a dictionary.

    Raises:
        ModelError: an unknown attention implementation, or a configuration that transformers
            cannot build a causal language model from.
    """
    if attention not in ATTENTION and attention not in _REGISTERED:
        message, hint = unknown("attention", attention, ATTENTION)
        raise ModelError(message, hint=hint)
    if isinstance(config, dict):
        config = config_of(config, dropout=dropout, code=code, router_loss=router_loss)
    elif dropout is not None:
        config = copy.deepcopy(config)
        _set_dropout(config, dropout)
    trusted: dict[str, Any] = {"trust_remote_code": True} if code is not None else {}
    if not trusted:
        classes = transformers.AutoModelForCausalLM._model_mapping
        if type(config) not in classes:
            raise ModelError(f"transformers has no causal language model of {config.model_type!r}")
        if attention == "sdpa" and not getattr(classes[type(config)], "_supports_sdpa", False):
            attention = "eager"
    look_at_modules()
    with torch.device(device), initialization.no_init_weights():
        try:
            auto: Any = transformers.AutoModelForCausalLM
            model = auto.from_config(config, attn_implementation=attention, dtype=dtype, **trusted)
            loop_in_fp64(model, dtype)
        except Exception as error:  # many kinds, all of them the configuration's fault
            raise_if_exhausted(error)
            if isinstance(error, KeyError) and error.args == (attention,):
                raise ModelError(
                    f"{config.model_type!r} has attention classes of its own, none of them for "
                    f"{attention}: transformers' attention interface does not reach them"
                ) from error
            raise ModelError(
                f"transformers cannot build {config.model_type!r} from its configuration: {error}"
            ) from error
    if str(device) == "meta":
        _drop_values(model, dtype)
        _require_placed(model)
    model.tie_weights()  # part of the initialisation that was left out
    for module in model.modules():
        if hasattr(module, _WARNS):  # BERT's relatives read tokens from the device for a warning
            setattr(module, _WARNS, _without_warning)
    assert isinstance(model, nn.Module)
    return model


def _without_warning(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
    """In place of a look for padding in each forward, where hocket has none or gives a mask."""


def _require_placed(model: nn.Module) -> None:
    """Raise ModelError where a module keeps a tensor that is neither a parameter nor a buffer: a
    model that is built without memory never gets its values."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise ModelError(
                    f"{type(model).__name__} computes {name}.{attribute} when it is built, and "
                    "keeps it as neither a parameter nor a buffer: its ranks would have no values"
                )


def _drop_values(model: nn.Module, dtype: torch.dtype) -> None:
    """Some constructors make a tensor by a function that ignores the default device, or the default
    dtype; a rank's floating-point parameters are all of the dtype asked for (`models.weights`)."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            kind = dtype if parameter.is_floating_point() else parameter.dtype
            if not parameter.is_meta or parameter.dtype != kind:
                module._parameters[name] = nn.Parameter(
                    parameter.to("meta", kind), requires_grad=parameter.requires_grad
                )
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to("meta")


def _set_dropout(config: transformers.PreTrainedConfig, probability: float) -> None:
    for key, value in list(vars(config).items()):
        drops = any(part in key for part in ("dropout", "pdrop", "layerdrop"))
        random = probability == 0 and key in ("router_jitter_noise", "input_jitter_noise")
        if (drops or random) and isinstance(value, (int, float)) and not isinstance(value, bool):
            setattr(config, key, 0.0 if "layerdrop" in key else float(probability))

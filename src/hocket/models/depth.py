"""A configuration with another number of layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hocket.spec.errors import ModelError, OptionError
from hocket.spec.legality import MOST_LAYERS

_DEPTH = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers",
    "decoder_layers",
)  # fmt: skip


def config_with_layers(name: str, config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The configuration of the model `name` with another number of layers; lists that have an entry
    for each layer (`layer_types`, `mlp_layer_types`) repeat.

    Raises:
        OptionError: fewer than 1, or more than `MOST_LAYERS`.
        ModelError: the configuration does not say how many it has.
    """
    if not 1 <= layers <= MOST_LAYERS:
        raise OptionError(
            f"layers is {layers:,}; a model has at least 1 and at most {MOST_LAYERS:,}",
            hint=f"--layers {4 if layers < 1 else MOST_LAYERS}",
        )
    key = next((key for key in _DEPTH if config.get(key) is not None), None)
    if key is None:
        raise ModelError(f"the configuration of {name} does not specify its number of layers")
    changed = {**config, key: layers}
    for field, kinds in config.items():
        each = field.endswith(("layer_types", "layers_block_type")) or field == "block_types"
        if isinstance(kinds, list) and kinds and (each or len(kinds) == config[key]):
            changed[field] = [kinds[i % len(kinds)] for i in range(layers)]
    return changed

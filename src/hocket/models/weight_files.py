"""Safetensors weights of a Hugging Face directory, read slice by slice.

Only the blocks that a rank holds are read from the files. Names in a file may differ from the
module's: transformers' own renaming rules are applied (a missing or extra `model.` or
`transformer.` prefix, tensors renamed since, experts stored one by one). Of a multimodal model
only the language model inside is read (`models.text_part`). Quantized weights are read to floats on
the way (`models.dequantized`).
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from hocket.models import quantization, quantized_files, text_part
from hocket.models.dequantized import Dequantized
from hocket.models.disk_tensor import DTYPES, DiskTensor
from hocket.models.weight_headers import headers, printable_key
from hocket.spec.errors import WeightsError
from hocket.spec.placement import Placement

_MOST_LISTED = 20
# Saved by old versions of many families; tables that every model makes itself.
_IGNORED = (r"rotary_emb\.inv_freq$", r"\.attn\.(masked_)?bias$", r"attention\.(masked_)?bias$")


@dataclasses.dataclass
class _Stored:
    """What one tensor of the model is made of: keys of the files, by source pattern."""

    sources: dict[str, list[str]]
    converter: WeightConverter | None = None


class WeightFiles:
    """The weights of one directory, under the names of one model.

    Args:
        directory: holds `model.safetensors`, or shards and their index.
        skeleton: the whole model on the meta device.

    Raises:
        WeightsError: a file is missing or damaged, or names or shapes do not fit; all of them
            are listed (the first 20, and their number).
    """

    def __init__(self, directory: Path, skeleton: nn.Module) -> None:
        self.directory = directory
        self.skeleton = skeleton
        state = skeleton.state_dict()
        self._expected = {name: tuple(t.shape) for name, t in state.items()}
        self._floats = {name for name, t in state.items() if t.is_floating_point()}
        self._ties: dict[str, str] = dict(getattr(skeleton, "all_tied_weights_keys", None) or {})
        self._where = headers(directory)
        self._files = list(dict.fromkeys(self._where.values()))
        self._quantized: dict[str, Dequantized] = {}
        how = quantization.of_directory(directory)
        if how is not None:
            self._quantized, used = quantized_files.tensors(self._where, how)
            self._where = {key: file for key, file in self._where.items() if key not in used}
        self._check_dtypes()
        unexpected = self._map_names()
        self._check(unexpected)

    # --- reading -------------------------------------------------------------------------------

    def read_into(self, local: Tensor, placement: Placement) -> None:
        """Fill a rank's tensor with its blocks of the whole one, in the tensor's own dtype."""
        name = self.stored_name(placement.name)
        stored = self._stored[name]
        if stored.converter is None:
            (key,) = stored.sources[next(iter(stored.sources))]
            whole = self._tensor(key)
            for there, here in placement.pairs():
                whole.read(there, local[here])
        elif (layout := self._stack(stored)) is not None:
            for there, here in placement.pairs():
                _copy_stacked(layout, there, local[here])
        else:
            # A rule that computes: transformers converts the whole tensor on CPU, then it is cut.
            converted = self._convert(name, stored)
            for there, here in placement.pairs():
                local[here].copy_(converted[there])

    def stored_name(self, name: str) -> str:
        """The name whose values a parameter takes: of a tie, whichever end the files hold."""
        if name in self._stored:
            return name
        owner = self._ties.get(name, name)
        if owner in self._stored:
            return owner
        return next(end for end, of in self._ties.items() if of == owner and end in self._stored)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    @property
    def bytes_read(self) -> int:
        """Bytes taken from all the files so far, their headers among them."""
        return sum(file.bytes_read for file in self._files)

    def close(self) -> None:
        """Let the files go."""
        for file in self._files:
            file.close()

    def _tensor(self, key: str) -> DiskTensor | Dequantized:
        return self._quantized.get(key) or DiskTensor(self._where[key], key)

    def _stack(self, stored: _Stored) -> list[list[DiskTensor | Dequantized]] | None:
        """Experts stored one by one: per source pattern, its tensors, to be stacked on dim 0 and
        laid side by side on dim 1. None: the rule does something else."""
        operations: list[Any] = stored.converter.operations if stored.converter else []
        kinds = [type(operation) for operation in operations]
        dims = [getattr(operation, "dim", None) for operation in operations]
        if (kinds, dims) not in (
            ([MergeModulelist, Concatenate], [0, 1]),
            ([MergeModulelist], [0]),
        ):
            return None
        assert stored.converter is not None
        patterns = [p for p in stored.converter.source_patterns if p in stored.sources]
        return [[self._tensor(key) for key in stored.sources[p]] for p in patterns]

    def _convert(self, name: str, stored: _Stored) -> Tensor:
        assert stored.converter is not None
        converter = copy.deepcopy(stored.converter)
        for pattern, keys in stored.sources.items():
            for key in keys:
                converter.collected_tensors[pattern].append(self._tensor(key).whole())  # type: ignore[arg-type]
        model: Any = self.skeleton
        found = converter.convert(name, model=model, config=model.config)
        value = found[name]
        return value[0] if isinstance(value, list) else value

    # --- names ---------------------------------------------------------------------------------

    def _check_dtypes(self) -> None:
        for key, file in self._where.items():
            dtype = file.entries[key].dtype
            if dtype not in DTYPES:
                raise WeightsError(
                    f"{printable_key(key)} in {file.path.name} has dtype {dtype}; known: "
                    f"{', '.join(DTYPES)}"
                )

    def _map_names(self) -> list[str]:
        model: Any = self.skeleton
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        prefix, meta = model.base_model_prefix, model.state_dict()
        self._stored: dict[str, _Stored] = {}
        unexpected: list[str] = []
        inside = text_part.is_multimodal(self.directory)
        for key in sorted([*self._where, *self._quantized], key=dot_natural_key):
            plain = text_part.stored_as(key) if inside else key
            if plain is None:
                continue
            name, pattern = rename_source_key(plain, renamings, converters, prefix, meta)
            if name not in meta and plain in meta:
                name, pattern = rename_source_key(plain, [], [], prefix, meta)
            if name not in meta:
                unexpected.append(key)
            elif pattern is None:
                self._stored[name] = _Stored({key: [key]})
            else:
                found = self._stored.setdefault(name, _Stored({}, by_pattern[pattern]))
                found.sources.setdefault(pattern, []).append(key)
                self._add_other_targets(name, found)
        ignored = [*_IGNORED, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
        config = model.config
        more = getattr(config, "num_nextn_predict_layers", None) or 0  # DeepSeek-V3's, GLM's
        first = config.num_hidden_layers if more else 0
        ignored += [rf"^model\.layers\.{first + number}\." for number in range(more)]
        return [k for k in unexpected if not any(re.search(rule, k) for rule in ignored)]

    def _add_other_targets(self, name: str, found: _Stored) -> None:
        """A rule with several targets makes them all from the same sources."""
        assert found.converter is not None
        first, *others = found.converter.target_patterns
        for other in others:
            sibling = name.replace(first, other)
            if sibling in self._expected:
                self._stored.setdefault(sibling, found)

    def _check(self, unexpected: Iterable[str]) -> None:
        wrong = [f"unexpected {printable_key(key)}" for key in unexpected]
        optional = {name for name, _ in self.skeleton.named_buffers()}
        held = set(self._stored)
        for name, shape in self._expected.items():
            if name not in held:
                owner = self._ties.get(name, name)
                ends = {owner, *(end for end, of in self._ties.items() if of == owner)}
                if not ends & held and name not in optional:
                    wrong.append(f"missing {name} {list(shape)}")
                continue
            stored = self._stored_shape(name)
            dtypes = {
                self._where[key].entries[key].dtype
                for key in self._keys(name)
                if key not in self._quantized
            }
            whole = sorted(d for d in dtypes if not DTYPES[d].is_floating_point)
            if name in self._floats and whole:
                wrong.append(f"{name} is {whole[0]} in the file, a float in the model")
            elif stored is not None and stored != shape:
                wrong.append(f"{name} is {list(stored)} in the file, {list(shape)} in the model")
        if wrong:
            more = len(wrong) - _MOST_LISTED
            lines = wrong[:_MOST_LISTED] + ([f"and {more} more"] if more > 0 else [])
            raise WeightsError(
                f"the weights in {self.directory} do not fit the model "
                f"({len(wrong)} of {len(self._expected)} names):\n  " + "\n  ".join(lines)
            )

    def _keys(self, name: str) -> Iterable[str]:
        """The files' names of what a tensor is made of."""
        return itertools.chain.from_iterable(self._stored[name].sources.values())

    def _stored_shape(self, name: str) -> tuple[int, ...] | None:
        stored = self._stored[name]
        if stored.converter is None:
            (key,) = stored.sources[next(iter(stored.sources))]
            return self._tensor(key).shape
        layout = self._stack(stored)
        if layout is None:
            return None  # known only once it is converted
        if any(len(part) != len(layout[0]) for part in layout):
            return (min(len(part) for part in layout), 0)
        if any(t.shape != part[0].shape for part in layout for t in part):
            return (len(layout[0]), 0)
        rows = sum(part[0].shape[0] for part in layout)
        return (len(layout[0]), rows, *layout[0][0].shape[1:])


def _copy_stacked(
    layout: list[list[DiskTensor | Dequantized]], there: tuple[slice, ...], to: Tensor
) -> None:
    """Copy one box of stacked, side-by-side experts without building the stack."""
    experts, rows, *rest = there
    first = 0
    for part in layout:
        extent = part[0].shape[0]
        start, stop = max(rows.start, first), min(rows.stop, first + extent)
        if start < stop:
            box = (slice(start - first, stop - first), *rest)
            for index in range(experts.start, experts.stop):
                part[index].read(
                    box, to[index - experts.start, start - rows.start : stop - rows.start]
                )
        first += extent

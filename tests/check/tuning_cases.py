"""What ranks run of fine-tuning: checks of adapters and of packed documents, in one world."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hocket.spec.layout import Layout
from hocket.spec.run import RunSpec
from tests.check import cases


def spec_of(family: str, layout: str, options: dict[str, Any]) -> RunSpec:
    spec = cases.spec_of(family, layout)
    return dataclasses.replace(spec, options=dataclasses.replace(spec.options, **options))


def folder_of(folder: str, family: str, options: dict[str, Any]) -> Path:
    return Path(folder) / f"{family}-{'-'.join(f'{k}={v}' for k, v in sorted(options.items()))}"


def references(context: Any, folder: str, wanted: list[Any]) -> None:
    from hocket.training.reference import write_reference

    for family, options in wanted:
        write_reference(spec_of(family, "dp1", options), folder_of(folder, family, options), 3)


def checks(context: Any, folder: str, todo: list[Any], fault: str = "") -> list[Any]:
    """All failures of each [family, layout, options] and how many rows were compared; rank 0."""
    from hocket.training.check import compare_layout

    found: list[Any] = []
    meshes: dict[str, Any] = {}
    for family, layout, options in todo:
        spec = spec_of(family, layout, options)
        where = folder_of(folder, family, options)
        key = str(Layout.parse(layout))
        parallel, optimizer = cases.compose(context, spec, meshes, key)
        break_something(parallel, fault)
        parallel.unshard()
        frozen = {n: p.detach().clone() for n, p in parallel.named_parameters()}
        parallel.reshard()
        report = compare_layout(spec, parallel, optimizer, where, 3)
        parallel.unshard()
        for name, parameter in parallel.named_parameters():
            if not parameter.requires_grad:
                assert parameter.grad is None, name
                assert bool((parameter == frozen[name]).all()), name
        parallel.reshard()
        if options.get("lora_rank"):
            assert all(".lora_" in name for name in optimizer.state_tensors())
        if report is not None:
            found.append([family, layout, list(report.failures), len(report.rows)])
    return found


def break_something(parallel: Any, fault: str) -> None:
    if fault == "thin gradients not summed over tp":
        parallel._partial.sum = lambda: None
    elif fault == "documents see each other":
        from transformers import masking_utils

        masking_utils.find_packed_sequence_indices = lambda positions: None
    elif fault == "a product scaled otherwise":
        for stage in parallel.stages:
            for module in stage.module.modules():
                if hasattr(module, "lora_A"):
                    module.scale *= 1.001
    else:
        assert not fault, fault


def dropout(context: Any) -> list[float]:
    """Loss and summed gradient of a step with LoRA's dropout, kept and made again by recomputation;
    and the loss without dropout."""
    import torch

    losses = []
    for layout in ("dp1", "dp1:recompute=full"):
        options = {"lora_rank": 4, "lora_dropout": 0.5}
        spec = spec_of("llama", layout, options)
        parallel, _ = cases.compose(context, spec, {}, layout)
        for name, parameter in parallel.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.ones_(parameter)
        parts = [{
            "input_ids": torch.arange(32).view(2, 16) % 60,
            "position_ids": torch.arange(16).expand(2, 16),
            "labels": torch.arange(32).view(2, 16) % 59,
        }]  # fmt: skip
        losses.append(float(parallel.forward_backward(parts)))
        gradients = parallel.gradients()
        losses.append(float(sum(g.abs().sum() for g in gradients.values())))
    parallel.train(False)
    return [*losses, float(parallel.forward_backward(parts))]

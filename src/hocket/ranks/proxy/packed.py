"""The trial of packed rows: does a family's proxy model keep documents apart that share a row?"""

from __future__ import annotations

from typing import Any

from hocket.spec.errors import ModelError


def try_packed(config: Any, attention: str) -> str:
    """Why documents in a row would attend to each other; empty where the proxy model gives a row of
    three documents the logits and gradients that it gives each of them by itself."""
    import torch

    from hocket.models.failure import failure_place
    from hocket.models.plans import plan_for
    from hocket.models.proxy import proxy_of
    from hocket.ranks.proxy.numbers import forward, microbatch, proxy_differences, taken_gradients

    try:
        proxy = proxy_of(config)
        model = proxy.build(attention=attention).train()
        inputs, weight = microbatch(proxy)
        ids, weight = inputs["input_ids"][:1], weight[:1]
        parts = torch.split(torch.arange(ids.shape[1]), [5, 7, ids.shape[1] - 12])
        positions = torch.cat([part - part[0] for part in parts])[None]
        alone = []
        for part in parts:
            own = {"input_ids": ids[:, part], "position_ids": positions[:, part]}
            alone.append(forward(model, own))
        expected = torch.cat(alone, 1)
        torch.autograd.backward((expected * weight).sum())
        wanted = taken_gradients(model)
        logits = forward(model, {"input_ids": ids, "position_ids": positions})
        torch.autograd.backward((logits * weight).sum())
        found = taken_gradients(model)
    except ModelError as error:
        return error.message
    except Exception as error:  # the forward of a foreign family fails in its own way
        return f"its tiny proxy model does not run: it fails in {failure_place(error)}"
    return proxy_differences(expected.detach(), logits.detach(), wanted, found, plan_for(model))

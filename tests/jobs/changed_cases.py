"""Models that were changed after their class made them, parallelized in a loop of one's own."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

from tests.jobs.cases import _llama


def _tie(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def _own_head(model: Any) -> None:
    import torch

    model.lm_head = torch.nn.Linear(32, 96, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.arange(32 * 96).reshape(96, 32).sin() / 8)


def _share(model: Any) -> None:
    model.model.layers[2] = model.model.layers[1]


def _hook(model: Any) -> None:
    projection = model.model.layers[1].self_attn.q_proj
    projection.register_forward_hook(lambda module, args, output: output - output.mean(-1, True))


def _norm_hook(model: Any) -> None:
    norm = model.model.layers[1].input_layernorm
    norm.register_forward_hook(lambda module, args, output: output - output.mean(1, True))


def _activation(model: Any) -> None:
    import torch

    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.Softmax(dim=-1)


def _forward(model: Any) -> None:
    def forward(self: Any, x: Any) -> Any:
        return self.down_proj(self.up_proj(x).cumsum(-1))

    mlp = model.model.layers[0].mlp
    mlp.forward = types.MethodType(forward, mlp)


def _projection(model: Any) -> None:
    import torch

    for layer in model.model.layers:
        own = layer.self_attn.q_proj
        layer.self_attn.q_proj = torch.nn.Sequential(own, torch.nn.Tanh())


CHANGES: dict[str, Callable[[Any], None]] = {
    "tie": _tie, "own head": _own_head, "share": _share, "hook": _hook, "norm hook": _norm_hook,
    "activation": _activation, "forward": _forward, "projection": _projection,
}  # fmt: skip


def changed(context: Any, cases: list[tuple[str, str]]) -> list[Any]:
    """For each change and layout how far weights and losses of three steps are from those of plain
    PyTorch in fp64; the message where it is rejected."""
    import torch
    from torch.nn import functional

    import hocket

    ids = torch.randint(0, 96, (4, 16), generator=torch.Generator().manual_seed(1))
    found: list[Any] = []
    for change, text in cases:
        plain = _llama(tie_word_embeddings=change == "own head").double()
        CHANGES[change](plain)
        try:
            parallel = hocket.parallelize(copy.deepcopy(plain), text, microbatches=2)
        except hocket.HocketError as error:
            found.append(str(error))
            continue
        theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
        off = 0.0
        for _ in range(3):
            theirs.zero_grad()
            logits = plain(input_ids=ids).logits[:, :-1]
            loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            theirs.step()
            batch = [{"input_ids": part, "labels": part} for part in ids.chunk(2)]
            own = parallel.forward_backward(batch)
            optimizer.step()
            off = max(off, abs(float(own - loss.detach())))
        state = parallel.state_dict(rank0_only=False)
        for name, value in plain.state_dict().items():
            off = max(off, float((state[name] - value).abs().max()))
        found.append(off)
    return found

"""`generate` of a model in the user's own hands, against the loop without a cache in plain
transformers, whatever name the model's code gives its cache, or none."""

from __future__ import annotations

import warnings

import pytest

from hocket.models.registry import causal_classes
from tests.rotation import part

OTHER_CACHES = ["mamba2", "mamba", "falcon_mamba", "xlstm", "rwkv", "openai-gpt", "gpt2", "llama"]
TYPES = [kind for kind in sorted(causal_classes()) if kind not in OTHER_CACHES]
LENGTHS, NEW = (13, 5, 1, 8), 6


@pytest.mark.torch
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", [*OTHER_CACHES, *part(TYPES, 16)])
def test_generate_is_the_loop_without_a_cache(kind: str) -> None:
    import torch
    import transformers

    import hocket
    from hocket.models.proxy import proxy_of, spread_weights

    warnings.simplefilter("ignore")
    try:
        proxy = proxy_of(transformers.AutoConfig.for_model(kind))
        proxy.config.eos_token_id = proxy.config.get_text_config().eos_token_id = None
        model, plain = proxy.build(seed=1), proxy.build(seed=1)
        for each in (model, plain):
            spread_weights(each.double(), 1)
        plain(input_ids=torch.zeros(1, 4, dtype=torch.long))
    except Exception as error:  # of transformers itself
        pytest.skip(f"its default configuration does not run: {error}")
    draws = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 90, (n,), generator=draws).tolist() for n in LENGTHS]
    try:
        found = hocket.parallelize(model, "dp1").eval().generate(prompts, max_new_tokens=NEW)
    except hocket.HocketError as error:
        pytest.skip(f"rejected: {error}")
    for prompt, new in zip(prompts, found, strict=True):
        assert len(new) == NEW
        for place, token in enumerate(new):
            row = torch.tensor([[*prompt, *new[:place]]])
            with torch.no_grad():
                logits = plain(input_ids=row).logits[0, -1]
            assert logits.max() - logits[token] < 1e-4, (prompt, new, place)

"""The proxy model's loss: is what transformers trains on what a layout computes?"""

from __future__ import annotations

from typing import Any

from hocket.spec.errors import ModelError


def try_loss(config: Any, attention: str) -> tuple[str, bool]:
    """(why transformers' own loss of a configuration is not computed, whether it shifts labels).

    The reason is empty where the loss is computed, and where no proxy model can be made.
    """
    from hocket.models.failure import failure_place
    from hocket.models.own_loss import shifts_labels, takes_labels
    from hocket.models.proxy import proxy_of
    from hocket.ranks.proxy.numbers import microbatch

    try:
        proxy = proxy_of(config)
    except ModelError:
        return "", True
    try:
        model: Any = proxy.build(attention=attention)
        ids = microbatch(proxy)[0]["input_ids"]
        shifts = shifts_labels(model, ids)
        if takes_labels(model):
            model.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    except ModelError as error:
        fix = "" if error.hint is None else f" (set {error.hint})"
        return error.message + fix, True
    except Exception as error:  # the forward of a foreign family fails in its own way
        return (
            f"plain transformers cannot train its proxy model: it fails in {failure_place(error)}",
            True,
        )
    return "", shifts

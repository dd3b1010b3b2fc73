"""What is timed of a decoder layer, and how it is counted."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from hocket.catalogue import models  # noqa: E402
from hocket.probing.layer import Layer, LayerTraffic  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(60)]


def test_traffic_is_what_operations_read_and_write_and_views_are_none() -> None:
    x, row = torch.ones(4, 8), torch.ones(8)
    with LayerTraffic() as counted:
        y = x.view(8, 4).t() + 1.0
    assert (counted.calls, counted.bytes, counted.made) == (1, 2 * 128, 128)
    with LayerTraffic() as counted:
        y = x * row.expand(4, 8)
    assert (counted.calls, counted.bytes) == (1, 128 + 32 + 128), "a row is read once"
    with LayerTraffic() as counted:
        y.add_(x)
    assert (counted.calls, counted.made) == (1, 128)


def test_only_what_lies_between_products_is_timed_and_counted() -> None:
    ticks = itertools.count()
    layer = Layer(
        (8, 16), lambda shape, _: torch.randn(*shape), "fp32", lambda: next(ticks), lambda: None
    )
    forward, backward = layer.traffic()
    layer.taken()
    pieces = layer.forward()
    # Two norms, two rotations, silu, what it gates, two sums: the clock is read twice for each.
    assert layer.taken() == len(pieces) == 8
    layer.backward(pieces)
    assert not pieces, "each is let go of once its gradients are there"
    assert layer.taken() == 8 + 4, "and four sums of gradients"
    assert forward.calls == 2 * 6 + 2 * 5 + 4
    assert backward.bytes > forward.bytes > forward.made > 0


def test_it_is_like_what_is_traced_of_a_model() -> None:
    """Calls of a layer, and bytes of one: prices of one are taken for the other."""
    from hocket.models.trace import trace

    shape = trace(models.config("tiny-llama"), dtype="fp32")
    block = shape.blocks[shape.layers[0]]
    rows = [row for row in block.unfused if row.view == "eager"]
    layer = Layer(
        (64, shape.hidden), lambda s, _: torch.randn(*s), "fp32", lambda: 0.0, lambda: None
    )
    forward, backward = layer.traffic()
    for counted, calls, amount in (
        (forward, sum(r.kernels for r in rows), sum(r.forward for r in rows)),
        (backward, sum(r.backward_kernels for r in rows), sum(r.backward for r in rows)),
    ):
        assert counted.calls == pytest.approx(calls, rel=0.2)
        assert counted.bytes / counted.calls == pytest.approx(2.0 * amount * 64 / calls, rel=0.2)

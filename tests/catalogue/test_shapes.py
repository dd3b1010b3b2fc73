"""Shipped shapes: every model of the catalogue, readable without torch, equal to a fresh trace."""

import subprocess
import sys

import pytest

from hocket.catalogue import models, shapes
from hocket.spec.errors import ModelError
from hocket.spec.model_shape import ModelShape, block_flops


def test_every_model_of_the_catalogue_has_one():
    assert set(shapes.shape_names()) == set(models.model_names())
    for name in shapes.shape_names():
        shape = shapes.shape(name)
        assert shape.name == name
        assert ModelShape.from_json(shape.to_json()) == shape
        assert set(shape.blocks) == {*shape.layers, "embedding", "head"}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("llama-2-7b", 6_738_415_616),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
        ("bloom-176b", 176_247_271_424),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_published_parameter_counts(name, parameters):
    assert shapes.shape(name).num_parameters == parameters


def test_operations_for_each_token():
    shape = shapes.shape("llama-3-8b")
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
    assert shape.flops_per_token(8192, causal=False) == 6 * matrices + 12 * 32 * 4096 * 8192
    assert shape.flops_per_token(8192) == 6 * matrices + 6 * 32 * 4096 * 8193
    # Only the experts that a token reaches count.
    moe = shapes.shape("mixtral-8x7b")
    assert 6 * 12.5e9 < moe.flops_per_token(1) < 6 * 13e9


def test_a_window_bounds_what_attention_sees():
    blocks = shapes.shape("gemma-3-27b").blocks
    near, far = blocks["sliding_attention"], blocks["full_attention"]
    assert near.attention[0].window == 1024
    assert block_flops(near, 512) == block_flops(far, 512)
    assert block_flops(near, 65536) < 0.7 * block_flops(far, 65536)


def test_unknown_names():
    with pytest.raises(ModelError) as error:
        shapes.shape("llama-3-8bb")
    assert "llama-3-8b" in (error.value.hint or "")


def test_no_torch_is_needed():
    code = (
        "import sys; from hocket.catalogue import shapes, hardware, curves;"
        "shapes.shape('llama-3-70b'); hardware.cluster('2x8xH100'); curves.curves();"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.torch
@pytest.mark.parametrize("name", models.model_names())
def test_shipped_shapes_are_fresh(name):
    from hocket.models.trace import trace

    assert trace(models.config(name), name=name) == shapes.shape(name), (
        "run python -m benchmarks.make_shapes"
    )

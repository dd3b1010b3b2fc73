"""Which attention kernel PyTorch takes on CUDA, as rules."""

from __future__ import annotations

import dataclasses

import pytest

from hocket.spec.attention_kernel import AttentionLayer, attention_kernel

A100, ADA, H100, B200, T4 = (8, 0), (8, 9), (9, 0), (10, 0), (7, 5)


def layer(size: int = 128, **more: object) -> AttentionLayer:
    return AttentionLayer(**{"key_size": size, "value_size": size, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "dtype", "capability", "name"),
    [
        (layer(), "bfloat16", A100, "flash"),
        (layer(), "float16", A100, "flash"),
        (layer(), "bfloat16", H100, "cudnn"),
        (layer(), "bfloat16", B200, "cudnn"),
        (layer(256), "bfloat16", H100, "flash"),
        (layer(), "float32", H100, "efficient"),
        (layer(257), "float32", H100, "math"),
        (layer(512), "bfloat16", H100, "efficient"),
        (layer(80), "bfloat16", A100, "flash"),
        (layer(20), "bfloat16", A100, "flash"),
        (layer(20), "float32", A100, "efficient"),
        (layer(20, masked=True), "bfloat16", A100, "math"),
        (layer(192, value_size=128), "bfloat16", A100, "efficient"),
        (layer(192, value_size=128), "bfloat16", H100, "cudnn"),
        (layer(window=512), "bfloat16", H100, "flash-varlen"),
        (layer(packed=True), "bfloat16", A100, "flash-varlen"),
        (layer(20, window=512), "bfloat16", A100, "flex"),
        (layer(8, window=512), "bfloat16", A100, "flash-varlen"),
        (layer(12, window=512), "bfloat16", A100, "math"),
        (layer(packed=True), "float32", A100, "flex"),
        (layer(packed=True), "float32", T4, "efficient"),
        (layer(window=512, dropout=0.1), "bfloat16", A100, "efficient"),
        (layer(192, value_size=128, packed=True), "bfloat16", A100, "flex"),
        (layer(chunked=True), "bfloat16", A100, "efficient"),
        (layer(masked=True), "bfloat16", H100, "cudnn"),
        (layer(dropout=0.1), "bfloat16", H100, "flash"),
        (layer(dropout=0.125), "bfloat16", H100, "cudnn"),
        (layer(256), "bfloat16", ADA, "flash"),
        (layer(208), "bfloat16", ADA, "efficient"),
        (layer(256, dropout=0.1), "bfloat16", ADA, "efficient"),
        (layer(), "bfloat16", T4, "math"),
        (layer(), "float16", T4, "efficient"),
        (layer(implementation="eager", softcap=True), "bfloat16", H100, "eager"),
        (layer(implementation="flex", softcap=True), "bfloat16", H100, "flex"),
        (layer(64, implementation="flex", sinks=True, window=128), "bfloat16", A100, "flex"),
        (layer(implementation="flex", sinks=True, dropout=0.1), "bfloat16", H100, "eager"),
        (layer(8, implementation="flex", sinks=True), "bfloat16", H100, "eager"),
        (layer(512, implementation="flex", sinks=True), "bfloat16", H100, "eager"),
        (layer(implementation="eager", sinks=True, window=128), "bfloat16", H100, "eager"),
    ],
)
def test_the_kernel(
    asked: AttentionLayer, dtype: str, capability: tuple[int, int], name: str
) -> None:
    assert attention_kernel(asked, dtype=dtype, capability=capability).name == name


def test_without_a_new_cudnn_it_is_flash() -> None:
    found = attention_kernel(layer(), dtype="bfloat16", capability=H100, prefer_cudnn=False)
    assert found.name == "flash"


def test_reasons_name_what_rules_out_the_faster_kernel() -> None:
    def why(asked: AttentionLayer, dtype: str = "bfloat16") -> str:
        return attention_kernel(asked, dtype=dtype, capability=A100).reason

    assert why(layer(), "float32") == "float32 is not float16 or bfloat16"
    assert why(layer(192, value_size=128)) == "head sizes 192 and 128 differ"
    assert why(layer(512)) == "head size 512 is above 256"
    assert why(layer(packed=True, dropout=0.1)) == "attention dropout 0.1; a mask of S x S"
    assert why(layer(window=5)) == "window of 5"
    eager = dataclasses.replace(layer(implementation="eager"), softcap=True, sinks=True)
    assert why(eager) == "soft cap and sinks"
    assert why(layer(implementation="eager")) == "the family has no fused attention"


def test_kinds_have_names() -> None:
    assert layer().kind == "full"
    assert layer(window=4096).kind == "sliding (window 4096)"
    assert layer(chunked=True).kind == "chunked"

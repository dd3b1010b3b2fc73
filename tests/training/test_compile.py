"""Compiled blocks compute what plain ones do, with collectives between their graphs."""

from __future__ import annotations

import pytest

from hocket.catalogue import models as catalogue

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(240)]


def test_compiled_blocks_on_two_tensor_ranks(ranks) -> None:
    config = {
        **catalogue.config("tiny-llama"),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 64,
    }
    found = ranks.run("tests.training.cases:compiled", 2, timeout=200.0, config=config, dropout=0.0)
    assert found[0] == found[1]
    plain, compiled = found[0]
    assert compiled == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_compiled_blocks_on_two_context_ranks(ranks, kind: str) -> None:
    """Keys of attention and inputs of convolutions come from the other rank between graphs."""
    config = {
        **catalogue.config("tiny-llama"),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 64,
    }
    if kind == "lfm2":
        config |= {"model_type": kind, "layer_types": ["conv", "full_attention"]}
    found = ranks.run(
        "tests.training.cases:compiled",
        2,
        timeout=200.0,
        config=config,
        dropout=0.0,
        axis="cp",
    )
    plain, compiled = found[0]
    assert compiled == pytest.approx(plain, abs=1e-5)


def test_compiled_blocks_with_dropout_seed_as_plain_ones_do(ranks) -> None:
    config = {
        **catalogue.config("tiny-gpt2"),
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 4,
        "vocab_size": 64,
    }
    found = ranks.run("tests.training.cases:compiled", 1, timeout=200.0, config=config, dropout=0.3)
    plain, compiled = found[0]
    assert compiled == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        (False, {"all_reduce", "wait_tensor"}),
        (True, {"all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor"}),
    ],
)
def test_collectives_are_inside_one_graph_a_layer(ranks, slices: bool, expected: set[str]) -> None:
    config = {
        **catalogue.config("tiny-llama"),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 64,
    }
    found = ranks.run(
        "tests.training.cases:compiled", 2, timeout=200.0, config=config, dropout=0.0,
        slices=slices, functional=True,
    )  # fmt: skip
    assert found[0] == found[1]
    plain, compiled, inside, graphs = found[0]
    assert compiled == pytest.approx(plain, abs=1e-5)
    assert {*inside} == expected
    assert graphs == 1  # compiled once: both layers are equal, and nothing breaks their graph


def test_more_layers_than_torch_compiles_by_default() -> None:
    """Each layer of DiffLlama has a number of its own: torch would stop at 8 graphs, and run the
    other layers uncompiled without an error."""
    import torch

    from hocket.models.plans import plan_for
    from hocket.models.skeleton import build_skeleton
    from hocket.training.build import compile_blocks

    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 10}
    module = build_skeleton({"model_type": "diffllama", **sizes, **heads}, device="cpu")
    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        nonlocal graphs
        graphs += 1
        return graph

    compile_blocks(module, plan_for(module), backend)
    module(input_ids=torch.zeros(1, 8, dtype=torch.long)).logits.sum().backward()
    assert graphs == 10

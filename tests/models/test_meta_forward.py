"""One forward on the meta device: the modules that run, where parameters have three dims."""

import pytest

torch = pytest.importorskip("torch")

from hocket.models.meta_forward import module_runs  # noqa: E402
from hocket.models.plans.experts import named_experts  # noqa: E402
from hocket.models.skeleton import build_skeleton  # noqa: E402
from tests.rehearsal.inside import tiny_config  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    ("kind", "inside"),
    [
        ("rwkv", "rwkv.blocks.0.attention.key"),
        ("xlnet", "transformer.layer.0.rel_attn.layer_norm"),
        ("zamba", "model.layers.0.mamba.in_proj"),
    ],
)
def test_what_has_parameters_of_three_dims_is_not_always_experts(kind, inside):
    """Decays, heads and mixers have them too: they run, and return what they return."""
    model = build_skeleton(tiny_config(kind))
    around = model.get_submodule(inside.rpartition(".")[0])
    assert any(p.ndim == 3 for p in around.parameters(recurse=False))
    assert not list(named_experts(model))
    assert module_runs(model)[inside].times == 1


def test_experts_run_whatever_is_chosen():
    runs = module_runs(model := build_skeleton(tiny_config("mixtral")))
    assert [runs[name].weighted for name, _ in named_experts(model)] == [True] * 4

"""Memory that is predicted in closed form, compared with a step on tensors without memory:
what that counts is what ranks count (tests/training/test_recompute.py)."""

from __future__ import annotations

import pytest

from hocket.catalogue.models import config as configuration
from hocket.cost.measured_memory import memory_rows
from hocket.cost.step_problem import StepProblem
from hocket.schedules.registry import build_schedule
from hocket.spec.layout import Layout
from hocket.spec.model_shape import ModelShape
from hocket.spec.run import RunSpec, TrainOptions, Workload

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]

MODELS = ("tiny-llama", "tiny-qwen3", "tiny-gpt2")  # gate and up; tied; one inner tensor
LAYOUTS = (
    "dp1:microbatches=1",
    "dp1:microbatches=1,recompute=full",
    "dp1:microbatches=1,recompute=full,recompute_layers=2",
    "dp1:microbatches=2,recompute=full,recompute_layers=1",
    "dp2:microbatches=1",
    "dp2:microbatches=1,recompute=full,recompute_layers=2",
    "dp2:microbatches=1,zero=1",
    "dp2:microbatches=2,zero=1,recompute=full",
    "dp2:microbatches=1,zero=1,recompute=full,recompute_layers=1",
    "dp2:microbatches=1,zero=2,recompute=full,recompute_layers=2",
    "dp2:microbatches=1,zero=3,recompute=full,recompute_layers=1",
    "tp2:microbatches=1,recompute=full",
    "pp2:microbatches=4,recompute=full",
    "pp2:microbatches=4,recompute=full,recompute_layers=1",
    "pp2:microbatches=4,schedule=zero-bubble",
    "pp2:microbatches=4,schedule=zero-bubble,recompute=full",
)


@pytest.fixture(scope="module")
def shapes() -> dict[tuple[str, int], ModelShape]:
    """Kept from one layout to the next."""
    return {}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("vocab", [257, 4096])  # gradients are the most, or the logits
def test_the_closed_form_is_within_5_percent(
    name: str,
    vocab: int,
    layout: str,
    shapes: dict[tuple[str, int], ModelShape],
) -> None:
    from hocket.models.trace import trace
    from hocket.training.memory_forecast import forecast_memory

    config = {**configuration(name), "vocab_size": vocab}
    shape = shapes.get((name, vocab)) or trace(config, name=name, dtype="fp32")
    shapes[name, vocab] = shape
    spec = RunSpec(
        model=name,
        config=config,
        layout=Layout.parse(layout),
        workload=Workload(seq_len=128, global_batch=8, dtype="fp32"),
        options=TrainOptions(device="cpu"),
    )
    schedule = build_schedule(spec.layout, spec.layout.microbatches or 1)
    job = StepProblem(shape=shape, layout=spec.layout, workload=spec.workload, schedule=schedule)
    counted_rows = forecast_memory(spec, schedule if spec.layout.num_stages > 1 else None)
    near = 0.01 if spec.layout.schedule == "zero-bubble" else 0.05
    for predicted, counted in zip(memory_rows(job), counted_rows, strict=True):
        assert predicted["total"] == pytest.approx(counted.total, rel=near), (predicted, counted)
        assert predicted["parameters"] == pytest.approx(counted.parameters, rel=0.01)
        assert predicted["gradients"] == pytest.approx(counted.gradients, rel=0.01)
        assert predicted["optimizer"] == pytest.approx(counted.optimizer, rel=0.01)

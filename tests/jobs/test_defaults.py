"""Defaults that depend on task, size and device; and a dry run that shows all of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hocket.catalogue import shapes
from hocket.cli.main import main
from hocket.jobs import defaults, dry_run, precision, prepare
from hocket.jobs.record import JobRecorder
from hocket.jobs.request import request
from hocket.jobs.validate import resolved_microbatches
from hocket.models.source import ModelSource, resolve_model
from hocket.probing import devices
from hocket.spec import legality
from hocket.spec.errors import DataError, OptionError
from hocket.spec.forecast import Forecast
from hocket.spec.layout import Layout
from hocket.spec.run import RunSpec, TrainOptions, Workload
from hocket.training.learning_rate import learning_rate

pytestmark = pytest.mark.train


def source(*, weights: bool) -> ModelSource:

    return dataclasses.replace(
        resolve_model("tiny-llama"), weights=Path("model") if weights else None
    )


def rates(weights: bool, **values: Any) -> dict[str, Any]:
    asked = request({"model": "tiny-llama", **values})
    options = defaults.with_rates(asked, source(weights=weights)).options
    return {
        name: getattr(options, name) for name in ("lr", "min_lr", "lr_schedule", "weight_decay")
    }


def test_rates_follow_the_task() -> None:
    """Weights were once fine-tuned at 1e-3, twenty times what is usual."""
    pytest.importorskip("peft")
    assert rates(False) == {
        "lr": 1e-3, "min_lr": 1e-4, "lr_schedule": "cosine", "weight_decay": 0.1,
    }  # fmt: skip
    assert rates(True) == {
        "lr": 5e-5, "min_lr": 0.0, "lr_schedule": "linear", "weight_decay": 0.0,
    }  # fmt: skip
    assert rates(True, lora_rank=8)["lr"] == 2e-4
    given = {"lr": 3e-4, "min_lr": 1e-5, "lr_schedule": "cosine", "weight_decay": 0.05}
    assert rates(True, **given) == given
    assert rates(False, lr=2e-5)["min_lr"] == pytest.approx(2e-6)
    assert rates(True, lr_schedule="constant")["min_lr"] == 5e-5


def test_parameters_are_about_those_of_the_model() -> None:
    """Experts narrower than the dense layers once counted as if they were as wide: nine times the
    parameters of DeepSeek-V3, and a learning rate for such a model."""
    for name in shapes.shape_names():
        about = defaults.parameters(resolve_model(name).dimensions)
        assert 0.9 < about / shapes.shape(name).num_parameters < 1.4, name


def test_linear_and_constant_decay() -> None:
    linear = request({"model": "m", "steps": 11, "warmup": 1, "lr": 1.0, "min_lr": 0.0,
                      "lr_schedule": "linear"}).options  # fmt: skip
    assert [learning_rate(step, linear) for step in (0, 1, 10)] == [1.0, 1.0, 0.0]
    assert learning_rate(5, linear) == pytest.approx(1 - 4 / 9)
    flat = request({"model": "m", "steps": 11, "warmup": 1, "lr_schedule": "constant"}).options
    assert {learning_rate(step, flat) for step in range(1, 11)} == {flat.lr}
    with pytest.raises(OptionError, match="unknown lr_schedule 'cosin'"):
        request({"model": "m", "lr_schedule": "cosin"})


@pytest.mark.parametrize(
    ("parameters", "rate"),
    [(4e6, 1e-3), (125e6, 6e-4), (1.3e9, 2e-4), (6.7e9, 1.2e-4), (175e9, 6e-5), (1e12, 6e-5)],
)
def test_pretraining_rate_is_that_of_the_published_table(parameters: float, rate: float) -> None:
    assert defaults.pretraining_rate(parameters) == pytest.approx(rate)


def test_pretraining_rate_falls_with_size() -> None:
    found = [defaults.pretraining_rate(10 ** (6 + k / 10)) for k in range(70)]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize(
    ("capability", "dtype"), [((9, 0), "bf16"), ((8, 0), "bf16"), ((7, 5), "fp32"), (None, "fp32")]
)
def test_precision_follows_the_device(
    capability: tuple[int, int] | None, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "compute_capability", lambda: capability)
    on_gpu = request({"model": "tiny-llama", "device": "cuda"})
    assert defaults.with_dtype(on_gpu).workload.dtype == dtype
    given = request({"model": "tiny-llama", "device": "cuda", "dtype": "fp32"})
    assert defaults.with_dtype(given).workload.dtype == "fp32"
    on_cpu = request({"model": "tiny-llama", "device": "cpu"})
    assert defaults.with_dtype(on_cpu).workload.dtype == "fp32"
    assert precision.on_cuda(on_gpu.options)


def test_microbatches_bound_the_tokens_of_one_forward() -> None:
    def found(layout: str, **sizes: int) -> int:
        return resolved_microbatches(Layout.parse(layout), Workload(**sizes))

    assert found("dp1", seq_len=256, global_batch=32) == 1
    assert found("dp8", seq_len=4096, global_batch=64) == 4
    assert found("dp1", seq_len=131072, global_batch=3) == 3
    assert (
        found("dp1", seq_len=64, global_batch=7 * 128) * legality.MICROBATCH_TOKENS >= 64 * 7 * 128
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"micro_batch_size": 2, "global_batch": 32, "layout": "dp4"}, (4, 32)),
        ({"micro_batch_size": 2, "gradient_accumulation_steps": 3, "layout": "dp4"}, (3, 24)),
        ({"gradient_accumulation_steps": 8, "layout": "dp2"}, (8, 32)),
        ({"micro_batch_size": 1, "dp": 2, "pp": 2}, (16, 32)),
        ({"micro_batch_size": 2, "layout": "dp2:microbatches=4"}, (4, 16)),
    ],
)
def test_batch_by_the_field_s_words(values: dict[str, Any], expected: tuple[int, int]) -> None:
    found = defaults.with_batch(request({"model": "tiny-llama", "device": "cpu", **values}))
    assert (found.layout.microbatches, found.workload.global_batch) == expected


@pytest.mark.parametrize(
    ("values", "batch"),
    [
        ({"seq_len": 62}, 21),
        ({"seq_len": 62, "layout": "dp2"}, 20),
        ({"layout": "pp2:microbatches=4"}, 20),
        ({"seq_len": 16}, 32),
        ({"streaming": True}, None),
        ({"global_batch": 32}, None),
        ({"layout": "dp22"}, None),
    ],
)
def test_a_chosen_batch_is_no_larger_than_the_data(
    values: dict[str, Any], batch: int | None, tmp_path: Path
) -> None:
    (tmp_path / "few.txt").write_text("a few words of text\n" * 70)
    asked = request(
        {"model": "tiny-llama", "data": str(tmp_path / "few.txt"), "run": str(tmp_path / "run"),
         "device": "cpu", "eval_fraction": 0.01, "seq_len": 64, **values}
    )  # fmt: skip
    job, folder = prepare.prepare_job(asked), prepare.train_folder(asked)
    if batch is None:
        with pytest.raises(DataError, match="one step takes"):
            prepare.tokenized(job, folder, JobRecorder())
        return
    found = prepare.tokenized(job, folder, JobRecorder())
    assert found.job.request.workload.global_batch == batch
    assert any(f"all {batch} sequences" in note for note in found.notes) == (batch != 32)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"micro_batch_size": 5, "global_batch": 32}, "is not dp1 x 6 microbatches"),
        ({"micro_batch_size": 0}, "micro_batch_size is 0"),
        ({"gradient_accumulation_steps": 2, "microbatches": 4}, "they are the same number"),
        ({"gradient_accumulation_steps": 2, "layout": "dp2:microbatches=4"}, "the same number"),
        ({"micro_batch_size": 4, "gradient_accumulation_steps": 2, "global_batch": 9}, "= 8"),
        ({"micro_batch_size": 64, "global_batch": 32}, "= 64"),
    ],
)
def test_batches_that_contradict_each_other(values: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        request({"model": "tiny-llama", **values})


def test_the_global_batch_of_a_hint_fits_the_layout_s_microbatches() -> None:
    values = {"micro_batch_size": 2, "layout": "dp2:microbatches=4"}
    with pytest.raises(OptionError) as caught:
        request({"model": "tiny-llama", **values, "global_batch": 32})
    assert caught.value.hint == "--global-batch 16"
    assert request({"model": "tiny-llama", **values, "global_batch": 16}).layout.microbatches == 4


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'user' %}{{ m['content'] }}"
    "{% else %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endif %}{% endfor %}"
)


@pytest.mark.ranks
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("warm_workers")
def test_a_dry_run_decodes_the_first_batch_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chat = [{"role": "user", "content": "hi there"}, {"role": "assistant", "content": "hello you"}]
    Path("chats").mkdir()
    for split in ("train", "test"):
        text = (json.dumps({"messages": chat}) + "\n") * 40
        Path(f"chats/{split}-00000-of-00001.jsonl").write_text(text)
    Path("template.jinja").write_text(TEMPLATE)
    flags = ["train", "tiny-llama", "--data", "chats", "--chat-template-file",
             "template.jinja", "--seq-len", "48", "--global-batch", "4", "--layout", "dp2",
             "--dtype", "bf16", "--dry-run"]  # fmt: skip
    assert main(flags) == 0
    out = capsys.readouterr().out
    assert "+ hello you" in out
    assert "left out: test-00000-of-00001.jsonl" in out
    assert "- <user>hi there<assistant>" in out
    assert "pretraining from random weights in bf16: learning rate 0.001" in out
    assert "global batch 4 = dp 2 x microbatches 1 x micro batch 2; sequences of 48 tokens" in out
    assert "price: $" in out
    assert not Path("runs").exists()
    assert main([*flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["options"]["lr"] == 1e-3
    assert found["first_sequence"]["learned"] < found["first_sequence"]["tokens"] == 48
    assert found["eager"]["ends"] is True
    assert found["duration"]["seconds"] == pytest.approx(100 * found["duration"]["step_seconds"])


@pytest.mark.usefixtures("warm_workers")
def test_a_dry_run_is_of_the_model_that_the_data_make(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights have as many rows as the tokenizer has ids; a forecast of this machine is of
    the same job, in fp32 too."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("some words to read\n" * 60)
    asked: list[RunSpec] = []

    def forecast(spec: RunSpec) -> Forecast:
        asked.append(spec)
        return dataclasses.replace(
            Forecast.none(str(spec.layout), ""), step_seconds=0.5, memory=({"total": 1 << 20},)
        )

    monkeypatch.setattr(dry_run.forecast, "forecast_run", forecast)
    flags = ["train", "tiny-llama", "--data", "a.txt", "--seq-len", "32", "--global-batch", "4",
             "--layout", "dp2", "--dtype", "fp32", "--steps", "8", "--dry-run"]  # fmt: skip
    assert main(flags) == 0
    assert [(spec.config["vocab_size"], spec.options.device) for spec in asked] == [(257, "cpu")]
    out = capsys.readouterr().out
    assert "on this machine: 500 ms/step" in out
    assert "4 s for 8 steps" in out
    assert "price: $" in out


def test_several_gpus_and_no_layout_ask_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda: 8)

    def auto(**values: Any) -> bool:
        return defaults.with_layout(request({"model": "tiny-llama", **values})).auto

    assert auto(device="cuda")
    assert not auto(device="cpu")
    assert not auto(device="cuda", layout="dp2")
    assert not auto(device="cuda", tp=2)
    monkeypatch.setattr(devices, "visible_gpus", lambda: 1)
    assert not auto(device="cuda")


@pytest.mark.parametrize(
    ("model", "given", "cuda", "length"),
    [("tiny-llama", {}, True, 1024), ("llama-3-8b", {}, True, 4096), ("tiny-llama", {}, False, 256),
     ("llama-3-8b", {"seq_len": 77}, True, 77)],
)  # fmt: skip
def test_sequences_are_as_long_as_model_and_device_take(
    monkeypatch: pytest.MonkeyPatch, model: str, given: dict[str, Any], cuda: bool, length: int
) -> None:
    from hocket.models.source import resolve_model

    monkeypatch.setattr(defaults, "on_cuda", lambda _: cuda)
    asked = request({"model": model, **given})
    assert defaults.with_length(asked, resolve_model(model)).workload.seq_len == length


@pytest.mark.parametrize(
    ("values", "gpus", "ranks", "expected"),
    [
        ({"layout": "dp2"}, 0, None, (32, None)),
        ({"layout": "dp3"}, 0, None, (33, None)),
        ({"layout": "dp8"}, 8, None, (64, None)),
        ({"layout": "dp2.tp2"}, 8, None, (32, None)),
        ({"layout": "auto"}, 6, None, (48, None)),
        ({}, 1, 64, (512, None)),
        ({"layout": "dp8", "micro_batch_size": 2}, 8, None, (64, 4)),
        ({"layout": "dp2", "micro_batch_size": 5}, 0, None, (40, 4)),
        ({"layout": "dp512.tp8", "seq_len": 4096}, 8, None, (1024, None)),
        ({"layout": "dp8", "global_batch": 8}, 8, None, (8, None)),
    ],
)
def test_a_run_takes_the_global_batch_of_a_plan(
    monkeypatch: pytest.MonkeyPatch,
    values: dict[str, Any],
    gpus: int,
    ranks: int | None,
    expected: tuple[int, int | None],
) -> None:
    from hocket.catalogue.hardware import cluster
    from hocket.jobs.planner_problem import planned_global_batch
    from hocket.spec.layout import Layout

    monkeypatch.setattr(devices, "visible_gpus", lambda: gpus)
    device = "cuda" if gpus else "cpu"
    asked = request({"model": "tiny-llama", "device": device, **values})
    found = defaults.with_batch(asked, ranks)
    assert (found.workload.global_batch, found.layout.microbatches) == expected
    if gpus and set(values) <= {"layout", "seq_len"}:
        auto = values.get("layout", "auto") == "auto"
        layout = None if auto else Layout.parse(values["layout"])
        count = ranks or (gpus if layout is None else layout.world_size)
        planned = planned_global_batch(cluster(f"{count}xH100-SXM"), found.workload.seq_len, layout)
        assert planned == expected[0]


def test_auto_is_the_dtype_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request({"model": "tiny-llama", "dtype": "auto"})
    assert defaults.with_dtype(asked).workload.dtype == "fp32"
    monkeypatch.setattr(defaults, "on_cuda", lambda _: True)
    monkeypatch.setattr(devices, "compute_capability", lambda: (9, 0))
    assert defaults.with_dtype(asked).workload.dtype == "bf16"


def test_cores_that_ranks_leave_idle_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from hocket.jobs import defaults
    from hocket.runtime import host_cores

    for here, ranks, threads, wanted in (
        (64, 2, 1, "62 of 64 cores are idle: --threads 32"),
        (64, 2, 8, "48 of 64 cores are idle: --threads 32"),
        (2, 1, 1, ""),
        (64, 32, 1, ""),
    ):
        monkeypatch.setattr(host_cores, "usable_cores", lambda here=here: here)
        options = TrainOptions(device="cpu", threads=threads)
        assert defaults.idle_cores(options, ranks) == wanted

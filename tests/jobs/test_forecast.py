"""Runs are predicted: what lands in the folder, what `--layout auto` chooses, what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from hocket.cli.main import main
from hocket.jobs import forecast, machine
from hocket.jobs.record import JobRecorder
from hocket.jobs.request import request
from hocket.jobs.serving import forecast as serving_forecast
from hocket.jobs.serving import request as serve_request
from hocket.launch import Launcher
from hocket.spec.errors import OptionError
from hocket.spec.measured import LatencyFit, MachineMeasurements
from hocket.spec.run import RunFolder
from hocket.spec.serving_forecast import ServingForecast
from tests.families import FAMILIES, LLAMA
from tests.jobs.served_model import model
from tests.planning.test_machine_forecast import measured
from tests.rotation import part

TARGETS = ("all-linear", "down_proj", "gate_proj-up_proj")
TENSOR_LAYOUTS = (
    "tp2",
    "tp2:recompute=full",
    "tp2:sequence_parallel=true",
    "tp2:sequence_parallel=true,recompute=full",
    "dp2.tp2:zero=1",
    "dp2.tp2:zero=2,microbatches=2,sequence_parallel=true",
    "pp2.tp2:microbatches=2",
    "pp2.tp2:microbatches=2,sequence_parallel=true",
)
SPLIT_LAYOUTS = (
    "tp2",
    "tp2:recompute=full",
    "tp2:sequence_parallel=true",
    "tp2:sequence_parallel=true,recompute=full",
    "pp2.tp2:microbatches=2",
    "pp2.tp2:microbatches=2,sequence_parallel=true",
)
SMALL = ["--seq-len", "32", "--global-batch", "8", "--eval-batches", "1", "--steps", "3"]


def here() -> MachineMeasurements:
    """The made machine, under this one's name."""
    made = measured()
    lined = tuple(
        dataclasses.replace(c, lines=(LatencyFit(bytes=1, latency=1e-5, rate=1e9),))
        for c in made.curves
    )
    host = dataclasses.replace(machine.present_machine("cpu").host, cores=made.host.cores)
    return dataclasses.replace(made, curves=lined, host=host)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is kept before a test, and nothing of it after."""
    found = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(found))
    return found


@pytest.fixture(scope="module")
def cache_of_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache-of-all")


@pytest.fixture
def kept(own_cache: Path, cache_of_all: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found of a model (its shape, its verdicts) is kept for the tests that ask for this:
    they differ in the layout."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_of_all))


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    """A cluster file of the made machine."""
    file = tmp_path / "cluster.toml"
    machine.save_machine(machine.measured_cluster(here()), file)
    return str(file)


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "text.txt"
    file.write_text("One melody is dealt note by note to several voices.\n" * 300)
    return str(file)


@pytest.mark.ranks
@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(200)
def test_a_run_is_predicted_whatever_its_layout(
    tmp_path: Path, text: str, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(
        ["train", "tiny-llama", "--data", text, "--layout", "pp2", "--microbatches", "4", *SMALL,
         "--cluster", cluster, "--run", str(tmp_path / "run")]
    )  # fmt: skip
    assert code == 0
    folder = RunFolder(tmp_path / "run")
    found = forecast.read_forecast(folder)
    assert found is not None
    predicted, timeline = found
    assert predicted.known, predicted.why
    assert predicted.layout == "pp2:microbatches=4"
    assert predicted.step_seconds > 0
    assert timeline is not None
    assert timeline.source == "predicted"
    assert timeline.num_ranks == 2
    # Each action of the very schedule, once.
    names = {e.name for e in timeline.events if e.kind in ("F", "B")}
    assert names == {f"{s}{k}{m}" for s in (0, 1) for k in "FB" for m in range(4)}
    (mine,) = (one for one in predicted.alternatives if one.chosen)
    assert mine.layout == predicted.layout
    assert len(predicted.alternatives) > 1
    # Counted bytes: within 5% of what the ranks counted.
    counted = json.loads(folder.memory_file.read_text())
    for row, seen in zip(predicted.memory, counted, strict=True):
        for kind in ("parameters", "gradients", "optimizer"):
            assert row[kind] == seen[kind], kind
        assert row["total"] == pytest.approx(seen["total"], rel=0.05)
    # The collectives are the recorded ones, to the byte.
    recorded = json.loads(folder.communication_file.read_text())["total"]
    assert list(predicted.collectives) == [row for row in recorded if row["phase"] != "other"]
    assert "predicted: " in capsys.readouterr().out


@pytest.mark.ranks
@pytest.mark.usefixtures("warm", "kept")
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("model", "layout"),
    part(
        [
            ("tiny-llama", "dp2:zero=2"),
            ("tiny-llama", "dp2:zero=3"),
            ("tiny-llama", "dp2.pp2:zero=2,microbatches=4,schedule=zero-bubble"),
            ("tiny-qwen3", "dp2:zero=2,microbatches=2"),  # tied
            ("tiny-qwen3", "dp2:zero=3,microbatches=4"),
        ],
        2,
    ),
)
def test_memory_is_predicted_under_zero(
    tmp_path: Path, text: str, cluster: str, model: str, layout: str
) -> None:
    """Within 5% of what each rank counts, where the logits are the most that a step holds."""
    code = main(
        ["train", model, "--data", text, "--layout", layout, "--seq-len", "128",
         "--global-batch", "8", "--eval-batches", "1", "--steps", "2", "--cluster", cluster,
         "--run", str(tmp_path / "run")]
    )  # fmt: skip
    assert code == 0
    folder = RunFolder(tmp_path / "run")
    found = forecast.read_forecast(folder)
    assert found is not None
    recorded = json.loads(folder.communication_file.read_text())["total"]
    assert list(found[0].collectives) == [row for row in recorded if row["phase"] != "other"]
    counted = json.loads(folder.memory_file.read_text())
    for row, seen in zip(found[0].memory, counted, strict=True):
        for kind in ("parameters", "gradients", "optimizer"):
            assert row[kind] == pytest.approx(seen[kind], rel=0.01), (kind, row, seen)
        assert row["total"] == pytest.approx(seen["total"], rel=0.05), (row, seen)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of weights, which adapters need."""
    import torch
    import transformers

    from hocket.training.tokenizer import byte_tokenizer

    folder = tmp_path_factory.mktemp("base")
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6}
    config = transformers.AutoConfig.for_model(**{**LLAMA, **sizes, "vocab_size": 260})
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save(folder)
    return folder


@pytest.mark.ranks
@pytest.mark.usefixtures("warm", "kept")
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "layout",
    part(
        [
            "dp2:zero=2,microbatches=2",
            "dp2:zero=3",
            "dp2:zero=3,microbatches=2,recompute=full",
            "dp2.tp2:zero=3",
            "dp2.tp2:zero=3,sequence_parallel=true",
            "dp2.pp2:zero=3,microbatches=2",
        ],
        2,
    ),
)
def test_adapters_are_predicted_under_every_stage_of_zero(
    tmp_path: Path, text: str, cluster: str, base: Path, layout: str
) -> None:
    code = main(
        ["train", str(base), "--data", text, "--layout", layout, "--lora-rank", "4", *SMALL,
         "--cluster", cluster, "--run", str(tmp_path / "run")]
    )  # fmt: skip
    assert code == 0
    folder = RunFolder(tmp_path / "run")
    found = forecast.read_forecast(folder)
    assert found is not None
    predicted = found[0]
    assert predicted.known, predicted.why
    counted = json.loads(folder.memory_file.read_text())
    for row, seen in zip(predicted.memory, counted, strict=True):
        for kind in ("parameters", "gradients", "optimizer"):
            assert row[kind] == pytest.approx(seen[kind], rel=0.01), (kind, row, seen)
        assert row["total"] == pytest.approx(seen["total"], rel=0.05), (row, seen)
    recorded = json.loads(folder.communication_file.read_text())["total"]
    assert list(predicted.collectives) == [row for row in recorded if row["phase"] != "other"]


@pytest.mark.ranks
@pytest.mark.usefixtures("warm", "kept")
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("adapters", "layout"), part(list(itertools.product((True, False), SPLIT_LAYOUTS)), 3)
)
def test_memory_is_predicted_over_tensor_ranks(
    tmp_path: Path, text: str, cluster: str, base: Path, layout: str, adapters: bool
) -> None:
    """Within 5%: key/value heads are saved as they are, the loss takes its tokens in as many rows
    as a rank has, adapters keep whole sequences, and a layer that is run again late stands beside
    the gradients of those after it."""
    lora = ["--lora-rank", "4"] if adapters else []
    code = main(
        ["train", str(base), "--data", text, "--layout", layout, *lora, *SMALL,
         "--cluster", cluster, "--run", str(tmp_path / "run")]
    )  # fmt: skip
    assert code == 0
    folder = RunFolder(tmp_path / "run")
    found = forecast.read_forecast(folder)
    assert found is not None
    counted = json.loads(folder.memory_file.read_text())
    for row, seen in zip(found[0].memory, counted, strict=True):
        for kind in ("parameters", "gradients", "optimizer"):
            assert row[kind] == pytest.approx(seen[kind], rel=0.01), (kind, row, seen)
        assert row["total"] == pytest.approx(seen["total"], rel=0.05), (row, seen)


@pytest.mark.ranks
@pytest.mark.usefixtures("warm", "kept")
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("targets", "layout"), part(list(itertools.product(TARGETS, TENSOR_LAYOUTS)), 6)
)
def test_messages_of_adapters_are_predicted_to_the_byte(
    tmp_path: Path, text: str, cluster: str, base: Path, layout: str, targets: str
) -> None:
    """No gradient goes back through what lies before the first adapter, and inputs of what is
    frozen are not gathered for one."""
    code = main(
        ["train", str(base), "--data", text, "--layout", layout, "--lora-rank", "4",
         "--lora-targets", targets, *SMALL, "--cluster", cluster, "--run", str(tmp_path / "run")]
    )  # fmt: skip
    assert code == 0
    folder = RunFolder(tmp_path / "run")
    found = forecast.read_forecast(folder)
    assert found is not None
    recorded = json.loads(folder.communication_file.read_text())["total"]
    assert list(found[0].collectives) == [row for row in recorded if row["phase"] != "other"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models whose layers do not end in a product: dropout follows it, or a norm."""
    from hocket.training.tokenizer import byte_tokenizer

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    configs = {
        "gpt2": {**FAMILIES["gpt2"], "vocab_size": 260, "n_layer": 3},
        "gemma2": {**LLAMA, **sizes, "model_type": "gemma2", "vocab_size": 260, "head_dim": 8},
    }
    found = {}
    for name, values in configs.items():
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(values))
        byte_tokenizer().save(folder)
        found[name] = str(folder)
    return found


@pytest.mark.ranks
@pytest.mark.usefixtures("warm", "kept")
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("model", "layout"), part(list(itertools.product(("gpt2", "gemma2"), TENSOR_LAYOUTS)), 5)
)
def test_messages_are_predicted_where_no_product_ends_a_layer(
    tmp_path: Path, text: str, cluster: str, ended: dict[str, str], model: str, layout: str
) -> None:
    """A layer that is run again sums its last product again too, if something that follows it
    saves its result for backward."""
    code = main(
        ["train", ended[model], "--data", text, "--layout", layout, *SMALL, "--cluster", cluster,
         "--run", str(tmp_path / "run")]
    )  # fmt: skip
    assert code == 0
    folder = RunFolder(tmp_path / "run")
    found = forecast.read_forecast(folder)
    assert found is not None
    assert found[0].known, found[0].why
    recorded = json.loads(folder.communication_file.read_text())["total"]
    assert list(found[0].collectives) == [row for row in recorded if row["phase"] != "other"]


@pytest.mark.ranks
@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(200)
def test_a_layout_is_chosen_said_and_run(
    tmp_path: Path, text: str, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(
        ["train", "tiny-llama", "--data", text, "--layout", "auto", "--schedule", "gpipe", *SMALL,
         "--cluster", cluster, "--run", str(tmp_path / "run")]
    )  # fmt: skip
    assert code == 0
    folder = RunFolder(tmp_path / "run")
    found = forecast.read_forecast(folder)
    assert found is not None
    predicted = found[0]
    spec = folder.load()
    assert str(spec.layout) == predicted.layout
    assert spec.layout.schedule == "gpipe", "what was given is kept"
    assert [one.chosen for one in predicted.alternatives].count(True) == 1
    assert min(one.step_seconds for one in predicted.alternatives) == predicted.step_seconds
    assert f"layout {predicted.layout}: " in capsys.readouterr().out


@pytest.mark.ranks
@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(200)
def test_a_run_without_measurements_says_so_and_runs(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine is measured by a command for it alone: a run once did so after its last step."""
    monkeypatch.setattr("hocket.jobs.machine.kept", lambda *_: None)
    monkeypatch.setattr(
        "hocket.jobs.probe.measure_machine", lambda *_, **__: pytest.fail("measured")
    )
    for cluster, why in (("auto", "was not measured"), ("none", "--cluster none")):
        run = tmp_path / cluster
        code = main(
            ["train", "tiny-gpt2", "--data", text, *SMALL, "--cluster", cluster, "--run", str(run)]
        )
        assert code == 0
        assert ("hocket probe --quick" in capsys.readouterr().out) == (cluster == "auto")
        found = forecast.read_forecast(RunFolder(run))
        assert found is not None
        assert why in found[0].why
        assert found[1] is None


def test_a_cluster_that_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    asked = ["train", "tiny-llama", "--data", text, "--layout", "auto", "--run", str(run)]
    for cluster, said in (
        ("2x8xH100-SXM", "contains no measurements"),
        (str(tmp_path / "nowhere.toml"), "nowhere.toml"),
    ):
        assert main([*asked, "--cluster", cluster]) == 2
        assert said in capsys.readouterr().err
        assert not run.exists()


def test_measurements_of_another_machine_are_refused(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.toml"
    known = here()
    other = dataclasses.replace(known, host=dataclasses.replace(known.host, name="elsewhere"))
    machine.save_machine(machine.measured_cluster(other), file)
    asked = ["train", "tiny-llama", "--data", text, "--cluster", str(file)]
    assert main(asked) == 2
    assert "was measured on elsewhere" in capsys.readouterr().err


@pytest.mark.ranks
@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(200)
def test_ranks_of_two_threads_are_not_predicted_as_ranks_of_one(
    tmp_path: Path, text: str, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`hocket probe` measures ranks of one thread, and two are not twice as fast."""
    run = tmp_path / "run"
    asked = ["train", "tiny-llama", "--data", text, *SMALL, "--threads", "2", "--cluster", cluster]
    assert main([*asked, "--run", str(run)]) == 0
    found = forecast.read_forecast(RunFolder(run))
    assert found is not None
    assert found[0].why == "a rank of 2 threads was not measured here"
    capsys.readouterr()
    assert main([*asked, "--layout", "auto", "--run", str(tmp_path / "auto")]) == 2
    assert "a rank of 2 threads was not measured here" in capsys.readouterr().err


@pytest.mark.torch
@pytest.mark.ranks
@pytest.mark.timeout(200)
def test_a_server_of_two_threads_is_not_predicted_and_still_has_to_fit(
    tmp_path: Path, cluster: str
) -> None:
    def server(**values: Any) -> serve_request.PreparedServer:
        given = {"model": str(model(tmp_path / "model")), "device": "cpu", "cluster": cluster}
        return serve_request.server({**given, **values})

    with Launcher("cpu", 1) as launcher:

        def settled(**values: Any) -> ServingForecast:
            return serving_forecast.settle_layout(server(**values), launcher, JobRecorder(None))[1]

        assert settled().known
        assert settled(threads=2).why == "a rank of 2 threads was not measured here"
        with pytest.raises(OptionError, match="cache of 1KB"):
            settled(threads=2, cache_memory="1KB")
        with pytest.raises(OptionError, match="a rank of 2 threads was not measured"):
            settled(threads=2, layout="auto")


def test_threads_are_no_choice(text: str) -> None:
    from hocket.spec.errors import LayoutError

    with pytest.raises(LayoutError, match="chooses among processes"):
        request({"model": "tiny-llama", "layout": "auto", "data_parallel": "threads"})


def test_a_flag_wins_over_the_file_that_asks_for_a_choice(tmp_path: Path) -> None:
    from hocket.cli.train import read_train_flags

    file = tmp_path / "job.toml"
    file.write_text('model = "tiny-llama"\nlayout = "auto"\nschedule = "gpipe"\n')
    asked = request(read_train_flags(["--config", str(file)])[1])
    assert asked.auto
    assert asked.layout.schedule == "gpipe"
    given = request(read_train_flags(["--config", str(file), "--layout", "dp2"])[1])
    assert not given.auto
    assert given.layout.dp == 2
    file.write_text('model = "tiny-llama"\nlayout = "dp4.tp2"\n')
    again = request(read_train_flags(["--config", str(file), "--layout", "auto"])[1])
    assert again.auto
    assert again.layout.world_size == 1

"""What a server is asked to be: every mistake is told before anything starts."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hocket.launch
from hocket.cli.main import main
from hocket.jobs.serving import request as serve_request
from hocket.jobs.serving.start import require_startable
from hocket.serving.defaults import SamplingDefaults
from hocket.spec.errors import HocketError, LayoutError, ModelError, OptionError, WeightsError
from hocket.spec.run import RunSpec
from tests.jobs.served_model import model

pytestmark = pytest.mark.train


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a launcher was started")

    monkeypatch.setattr(hocket.launch, "Launcher", refuse)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one.getsockname()[1]


def server(where: Path, **options: Any) -> serve_request.PreparedServer:
    return serve_request.server({"model": str(where), **options})


def test_sizes_are_settled(where: Path) -> None:
    found = server(where, layout="tp2.dp2", device="cpu")
    assert found.options.max_model_len == 128
    assert (found.options.max_num_batched_tokens, found.options.max_num_seqs) == (512, 64)
    assert found.options.metrics_port == 8001
    assert found.stop == (256,)
    assert found.name == "model"
    assert str(found.replica.axes_text()) == "tp2"
    assert found.warnings == ()
    spec = found.spec()
    assert RunSpec.from_json(spec.to_json()) == spec
    assert spec.layout.dp == 2
    assert found.spec(replica=True).layout.dp == 1
    assert spec.command == "serve"
    assert server(where, device="cpu", num_blocks=2).options.max_model_len == 32


def test_a_layout_far_above_what_works_names_the_nearest_that_does(where: Path) -> None:
    with pytest.raises(LayoutError, match="do not divide over tp 64") as caught:
        server(where, device="cpu", layout="tp64")
    assert caught.value.hint
    layout = caught.value.hint.split(" or ")[0].removeprefix("--layout ")
    assert server(where, device="cpu", layout=layout).layout.world_size > 1


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"layout": "cp3"}, OptionError, "do not divide over cp 3"),
        ({"layout": "dp2:zero=1"}, LayoutError, "zero is 1"),
        ({"layout": "dp2:recompute=full,recompute_layers=2"}, LayoutError, "recompute is full"),
        ({"layout": "dp2:data_parallel=threads"}, LayoutError, "threads"),
        ({"layout": "pp2:virtual_stages=2"}, LayoutError, "virtual_stages is 2"),
        ({"layout": "tp2:order=dp-tp-cp-pp"}, LayoutError, "dp-tp-cp-pp"),
        ({"layout": "tp3"}, LayoutError, "do not divide over tp 3"),
        ({"layout": "pp3"}, LayoutError, "cannot be cut into 3 stages"),
        ({"layout": "dp300"}, LayoutError, "at most 256"),
        ({"layuot": "tp2"}, OptionError, "unknown option"),
        ({"max_model_len": 129}, OptionError, "128 positions"),
        ({"max_model_len": 1}, OptionError, "must be in 2"),
        ({"max_model_len": 64, "num_blocks": 3}, OptionError, "hold 48 tokens"),
        ({"num_blocks": 9, "cache_memory": "1GB"}, OptionError, "both set the cache size"),
        (
            {"num_blocks": 9, "gpu_memory_utilization": 0.9},
            OptionError,
            "num_blocks and gpu_memory_utilization both set",
        ),
        ({"gpu_memory_utilization": 90}, OptionError, r"90; it must be in 0\.01 \.\. 1"),
        ({"gpu_memory_utilization": 0.9}, OptionError, "these ranks run on the CPU"),
        ({"cache_memory": "much"}, OptionError, "much"),
        ({"max_num_seqs": 0}, OptionError, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": 0}, OptionError, "max_num_batched_tokens is 0"),
        ({"block_size": 0}, OptionError, "block_size is 0"),
        ({"port": 70000}, OptionError, "port is 70000"),
        ({"port": 8000, "metrics_port": 8000}, OptionError, "both 8000"),
        ({"deadline": -1.0}, OptionError, "deadline is -1"),
        ({"deadline": float("nan")}, OptionError, "deadline is nan"),
        ({"max_num_seqs": "many"}, OptionError, "many"),
        ({"port": True}, OptionError, "port is True"),
        ({"host": "0.0.0.0"}, OptionError, "no key is asked for"),
        ({"host": "::"}, OptionError, "no key is asked for"),
        ({"host": ""}, OptionError, "no key is asked for"),
        ({"host": "no.such.host.invalid"}, OptionError, "not an address"),
        ({"api_key_file": "/no/such/file"}, OptionError, "cannot be read"),
        ({"chat_template_file": "/no/such/file"}, OptionError, "no such file"),
        ({"tokenizer": "train"}, OptionError, "for training"),
        ({"device": "cuda"}, OptionError, "no CUDA device"),
    ],
)
def test_what_cannot_be_is_refused(
    where: Path, options: dict[str, Any], kind: type[HocketError], words: str
) -> None:
    if options.get("device") == "cuda" and hocket.launch.launcher.cuda_shows():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(kind, match=words):
        server(where, **{"device": "cpu", **options})


@pytest.mark.parametrize(
    ("options", "words", "hint"),
    [
        (
            {"layout": "pp2", "pipeline_split": "2-0"},
            "leaves a stage without a layer",
            "--pipeline-split 1-1",
        ),
        ({"layout": "tp2.pp3", "pipeline_split": "2-0-0"}, "leaves a stage", "--layout pp2.tp2"),
        ({"backend": "nccl"}, "nccl connects CUDA devices; .* run on cpu", "--backend auto"),
        ({"threads": 100_000}, "threads is 100000; this machine has [0-9]+ core", "--threads "),
        ({"served_model_name": ""}, "served_model_name is ''", "--served-model-name"),
        ({"served_model_name": " "}, "served_model_name is ' '", "--served-model-name"),
        ({"api_key_file": "/no/such/file"}, "cannot be read", "rand -hex 24 > /no/such/file"),
        ({"chat_template_file": "/no/such/file"}, "no such file", "--chat-template-file"),
    ],
)
def test_what_is_refused_comes_with_what_would_do(
    where: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    words: str,
    hint: str,
) -> None:
    monkeypatch.setattr(hocket.launch.launcher, "cuda_shows", lambda: False)
    with pytest.raises(HocketError, match=words) as raised:
        server(where, **options)
    assert hint in (raised.value.hint or "")


def test_weights_that_are_not_whole(where: Path, tmp_path: Path) -> None:
    cut = Path(shutil.copytree(where, tmp_path / "cut"))
    (file,) = cut.glob("*.safetensors")
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1)
    with pytest.raises(WeightsError, match="is not a whole safetensors file"):
        server(cut)
    file.unlink()
    index = cut / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}')
    with pytest.raises(WeightsError, match=r"model-00001-of-00002\.safetensors cannot be read"):
        server(cut)
    index.write_text('{"weight_map": {"lm')
    with pytest.raises(WeightsError, match=r"index\.json cannot be read: Unterminated string"):
        server(cut)


def test_models_that_cannot_answer(where: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no model"):
        serve_request.server({})
    for missing, one in ((str(tmp_path), "the"), ("nosuch", "a")):
        with pytest.raises(ModelError) as raised:
            serve_request.server({"model": missing})
        assert f"{one} directory with config.json" in (raised.value.hint or "")
    with pytest.raises(ModelError, match="no weights"):
        serve_request.server({"model": "tiny-llama"})
    bare = model(tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="no tokenizer"):
        server(bare)
    assert server(bare, tokenizer="bytes", device="cpu").words.vocab_size == 257


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([3, -1, 4, 257, 3, None], (3, 4)),  # -1 and 257 never come
        (-1, ()),
        (None, (256,)),  # the tokenizer's
        ([], ()),
        ("</s>", "eos_token_id is '</s>' in the generation_config.json"),
        (1.5, "token ids are whole numbers"),
        (True, "token ids are whole numbers"),
        ([[3]], "token ids are whole numbers"),
        (list(range(257)), "eos_token_id names 257 tokens"),
    ],
)
def test_tokens_that_end_a_text(
    where: Path, tmp_path: Path, said: object, expected: tuple[int, ...] | str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(where, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
    if isinstance(expected, tuple):
        assert server(folder, device="cpu").stop == expected
    else:
        with pytest.raises(ModelError, match=expected):
            server(folder, device="cpu")


def test_positions_that_no_table_could_hold(where: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(where, folder)
    config = json.loads((folder / "config.json").read_text())
    for positions, longest in ((10**12, 2**24), (-3, None)):
        (folder / "config.json").write_text(
            json.dumps({**config, "max_position_embeddings": positions})
        )
        if longest is None:
            with pytest.raises(ModelError, match="max_position_embeddings is -3"):
                server(folder, device="cpu")
        else:
            assert server(folder, device="cpu").options.max_model_len == longest


def test_sampling_is_as_the_model_says(where: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(where, folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.6, "top_k": 20, "eos_token_id": [3, 4]}))
    found = server(folder, device="cpu")
    assert found.sampling == SamplingDefaults(temperature=0.6, top_k=20)
    assert found.stop == (3, 4)
    without = server(folder, device="cpu", generation_config="none")
    assert without.sampling == SamplingDefaults()
    assert without.stop == (3, 4)
    with pytest.raises(OptionError, match="generation_config is 'no'"):
        server(folder, generation_config="no")
    file.write_text(json.dumps({"top_p": 7}))
    with pytest.raises(OptionError, match=r"generation_config.json: top_p is 7"):
        server(folder)


def test_keys(where: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\n")
    with pytest.raises(OptionError, match="holds no key"):
        server(where, api_key_file=str(file))
    file.write_text("one-long-secret\n")
    file.chmod(0o644)
    (warning,) = server(where, api_key_file=str(file), host="0.0.0.0").warnings
    assert "chmod 600" in warning
    file.chmod(0o600)
    found = server(where, api_key_file=str(file), host="0.0.0.0")
    assert found.warnings == ()
    assert found.keys is not None
    assert "one-long-secret" not in found.spec().to_json()
    (warning,) = server(where, host="0.0.0.0", insecure=True).warnings
    assert "any client" in warning


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["start", "dry-run"])
def test_an_address_that_cannot_be_opened(
    dry: list[str], where: Path, taken: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"

    def rejected(*flags: str) -> str:
        words = ["serve", str(where), "--run", str(run), "--device", "cpu", *flags, *dry]
        assert main(words) == 2
        return capsys.readouterr().err

    for flags in (["--port", str(taken)], ["--port", "0", "--metrics-port", str(taken)]):
        said = rejected(*flags)
        assert f"127.0.0.1:{taken} cannot be opened: Address already in use" in said
        found = re.search(rf"hint: hocket serve .*{flags[-2]} (\d+)", said)
        assert found is not None, said
        name = flags[-2].removeprefix("--").replace("-", "_")
        require_startable(server(where, device="cpu", **{"port": 0, name: int(found[1])}))
    foreign = rejected("--host", "192.0.2.1", "--insecure", "--port", "0")  # RFC 5737: no host's
    assert "192.0.2.1:0 cannot be opened: Cannot assign requested address" in foreign
    assert "--host 127.0.0.1" in foreign
    assert not run.exists()


def test_a_dry_run_has_one_layout(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve", str(where), "--layout", "auto", "--dry-run", "--port", "0", "--device", "cpu"]
    assert main(words) == 2
    assert "auto is chosen by measurement, when the server starts" in capsys.readouterr().err


def test_a_folder_that_holds_a_run(
    where: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text("{}")
    assert main(["serve", str(where), "--run", str(tmp_path)]) == 2
    assert "already holds a run" in capsys.readouterr().err
    file = tmp_path / "file"
    file.touch()
    assert main(["serve", str(where), "--run", str(file / "run")]) == 2
    assert "file, not a folder" in capsys.readouterr().err


def test_loopback() -> None:
    assert serve_request.is_loopback_host("127.0.0.1")
    assert serve_request.is_loopback_host("127.3.2.1")
    assert serve_request.is_loopback_host("::1")
    assert serve_request.is_loopback_host("localhost")
    assert not serve_request.is_loopback_host("192.168.0.1")
    assert not serve_request.is_loopback_host("")

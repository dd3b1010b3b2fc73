"""Renamed names: every entry of the table is accepted where users write it, with its warning."""

from __future__ import annotations

import dataclasses
import importlib
import json
import types
from pathlib import Path
from typing import Any

import pytest

import hocket
from hocket.cli import spelling
from hocket.cli.main import VERBS, main
from hocket.spec import renamed
from hocket.spec.errors import OptionError
from hocket.spec.layout import Layout
from hocket.spec.renamed import EXPORTS, JSON_KEYS, OPTIONS, PARALLEL, RenamedWarning
from hocket.spec.run import RunFolder, RunSpec, TrainOptions
from hocket.spec.serving import ServeOptions
from hocket.spec.synonyms import EXPLAINED, SYNONYMS, VALUES

FLAGS = {verb: spelling.flags_of(importlib.import_module(f"hocket.cli.{verb}")) for verb in VERBS}
EVERY = {name for flags in FLAGS.values() for name in flags}


@pytest.mark.parametrize("old", OPTIONS)
def test_an_old_flag_is_read_as_the_new_one_and_warns(old: str) -> None:
    new = OPTIONS[old]
    verbs = [verb for verb, flags in FLAGS.items() if new in flags]
    assert verbs, f"no verb has --{new}"
    for verb in verbs:
        assert old not in FLAGS[verb]
        with pytest.warns(RenamedWarning, match=f"{spelling.spelled(old)} is now") as caught:
            found = spelling.current(verb, [spelling.spelled(old), "1"], FLAGS[verb])
        assert found == [spelling.spelled(new), "1"]
        assert spelling.spelled(new) in str(caught[0].message)
        with pytest.warns(RenamedWarning):
            equal = spelling.current(verb, [f"--{old}=1"], FLAGS[verb])
        assert equal == [f"{spelling.spelled(new)}=1"]


@pytest.mark.parametrize("old", renamed.VERBS)
def test_an_old_verb_is_a_flag_of_another_one_and_warns(
    old: str, capsys: pytest.CaptureFixture[str]
) -> None:
    verb, flag = renamed.VERBS[old]
    assert old not in VERBS
    assert flag[2:] in FLAGS[verb]
    rest = {"links": ["tiny-llama", "--cluster", "2xH100", "--layout", "tp2"], "ledger": []}[old]
    assert main([old, *rest, "--json"]) == 0
    shown, warned = capsys.readouterr()
    assert f"warning: hocket {old} is now hocket {verb} {flag};" in warned
    assert main([verb, flag, *rest, "--json"]) == 0
    assert capsys.readouterr() == (shown, "")


@pytest.mark.parametrize("old", OPTIONS)
def test_an_old_keyword_is_read_as_the_new_one_and_warns(old: str) -> None:
    with pytest.warns(RenamedWarning, match=f"{old} is now {OPTIONS[old]};"):
        assert renamed.present_options({old: 3}, EVERY - {old}) == {OPTIONS[old]: 3}
    assert renamed.present_options({old: 3}, [old]) == {old: 3}, (
        "where the name is still in use it stays"
    )
    with pytest.raises(OptionError, match="are the same option"), pytest.warns(RenamedWarning):
        renamed.present_options({old: 3, OPTIONS[old]: 3}, EVERY - {old})


def test_the_public_functions_take_old_keywords() -> None:
    from hocket.jobs.request import request

    old = {"clip": 0.5, "held_out": 0.1, "links": "pcie4", "cut": "3-1", "pp": 2}
    with pytest.warns(RenamedWarning) as caught:
        found = request({"model": "tiny-llama", **old})
    assert len(caught) == 4
    assert (found.options.max_grad_norm, found.options.eval_fraction) == (0.5, 0.1)
    assert found.options.emulate_links == "pcie4"
    assert found.layout.pipeline_split == (3, 1)
    with pytest.warns(RenamedWarning, match="usable is now gpu_memory_utilization"):
        (plan,) = hocket.plan("llama-3-8b", serve=True, cluster="H100", usable=0.8)
    assert plan.usable == 0.8


def test_a_layouts_text_takes_the_old_field() -> None:
    with pytest.warns(RenamedWarning, match="cut is now pipeline_split"):
        assert Layout.parse("pp2:cut=3-1").pipeline_split == (3, 1)
    assert Layout.stored("pp2:microbatches=2,cut=3-1").pipeline_split == (3, 1)


def test_a_pin_takes_the_old_name() -> None:
    from hocket.planning.service.plan import service_pins

    with pytest.warns(RenamedWarning):
        assert service_pins(["max_batch_tokens=512"]) == {"max_num_batched_tokens": 512}


@pytest.mark.filterwarnings("error")
def test_a_run_folder_of_the_previous_release_is_read_in_silence(tmp_path: Path) -> None:
    spec = RunSpec(
        model="m",
        config={},
        layout=Layout(pp=2, pipeline_split=(3, 1)),
        options=TrainOptions(max_grad_norm=0.5, eval_fraction=0.1, emulate_links="pcie4"),
        serving=ServeOptions(
            served_model_name="n", max_num_batched_tokens=7, max_num_seqs=3, max_queue=4
        ),
    )
    body = json.loads(spec.to_json())
    successor = {new: old for old, new in OPTIONS.items()}
    for part in ("options", "serving"):
        body[part] = {successor.get(name, name): value for name, value in body[part].items()}
    body["layout"] = body["layout"].replace("pipeline_split", "cut")
    text = json.dumps(body)
    elsewhere = ("cut", "usable", "ways", "precision")
    assert all(f'"{old}"' in text for old in OPTIONS if old not in elsewhere)
    folder = RunFolder(tmp_path)
    folder.spec_file.write_text(text)
    assert folder.load() == spec


@pytest.mark.parametrize("old", EXPORTS)
def test_an_old_public_name_is_the_new_one(old: str) -> None:
    with pytest.warns(RenamedWarning, match=f"hocket.{old} is now hocket.{EXPORTS[old]}"):
        assert getattr(hocket, old) is getattr(hocket, EXPORTS[old])
    assert old not in hocket.__all__


def test_old_attributes_are_the_new_ones() -> None:
    from hocket.jobs.serving.llm import Completion
    from hocket.planning.forecast import Range

    answer = Completion(prompt="", text="", tokens=(), finish_reason="stop")
    with pytest.warns(RenamedWarning, match=r"finish is now Completion\.finish_reason"):
        assert answer.finish == "stop"
    with pytest.warns(RenamedWarning):
        assert Range(1.0, 2.0, 3.0).mid == 2.0
    with pytest.raises(AttributeError, match="no attribute 'ending'"):
        _ = answer.ending


@pytest.mark.torch
@pytest.mark.parametrize("old", PARALLEL)
def test_an_old_method_of_a_parallel_model_is_the_new_one(old: str) -> None:
    from hocket.training.parallel_model import ParallelModel

    model = ParallelModel.__new__(ParallelModel)
    with pytest.warns(RenamedWarning, match=PARALLEL[old]):
        assert getattr(model, old) == getattr(model, PARALLEL[old])


@pytest.mark.parametrize("old", JSON_KEYS)
def test_a_renamed_json_key_is_printed_under_both_names(old: str) -> None:
    found = renamed.with_old_keys({"rows": [{JSON_KEYS[old]: [1]}], "other": 2})
    assert found["rows"] == [{JSON_KEYS[old]: [1], old: [1]}]
    assert found["renamed_keys"] == {old: JSON_KEYS[old]}
    assert renamed.with_old_keys({"other": 2}) == {"other": 2}


def test_plan_prints_the_old_keys(capsys: Any) -> None:
    from hocket.cli.main import main

    arguments = ["plan", "llama-3-8b", "--cluster", "8xH100", "--global-batch", "64", "--json"]
    assert main(arguments) == 0
    data = json.loads(capsys.readouterr().out)
    best = data["layouts"][0]
    assert best["step_seconds"]["mid"] == best["step_seconds"]["median"]
    assert best["lacks"] == best["unsupported"]
    assert data["beyond"] == data["unsupported_layouts"]
    assert set(data["renamed_keys"]) == {"mid", "lacks", "beyond", "alike"}


def test_old_names_and_synonyms_are_not_in_help() -> None:
    # `plan` or `models` has them, and `serve` explains them.
    shown = {n for verb in VERBS for n in FLAGS[verb]} - {
        "gpus",
        "links",
        "quantization",
        "gpu_memory_utilization",
    }
    assert not shown & (set(OPTIONS) | set(EXPLAINED))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", SYNONYMS)
def test_a_synonym_is_accepted_somewhere_without_a_warning(name: str) -> None:
    target = SYNONYMS[name]
    verbs = [v for v, flags in FLAGS.items() if target in flags and name not in flags]
    assert verbs, f"no verb takes {target}"
    for verb in verbs:
        found = spelling.current(verb, [spelling.spelled(name), "1"], FLAGS[verb])
        positional = FLAGS[verb][target].positional
        assert found == (["1"] if positional else [spelling.spelled(target), "1"])


@pytest.mark.parametrize("name", VALUES)
def test_a_switch_of_another_tool_sets_its_option(name: str) -> None:
    option, value = VALUES[name]
    found = spelling.current("train", ["m", spelling.spelled(name), "--steps", "2"], FLAGS["train"])
    assert found == ["m", spelling.spelled(option), value, "--steps", "2"]


@pytest.mark.parametrize("name", EXPLAINED)
def test_an_option_without_a_counterpart_says_what_to_use(name: str) -> None:
    with pytest.raises(OptionError, match=f"unknown option {spelling.spelled(name)}") as caught:
        spelling.current("train", ["m", spelling.spelled(name)], FLAGS["train"])
    hint = caught.value.hint or ""
    for word in hint.replace(",", " ").replace(":", " ").split():
        if word.startswith("--") and word != "--from":
            assert word[2:].replace("-", "_") in EVERY, word


def test_a_synonym_means_what_the_verb_has() -> None:
    words = ["--input-len", "9", "--max-tokens", "3"]
    assert spelling.current("plan", words, FLAGS["plan"]) == [
        *("--prompt-len", "9", "--output-len", "3"),
    ]
    assert "--max-new-tokens" in spelling.current("generate", words[2:], FLAGS["generate"])


def test_an_unknown_flag_names_the_nearest_in_the_whole_command() -> None:
    with pytest.raises(OptionError, match="nearest is --lr-schedule") as caught:
        spelling.current("train", ["m", "--lr-shedule", "linear"], FLAGS["train"])
    assert caught.value.hint == "hocket train m --lr-schedule linear"
    with pytest.raises(OptionError, match=r"--lr-shedule .* --stps .* is --steps") as caught:
        spelling.current("train", ["m", "--lr-shedule", "linear", "--stps", "2"], FLAGS["train"])
    assert caught.value.hint == "hocket train m --lr-schedule linear --steps 2", "all at once"
    with pytest.raises(OptionError) as caught:
        spelling.current("train", ["m", "--frobnicate"], FLAGS["train"])
    assert caught.value.hint == "hocket train --help all", "no far suggestion"


def test_a_config_takes_old_names_and_synonyms(tmp_path: Path) -> None:
    from hocket.cli import config

    file = tmp_path / "run.toml"
    file.write_text("clip = 0.5\nlearning_rate = 1e-4\n")
    with pytest.warns(RenamedWarning):
        assert config.read_config(str(file)) == {"max_grad_norm": 0.5, "lr": 1e-4}


def test_the_dataclass_of_each_verb_is_found() -> None:
    for verb in VERBS:
        module = importlib.import_module(f"hocket.cli.{verb}")
        assert isinstance(module, types.ModuleType)
        assert dataclasses.is_dataclass(spelling.flags_class(module))

"""Golden predictions: a fixed grid of models, clusters and layouts, and what is predicted for each.

    python -m tests.golden.predictions      writes training.json, serving.json, probed.json and
                                            chosen.json again

Every figure is kept with twelve significant digits: a refactoring changes none of them. The last
bits, in which the vector instructions of two CPUs differ, do not count.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import random
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hocket.catalogue import hardware, shapes
from hocket.planning import enumeration, machine_choice, machine_forecast, machine_serving
from hocket.planning.links import axis_links
from hocket.planning.measured_servers import MeasuredServers
from hocket.planning.plan import best_layouts, plan_one
from hocket.planning.problem import Problem
from hocket.planning.service.forecast import ServiceForecast
from hocket.planning.service.plan import answer, answer_one
from hocket.planning.service.problem import ServiceProblem
from hocket.spec.errors import HocketError
from hocket.spec.layout import Layout
from hocket.spec.measured import MachineMeasurements
from hocket.spec.run import Workload
from hocket.spec.service import Service

FOLDER = Path(__file__).parent
DIGITS = 12

CLUSTERS = (
    "1x8xA100-40-SXM", "2x8xA100-80-SXM", "1x8xH100-SXM", "16x8xH100-SXM", "4x8xH200-SXM",
    "2x8xB200-SXM",
)  # fmt: skip

PROBED = (
    "dp1", "dp2", "tp2", "pp2", "dp2:zero=1", "dp2:zero=2", "dp2:zero=3", "dp2.tp2", "pp2.tp2",
    "dp2.pp2", "pp2:schedule=gpipe", "pp2:schedule=zero-bubble", "tp2:sequence_parallel=true",
    "dp2:recompute=full", "dp4:zero=3,shard=2", "pp4", "tp4",
)  # fmt: skip
SERVED = ("dp1", "dp2", "tp2", "pp2", "tp4", "dp2.tp2", "pp2.tp2")
SEARCHED = (
    ("gpt2", "1x8xA100-40-SXM"), ("gpt2", "2x8xH100-SXM"), ("llama-3-8b", "1x8xA100-80-SXM"),
    ("mixtral-8x7b", "1x8xH200-SXM"),
)  # fmt: skip
TINY = ("tiny-gemma3", "tiny-gpt2", "tiny-llama", "tiny-mixtral", "tiny-qwen3")


def _layouts(num_gpus: int, count: int, seed: str) -> Iterator[Layout]:
    """Layouts of at most `num_gpus` ranks, the same at every call."""
    draw = random.Random(seed)
    powers = [2**i for i in range(num_gpus.bit_length()) if 2**i <= num_gpus]
    for _ in range(count):
        tp = draw.choice([n for n in powers if n <= 8])
        pp = draw.choice([n for n in powers if n * tp <= num_gpus and n <= 16])
        dp = draw.choice([n for n in powers if n * tp * pp <= num_gpus])
        yield Layout(
            dp=dp,
            pp=pp,
            tp=tp,
            zero=draw.randrange(4) if dp > 1 and pp == 1 else draw.randrange(2) if dp > 1 else 0,
            schedule=draw.choice(("1f1b", "gpipe", "zero-bubble")) if pp > 1 else "1f1b",
            microbatches=draw.choice((1, 2, 4)) * pp,
            recompute=draw.choice(("none", "selective", "full")),
            sequence_parallel=tp > 1 and draw.random() < 0.5,
        )


def training() -> dict[str, Any]:
    """Step, memory and their parts on catalogue GPUs."""
    found = {}
    for model in shapes.shape_names():
        for name in CLUSTERS:
            machine = hardware.cluster(name)
            for layout in _layouts(machine.num_gpus, 4, f"{model} {name}"):
                problem = functools.partial(
                    Problem,
                    shape=shapes.shape(model), cluster=machine, seq_len=1024, global_batch=128,
                )  # fmt: skip
                found[f"{model} {name} {layout}"] = _answer(
                    lambda problem=problem, layout=layout: _trained(problem(), layout)
                )
    return found


def _trained(problem: Problem, layout: Layout) -> dict[str, Any]:
    best = plan_one(problem, layout).best
    step = best.step_seconds
    return {
        "step": [step.low, step.median, step.high],
        "memory": [best.memory, best.memory_high],
        "memory_by_kind": best.memory_by_kind,
        "parts": best.parts,
        "bubble": best.bubble,
        "exposed": best.exposed,
    }


def serving() -> dict[str, Any]:
    """Step, memory, cache and load of servers on catalogue GPUs."""
    service = Service(requests_per_second=2.0, ttft_ms=2000.0, tpot_ms=50.0)
    found = {}
    for model in shapes.shape_names():
        for name in ("1x8xA100-80-SXM", "1x8xH100-SXM", "2x8xH200-SXM"):
            for layout in ("dp1", "tp4", "tp8", "pp2.tp4"):

                def serve(model: str = model, name: str = name, layout: str = layout) -> Any:
                    problem = ServiceProblem(
                        shape=shapes.shape(model), cluster=hardware.cluster(name), service=service
                    )
                    return _served(answer_one(problem, Layout.parse(layout)).best)

                found[f"{model} {name} {layout}"] = _answer(serve)
    return found


def _served(best: ServiceForecast) -> dict[str, Any]:
    return {
        "prefill": best.prefill_seconds,
        "decode": best.decode_seconds,
        "most": best.most_requests_per_second,
        "memory_by_kind": best.memory_by_kind,
        "ttft": best.ttft and [best.ttft.p50, best.ttft.p90],
        "tpot": best.tpot and [best.tpot.p50, best.tpot.p90],
    }


def probed() -> dict[str, Any]:
    """Training and serving on one probed CPU machine, replayed from probe.toml."""
    machine = _probed_machine()
    work = Workload(seq_len=64, global_batch=16)
    sizes = machine_serving.EngineSizes(batch_tokens=256, rows=8, longest=128)
    found = {}
    for model in TINY:
        shape = shapes.shape(model)
        for text in PROBED:
            found[f"train {model} {text}"] = _answer(
                lambda text=text, shape=shape: json.loads(
                    machine_forecast.machine_forecast(
                        machine_forecast.step_problem(shape, Layout.parse(text), work), machine
                    )[0].to_json()
                )
            )
        for text in SERVED:
            found[f"serve {model} {text}"] = _answer(
                lambda text=text, shape=shape: json.loads(
                    machine_serving.server_forecast(
                        MeasuredServers(shape, machine), Layout.parse(text), sizes
                    ).to_json()
                )
            )
    return found


def chosen() -> dict[str, Any]:
    """What is chosen, and what a layout's links take: on catalogue GPUs and on the probed CPU."""
    found: dict[str, Any] = {}
    for model, name in SEARCHED:
        problem = Problem(
            shape=shapes.shape(model), cluster=hardware.cluster(name), seq_len=2048,
            global_batch=64,
        )  # fmt: skip
        for objective in ("time", "memory"):
            key = f"train {model} {name} {objective}"
            found[key] = _answer(
                lambda problem=problem, objective=objective: {
                    f"{place} {one.layout}": [one.step_seconds.median, one.memory_high]
                    for place, one in enumerate(
                        best_layouts(problem, objective=objective, top=5).layouts
                    )
                }
            )
        service = Service(requests_per_second=8.0, ttft_ms=2000.0, tpot_ms=50.0)
        asked = ServiceProblem(shape=problem.shape, cluster=problem.cluster, service=service)
        found[f"serve {model} {name}"] = _answer(
            lambda asked=asked: {
                f"{place} {one.layout}": [one.num_gpus, one.most_requests_per_second]
                for place, one in enumerate(answer(asked, top=3).deployments)
            }
        )
        for text in ("dp4.tp2", "dp2.pp2.tp2:microbatches=4", "dp8:zero=3", "cp2.tp4"):
            found[f"links {model} {name} {text}"] = _answer(
                lambda problem=problem, text=text: {
                    one.axis: one.to_json() for one in axis_links(problem, Layout.parse(text))
                }
            )
    return found | _chosen_here()


def _chosen_here() -> dict[str, Any]:
    """The same on the probed CPU."""
    machine, found = _probed_machine(), {}
    work = Workload(seq_len=64, global_batch=16)
    sizes = machine_serving.EngineSizes(batch_tokens=256, rows=8, longest=128)
    for model, capacity in itertools.product(("tiny-llama", "tiny-mixtral"), (0, 31_000_000)):
        shape = shapes.shape(model)
        small = dataclasses.replace(machine, capacity=capacity)
        layouts = enumeration.candidate_layouts(shape, work, 4)

        def ranked(shape: Any = shape, small: Any = small, layouts: Any = layouts) -> Any:
            every = machine_choice.evaluate_layouts(
                shape,
                work,
                small,
                layouts,
                otherwise=lambda: enumeration.candidate_layouts(shape, work, 4, saving=True),
            )
            best, _ = machine_choice.best_of(every, shape, work)
            return {
                f"{place} {one.layout}": [one.step_seconds, one.memory, one.chosen]
                for place, one in enumerate(best.alternatives)
            }

        found[f"train {model} {capacity}"] = _answer(ranked)
        found[f"serve {model} {capacity}"] = _answer(
            lambda shape=shape, small=small: {
                f"{place} {one.layout}": [one.tokens_per_second, one.ttft, one.tpot]
                for place, one in enumerate(
                    machine_serving.choose_server(
                        MeasuredServers(shape, small), sizes, enumeration.meshes(shape, 4)
                    ).alternatives
                )
            }
        )
    return found


def _probed_machine() -> machine_forecast.MeasuredMachine:
    table = tomllib.loads((FOLDER / "probe.toml").read_text())
    measured = MachineMeasurements.from_dict(table["measured"])
    return machine_forecast.MeasuredMachine(measured=measured)


GRIDS: dict[str, Callable[[], dict[str, Any]]] = {
    "training": training, "serving": serving, "probed": probed, "chosen": chosen,
}  # fmt: skip


def _answer(predict: Callable[[], Any]) -> Any:
    """The figures, or the class of the error where the layout is rejected."""
    try:
        return rounded(predict())
    except HocketError as error:
        return {"rejected": type(error).__name__}


def rounded(value: Any) -> Any:
    """Numbers to `DIGITS` significant digits; texts, whose wording may change, are left out."""
    if isinstance(value, dict):
        items = {str(key): rounded(one) for key, one in value.items() if not _is_text(one)}
        return {key: items[key] for key in sorted(items)}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value if not _is_text(one)]
    if isinstance(value, bool) or value is None:
        return value
    number = float(value)
    return int(number) if number.is_integer() else float(f"{number:.{DIGITS}g}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def stored(grid: str) -> dict[str, Any]:
    """The golden figures of one grid."""
    return dict(json.loads((FOLDER / f"{grid}.json").read_text()))


def write(grid: str) -> None:
    """Predict again and write the file, a line a case."""
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in GRIDS[grid]().items()]
    (FOLDER / f"{grid}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    for name in GRIDS:
        write(name)

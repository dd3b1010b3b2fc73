"""The public functions: thin callers of the jobs, with the flags' names as keywords.

    import hocket
    summary = hocket.train("tiny-llama", data=["notes.txt"], layout="dp2.tp2", steps=50)
    hocket.export(summary.run, to="model")

Importing this loads nothing heavy; each function imports its room when it is called.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from hocket.jobs.python_form import errors_in_python
from hocket.spec import renamed
from hocket.spec.errors import OptionError
from hocket.spec.synonyms import unknown_option

if TYPE_CHECKING:
    from pathlib import Path

    from hocket.jobs.record import Summary
    from hocket.jobs.serving.llm import Completion
    from hocket.jobs.serving.server import ServerResult
    from hocket.planning.plan import TrainingPlan
    from hocket.planning.service.plan import ServicePlan
    from hocket.spec.check import CheckReport
    from hocket.spec.layout import Layout

Listener = Callable[[dict[str, Any]], None]

NO_LAYOUT = "check compares a layout with one process, and no layout was given"


@errors_in_python()
def train(
    model: str | os.PathLike[str],
    data: Sequence[str | os.PathLike[str]] | str = (),
    *,
    layout: str | Layout | None = None,
    run: str | os.PathLike[str] | None = None,
    on_event: Listener | None = None,
    **options: Any,
) -> Summary:
    """Train a model; the same as `hocket train`.

    Args:
        model: a Hugging Face directory, a run folder, a name of the catalogue, or ORG/NAME on the
            Hugging Face Hub.
        data: files or folders of text.
        layout: degrees of parallelism: `dp2.pp2.tp2`. None: chosen where this process may use
            several GPUs, else one process.
        run: the run folder. None: a new one under `runs/`.
        on_event: called with each event: `step`, `eval`, `saved` ...
        **options: any other flag of `hocket train`, with underscores: `global_batch=16`.

    Raises:
        HocketError: what the caller can mend, found before any rank starts wherever possible.
    """
    from hocket.jobs.request import request
    from hocket.jobs.train import train_model as job

    values = {"model": model, "data": data, "layout": layout, "run": run, **options}
    return job(request(values), on_event=on_event)


@errors_in_python()
def check(
    model: str | os.PathLike[str],
    *,
    layout: str | Layout | None = None,
    steps: int = 3,
    seq_len: int = 32,
    global_batch: int = 8,
    on_event: Listener | None = None,
    **options: Any,
) -> CheckReport:
    """Compare a layout, which has to be given, with one process; the same as `hocket check`.
    `report.ok` is the verdict.

    Raises:
        HocketError: what the caller can mend.
    """
    from hocket.jobs.check import check_layout as job
    from hocket.jobs.request import request

    if layout is None:
        raise OptionError(NO_LAYOUT, hint="--layout dp2")
    sizes = {"steps": steps, "seq_len": seq_len, "global_batch": global_batch}
    return job(request({"model": model, "layout": layout, **sizes, **options}), on_event=on_event)


@errors_in_python()
def generate(
    model: str | os.PathLike[str],
    prompts: Sequence[str] | str,
    *,
    layout: str | Layout = "dp1",
    **options: Any,
) -> list[Completion]:
    """Continue texts; the same as `hocket generate`, whose flags are the keywords.

    Raises:
        HocketError: what the caller can mend.
    """
    from hocket.jobs.generate import generate_texts as job

    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    return job(os.fspath(model), texts, layout=layout, **options)


@errors_in_python()
def serve(
    model: str | os.PathLike[str],
    *,
    layout: str | Layout | None = None,
    on_event: Listener | None = None,
    **options: Any,
) -> ServerResult | None:
    """Serve a model to OpenAI's clients until a signal asks for the end; the same as
    `hocket serve`, whose flags are the keywords. To be called in the main thread.

    Args:
        model: a Hugging Face directory with weights and a tokenizer, a run folder, or ORG/NAME on
            the Hugging Face Hub.
        layout: `tp2.pp2.dp2`, where dp counts replicas; or `auto`. None: dp1; under torchrun or
            Slurm, data parallelism over all ranks.
        on_event: called with each event; `ready` has the address.

    Returns:
        What the server came to; None in a rank other than 0 that torchrun or Slurm started.

    Raises:
        HocketError: what the caller can mend.
    """
    from hocket.jobs.serving.server import serve_model as job

    return job(model, layout=layout, on_event=on_event, **options)


@overload
def plan(
    model: str | os.PathLike[str],
    *,
    cluster: str,
    global_batch: int | None = None,
    seq_len: int = 4096,
    serve: Literal[False] = False,
    **options: Any,
) -> TrainingPlan: ...


@overload
def plan(
    model: str | os.PathLike[str] = "",
    *,
    serve: Literal[True],
    cluster: str | None = None,
    **options: Any,
) -> tuple[ServicePlan, ...]: ...


@errors_in_python()
def plan(
    model: str | os.PathLike[str] = "",
    *,
    serve: bool = False,
    cluster: str | None = None,
    **options: Any,
) -> TrainingPlan | tuple[ServicePlan, ...]:
    """The best layouts of a model on a cluster, or GPUs for a service; the same as `hocket plan`.

    Args:
        model: a name of the catalogue, a Hugging Face directory, a run folder, or ORG/NAME on the
            Hugging Face Hub.
        serve: size a service instead of a training step. Then there is one plan for each
            hypothesis about a model whose size is not public, and one for any other:
            `(found,) = hocket.plan("llama-3-70b", serve=True, cluster="H100")`.
        cluster: `2x8xH100-SXM`, or a TOML file; with `serve` kinds of GPU too, `A100-80,H100`.
        **options: any other flag of `hocket plan`, with underscores: `objective="memory"`.

    Raises:
        HocketError: what the caller can mend; for a model that does not fit, with the smallest
            cluster that it fits.
    """
    if serve:
        from hocket.jobs.serving.plan import serve_plan

        return serve_plan(model, cluster=cluster, **_known(serve_plan, options))
    from hocket.jobs.plan import plan_training as job
    from hocket.jobs.planner_problem import planned_seq_len

    if not model:
        raise OptionError("which model?", hint="hocket plan llama-3-8b --cluster 8xH100")
    if cluster is None:
        raise OptionError("which GPUs?", hint='cluster="8xH100"')
    options = _known(job, options)
    if options.get("seq_len") is None:
        options["seq_len"] = planned_seq_len(os.fspath(model))
    return job(model, cluster=cluster, **options)


def _known(job: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Keywords by the names of a job's parameters; `dtype` is what jobs call precision.

    Raises:
        OptionError: an unknown name, with the nearest.
    """
    names = {"dtype" if name == "precision" else name for name in inspect.signature(job).parameters}
    found = renamed.present_options(options, names)
    for name in found:
        if name not in names:
            raise unknown_option(name, names, "plan")
    return {"precision" if name == "dtype" else name: value for name, value in found.items()}


@errors_in_python()
def export(
    run: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    merge: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
) -> Path:
    """Write a run's model as a Hugging Face directory; the same as `hocket export`. Of a run with
    LoRA it is the adapter, as peft loads it, or with `merge` the model with the adapter added.
    A model that the directory holds is replaced with `overwrite` alone; `trust_remote_code` runs
    code that the model brings along.

    Raises:
        HocketError: what the caller can mend.
    """
    from hocket.jobs.export import export_run as job

    return job(run, to, merge=merge, overwrite=overwrite, trust_remote_code=trust_remote_code)

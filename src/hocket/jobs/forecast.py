"""The forecast of a training job on this machine, written into its run folder.

    CPU cores   ModelShape (traced once for each architecture) x what `hocket probe` measured
    GPUs        the planner (`jobs.gpu_run`): the probed GPUs, or those of the catalogue
        -> forecast.json, timeline.predicted.json

The prediction exists before the first step, on CPU where the machine was measured before. No
failure to predict fails a run: forecast.json gives the reason.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.jobs import gpu_run
from hocket.jobs.precision import on_cuda
from hocket.spec.capabilities import PRECISIONS
from hocket.spec.cluster import Cluster
from hocket.spec.errors import HocketError, OptionError
from hocket.spec.files import write_text
from hocket.spec.forecast import Forecast
from hocket.spec.layout import Layout
from hocket.spec.links import Links
from hocket.spec.measured import MachineMeasurements
from hocket.spec.model_shape import ModelShape
from hocket.spec.run import RunFolder, RunSpec, TrainOptions
from hocket.spec.run import bucket_mb as bucket_mb_of
from hocket.spec.schedule import Schedule
from hocket.spec.timeline import Timeline
from hocket.spec.units import parse_bytes

if TYPE_CHECKING:
    from hocket.launch import Launcher
    from hocket.planning.machine_forecast import MeasuredMachine

StepForecast = tuple[Forecast, Timeline | None]

Machine = MachineMeasurements | Cluster
"""What a run is predicted for: CPU cores that were measured, or GPUs."""


def forecast_run(spec: RunSpec, cluster: str = "auto") -> Forecast:
    """What a run will take; `why` says why nothing could be predicted.

    Args:
        spec: of the run, its layout with microbatches.
        cluster: `auto` (this machine) or the file that `hocket probe` wrote; on GPUs any cluster.
    """
    return predicted_run(spec, run_target(spec, cluster))[0]


def run_target(spec: RunSpec, cluster: str = "auto") -> Machine | None:
    """What a run is predicted for; None: nothing is known of this machine.

    Raises:
        OptionError: a cluster that cannot be read, or holds no measurements for a run on CPU.
    """
    if on_cuda(spec.options):
        return gpu_run.gpu_cluster(cluster, at_least=spec.layout.world_size)
    return measurements(cluster, "cpu")


def predicted_run(
    spec: RunSpec,
    target: Machine | None,
    *,
    launcher: Launcher | None = None,
    schedule: Schedule | None = None,
    considered: int = 0,
) -> StepForecast:
    """The forecast and the predicted Timeline of one step; never raises for a run that cannot be
    predicted.

    Args:
        target: as of `run_target`.
        launcher: whose ranks may trace a model; None: one is started if the trace is not kept.
        schedule: what will run; None: the layout's.
        considered: how many other layouts are shown with it, of as many ranks or cores at most.
    """
    layout = str(spec.layout)
    if target is None:
        return Forecast.none(layout, UNKNOWN_GPU if on_cuda(spec.options) else UNMEASURED), None
    try:
        if isinstance(target, Cluster):
            return gpu_run.predicted_gpu_run(
                spec, target, launcher=launcher, schedule=schedule, considered=considered
            )
        return _on_cores(spec, target, launcher, schedule, considered)
    except HocketError as error:
        return Forecast.none(layout, error.message), None
    # A run on rented devices must not end because its prediction does: whatever an estimate of a
    # foreign model raises becomes the reason.
    except Exception:
        why = traceback.format_exc(limit=-1).strip().splitlines()[-1]
        return Forecast.none(layout, f"the prediction failed: {why}"), None


UNMEASURED = "this machine has not been measured: hocket probe"
UNKNOWN_GPU = "the catalogue does not have this machine's GPU: hocket probe"


def _on_cores(
    spec: RunSpec,
    measured: MachineMeasurements,
    launcher: Launcher | None,
    schedule: Schedule | None,
    considered: int,
) -> StepForecast:
    from hocket.planning.enumeration import candidate_layouts
    from hocket.planning.machine_choice import evaluate_layouts, with_considered_layouts
    from hocket.planning.machine_forecast import machine_forecast, step_problem

    missing = unmeasured(spec, spec.layout)
    if missing:
        return Forecast.none(str(spec.layout), f"{missing} was not measured here"), None
    machine = run_machine(spec, measured)
    shape = run_shape(spec, launcher)
    bucket_mb = bucket_mb_of(spec.options.bucket_mb, cuda=False, dp=spec.layout.data_degree)
    job = step_problem(shape, spec.layout, spec.workload, schedule=schedule, bucket_mb=bucket_mb)
    found, timeline = machine_forecast(job, machine)
    if considered:
        most = max(spec.layout.world_size, measured.host.cores)
        others = candidate_layouts(shape, spec.workload, most, exchanging_axes(spec))
        rows = evaluate_layouts(
            shape, spec.workload, machine, others, bucket_mb=bucket_mb, shown=considered
        )
        found = with_considered_layouts(found, (one for one, _ in rows), considered)
    return found, timeline


def unmeasured(spec: RunSpec, layout: Layout) -> str:
    """What a run would do that no measurement of a machine prices; empty: nothing."""
    if threads := unmeasured_threads(spec.options):
        return threads
    if spec.workload.dtype not in PRECISIONS:
        return f"matmuls in {spec.workload.dtype}"
    if spec.options.grad_dtype != "fp32":
        return f"gradients in {spec.options.grad_dtype}"
    if spec.options.optimizer != "adamw":
        return f"a step of {spec.options.optimizer}"
    return "activations in host memory" if layout.offloads("activations") else ""


def unmeasured_threads(options: TrainOptions) -> str:
    """CPU ranks that `hocket probe` does not measure, whose ranks compute with one thread; empty:
    it does. Two threads are not twice one, in matmuls or in memory bandwidth."""
    if options.threads == 1 or on_cuda(options):
        return ""
    return f"a rank of {options.threads} threads"


def write_forecast(folder: RunFolder, found: StepForecast) -> None:
    write_text(folder.forecast_file, found[0].to_json())
    if found[1] is not None:
        write_text(predicted_timeline_file(folder), found[1].to_json())


def predicted_timeline_file(folder: RunFolder) -> Path:
    """Where the predicted Timeline of a run lies."""
    return folder.path / "timeline.predicted.json"


def read_forecast(folder: RunFolder) -> StepForecast | None:
    try:
        found = Forecast.from_json(folder.forecast_file.read_text())
    except FileNotFoundError:
        return None
    file = predicted_timeline_file(folder)
    return found, Timeline.from_json(file.read_text()) if file.exists() else None


# --- the machine ---------------------------------------------------------------------------------


def measurements(cluster: str = "auto", device: str = "auto") -> MachineMeasurements | None:
    """What was measured of this machine; None where nothing is kept.

    Raises:
        OptionError: a file that cannot be read or holds no measurements.
    """
    from hocket.jobs import machine

    found = machine.kept(device) if cluster == machine.AUTO else machine.named_cluster(cluster)
    return None if found is None else found.measured


def run_machine(spec: RunSpec, measured: MachineMeasurements) -> MeasuredMachine:
    """The machine's cores as a run uses them.

    Raises:
        OptionError: its GPUs were measured, and not its cores.
    """
    from hocket.cost.measured_speed import at_speed
    from hocket.planning.machine_forecast import MeasuredMachine

    options = spec.options
    if measured.device != "cpu":
        raise OptionError(f"the machine was measured on {measured.device}, the run is on cpu")
    capacity = 0 if options.memory_per_rank is None else int(parse_bytes(options.memory_per_rank))
    return MeasuredMachine(
        measured=at_speed(measured),
        backend=backend_of(options.backend, measured),
        name=measured.host.name,
        capacity=capacity,
        wires=None if options.emulate_links is None else Links.parse(options.emulate_links),
    )


def backend_of(asked: str, measured: MachineMeasurements) -> str:
    """The backend that `auto` comes to on CPU: shared memory where it was measured."""
    if asked != "auto":
        return asked
    known = {curve.backend for curve in measured.curves}
    return "shm" if "shm" in known or not known else sorted(known)[0]


# --- the model -----------------------------------------------------------------------------------


def run_shape(spec: RunSpec, launcher: Launcher | None = None) -> ModelShape:
    """The model's shape in the type it is trained in, with its adapters if it is given some.

    Raises:
        ModelError: it cannot be traced.
    """
    from hocket.cost.adapters import adapted_shape

    return adapted_shape(_plain_shape(spec, launcher), spec)


def _plain_shape(spec: RunSpec, launcher: Launcher | None) -> ModelShape:
    """Traced by a rank; at the size of a microbatch where it depends on that."""
    from hocket.models.shape_cache import traced_size

    found = _kept_shape(spec, launcher, None)
    return _kept_shape(spec, launcher, traced_size(spec)) if found.uneven else found


def _kept_shape(
    spec: RunSpec, launcher: Launcher | None, size: tuple[int, int] | None
) -> ModelShape:
    """Traced by a rank, and kept for the next time."""
    from hocket.models.shape_cache import read_shape, shape_file, write_shape

    file = shape_file(spec, size)
    known = read_shape(file)
    if known is not None:
        return known
    if launcher is None:
        from hocket.launch import Launcher as Started

        with Started("cpu", 1) as started:
            found = _traced(started, spec, size)
    else:
        found = _traced(launcher, spec, size)
    write_shape(file, found)
    return found


def _traced(launcher: Launcher, spec: RunSpec, size: tuple[int, int] | None = None) -> ModelShape:
    heard: list[dict[str, Any]] = []
    launcher.run(
        "hocket.ranks.trace:main",
        1,
        {
            "config": spec.config,
            "dtype": spec.workload.dtype,
            "dropout": spec.options.dropout,
            "model": spec.model,
            "frozen": spec.options.lora_rank is not None,
            "size": size,
        },
        lambda event: heard.append(event) if event["event"] == "shape" else None,
        startup_timeout=300.0,
    )
    event = heard[-1]
    if "error" in event:
        raise OptionError(event["error"])
    return ModelShape.from_json(event["shape"])


# --- choosing ------------------------------------------------------------------------------------


def considered_layouts(
    spec: RunSpec,
    shape: ModelShape,
    machine: MeasuredMachine,
    *,
    legal: Callable[[list[Layout]], list[Layout]],
    shown: int = 12,
    given: Collection[str] = (),
) -> tuple[list[Layout], list[tuple[Forecast, Timeline]]]:
    """The layouts that a machine can run, and forecasts of the best, the fastest that fits first.

    `hocket plan --cluster auto` and `--layout auto` both choose by it.

    Args:
        shape, machine: traced of `spec`, and as a job uses it.
        legal: those of some layouts that the model and the batch allow and that keep what is
            pinned, complete.
        shown: how many are forecast at least.
        given: names of the fields that a layout must keep.
    """
    from hocket.planning.enumeration import candidate_layouts
    from hocket.planning.machine_choice import evaluate_layouts

    measured = machine.measured
    most = max([measured.host.cores, *(curve.world for curve in measured.curves)])
    axes = exchanging_axes(spec, given)

    def allowed(*, saving: bool = False) -> list[Layout]:
        among = candidate_layouts(shape, spec.workload, most, axes, saving=saving)
        return legal([one for one in among if not unmeasured(spec, one)])

    layouts = allowed()
    bucket_mb = bucket_mb_of(spec.options.bucket_mb, cuda=False, dp=spec.layout.data_degree)
    rows = evaluate_layouts(
        shape, spec.workload, machine, layouts,
        otherwise=lambda: allowed(saving=True), bucket_mb=bucket_mb, shown=shown,
    )  # fmt: skip
    return layouts, rows


def best_forecast(
    spec: RunSpec,
    measured: MachineMeasurements,
    given: Iterable[str],
    *,
    legal: Callable[[Layout], Layout | None],
    launcher: Launcher | None = None,
) -> StepForecast:
    """The forecast of the best layout that this machine runs and that keeps what was given.

    Args:
        spec: its layout holds what the user gave with `--layout auto`.
        given: the names of those fields.
        legal: a layout with its microbatches, if the model and the batch allow it.

    Raises:
        HocketError: the model cannot be traced, or nothing fits.
    """
    from hocket.planning.machine_choice import best_of

    machine = run_machine(spec, measured)
    shape = run_shape(spec, launcher)
    names = set(given) & {f.name for f in dataclasses.fields(Layout)}

    given_fields = {name: getattr(spec.layout, name) for name in names}
    _, rows = considered_layouts(
        spec,
        shape,
        machine,
        legal=lambda among: keeping(among, given_fields, legal)[0],
        given=names,
    )
    return best_of(rows, shape, spec.workload)


def exchanging_axes(spec: RunSpec, given: Collection[str] = ()) -> frozenset[str]:
    """Of `cp` and `ep` those under which the model's type was found equal (`catalogue.families`),
    and those that were given."""
    from hocket.catalogue.families import families

    known = families().get(str(spec.config.get("model_type")))
    asked = {"ep" if name == "etp" else name for name in given}
    return frozenset({"cp", "ep"} & {*(known.trains if known else ()), *asked})


SEARCHED = frozenset({"dp", "pp", "cp", "tp", "ep", "etp", "microbatches", "schedule"})
"""Fields of a layout that are searched; any other is as it was given, or its default."""


def keeping(
    among: Iterable[Layout],
    given: Mapping[str, Any],
    legal: Callable[[Layout], Layout | None],
) -> tuple[list[Layout], HocketError | None]:
    """Those of some layouts that are legal with the fields that were given; and the first reason
    for which one is not."""
    found: dict[str, Layout] = {}
    why: HocketError | None = None
    rest = {name: value for name, value in given.items() if name not in SEARCHED}
    for layout in among:
        if any(getattr(layout, name) != given[name] for name in SEARCHED & given.keys()):
            continue
        if layout.num_stages == 1 and given.keys() & {"virtual_stages", "pipeline_split"}:
            continue  # what was given asks for a pipeline
        try:
            one = legal(dataclasses.replace(layout, **rest))
        except HocketError as error:
            why = why or error
            continue
        if one is not None:
            found.setdefault(str(one), one)
    return list(found.values()), why

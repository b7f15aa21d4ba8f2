"""Send the numbers of a run to monitoring systems and experiment trackers. Off by default.

::

    MERGEGATE_METRICS=/var/lib/node_exporter/mergegate.prom      # a text file, for node_exporter's textfile collector
    MERGEGATE_OTEL=1 OTEL_EXPORTER_OTLP_ENDPOINT=http://…:4318   # pushed at the end of each run; extra "otel"

    MERGEGATE_WANDB=acme/releases        # project, or team/project; extra "wandb", which reads its own key
    WANDB_MODE=offline                   # wandb's own: files below .mergegate/wandb, for a later 'wandb sync'

    MERGEGATE_MLFLOW=releases            # an experiment, created if absent; no extra needed
    MLFLOW_TRACKING_URI=https://mlflow.acme.example  # and MLFLOW_TRACKING_TOKEN: MLflow's own variables

Prometheus cannot scrape a process that ends, so each run exports its metrics at its end, from its record in the
history. Gauges describe the last run of each profile and flow, and counters add up over all runs. The text file is
read, updated and replaced in one step. If it cannot be read, its counters restart from zero, which Prometheus handles
like any restart.

Every run is logged to the trackers, whatever its outcome. The publish target ``mlflow`` also registers a model version
for each release. mergegate needs about ten requests. MLflow's own client would pin other versions of half of
mergegate's dependencies.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self
from urllib.parse import urlencode

from mergegate.merge_core.errors import EXIT_CODES, pip_command
from mergegate.merge_core.files import hold_lock
from mergegate.tasks.base.http import TRANSIENT_STATUSES, JsonClient, Unreachable
from mergegate.tasks.release.report import RunRecord

METRICS, OTEL = "MERGEGATE_METRICS", "MERGEGATE_OTEL"
MLFLOW, WANDB = "MERGEGATE_MLFLOW", "MERGEGATE_WANDB"
_MAX_FILE_BYTES = 16 << 20
_MLFLOW_TIMEOUT_S = 20.0  # longest wait at the end of a run
_log = logging.getLogger(__name__)

Labels = tuple[tuple[str, str], ...]


class RunMetric(NamedTuple):
    """A metric and the value that one run gives it."""

    name: str  # without the prefix and, for a counter, without '_total'
    kind: Literal["counter", "gauge"]
    unit: str  # in OpenTelemetry's notation (UCUM)
    description: str
    labels: Mapping[str, str]
    value: float


def run_metrics(record: RunRecord) -> Iterator[RunMetric]:
    """Yield the metrics of a run: increments for counters and new values for gauges."""
    run_labels = {"profile": record.profile, "flow": record.flow}

    def counter(name: str, unit: str, description: str, value: float, **labels: str) -> RunMetric:
        return RunMetric(name, "counter", unit, description, run_labels | labels, value)

    def gauge(name: str, unit: str, description: str, value: float, **labels: str) -> RunMetric:
        return RunMetric(name, "gauge", unit, description, run_labels | labels, value)

    yield counter("runs", "1", "Number of runs that ended, by status.", 1, status=record.status)
    yield counter("run_seconds", "s", "Total duration of all runs.", record.seconds)
    yield counter("made_bytes", "By", "Size of the artifacts that runs added to the store.", record.bytes_made)
    for stage in record.stages:
        yield counter("stage_seconds", "s", "Total duration of all calls of a stage.", stage.seconds, stage=stage.name)
        for outcome, count in (("cached", stage.cached), ("worked", stage.calls - stage.cached)):
            description = "Number of calls of a stage, by outcome."
            yield counter("stage_calls", "1", description, count, stage=stage.name, outcome=outcome)
    yield gauge("last_run_timestamp_seconds", "s", "End of the last run.", record.ended)
    yield gauge("last_run_seconds", "s", "Duration of the last run.", record.seconds)
    for status in dict.fromkeys((*EXIT_CODES, record.status)):
        description = "1 for the status of the last run, 0 for all others."
        yield gauge("last_run", "1", description, float(status == record.status), status=status)
    if record.status == "released":
        yield gauge("last_release_timestamp_seconds", "s", "Time of the last release.", record.ended)
    for score in record.scores:
        guard = {"task": score.task, "reference": score.reference}
        yield gauge("drop_points", "1", "Points by which the merge is below the reference.", score.drop, **guard)
        yield gauge("max_drop_points", "1", "Largest drop that the profile allows.", score.max_drop, **guard)
        if score.merge is not None:
            yield gauge("score_points", "1", "Score of the merge.", score.merge, **guard)
    if record.perplexity is not None:
        description = "Perplexity of the merge divided by that of the better parent."
        yield gauge("perplexity_ratio", "1", description, record.perplexity)


def export_metrics(record: RunRecord, home: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Export the metrics of a run to the destinations that ``environment`` names. It never raises.

    ``home`` is the directory of the project's state, which holds the lock on the text file.
    """
    metrics = list(run_metrics(record))
    try:
        if path := environment.get(METRICS):
            with hold_lock(home / "metrics.lock", required=False):
                write_text_file(Path(path), metrics)
        if environment.get(OTEL, "").lower() not in ("1", "true", "yes"):
            return

        # Send them to the OpenTelemetry collector that ``OTEL_EXPORTER_OTLP_ENDPOINT`` names.
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        except ImportError:
            _log.warning("%s is set, but OpenTelemetry is not installed: %s", OTEL, pip_command("mergegate[otel]"))
            return
        reader = PeriodicExportingMetricReader(OTLPMetricExporter(timeout=10))
        provider = MeterProvider([reader], shutdown_on_exit=False)
        try:
            meter = provider.get_meter("mergegate")
            instruments: dict[str, object] = {}
            for item in metrics:
                create = meter.create_counter if item.kind == "counter" else meter.create_gauge
                if item.name not in instruments:
                    instruments[item.name] = create(f"mergegate.{item.name}", item.unit, item.description)
                instrument = instruments[item.name]
                if item.kind == "counter":
                    instrument.add(item.value, dict(item.labels))  # type: ignore[attr-defined]
                else:
                    instrument.set(item.value, dict(item.labels))  # type: ignore[attr-defined]
        finally:
            provider.shutdown(timeout_millis=15_000)  # sends the metrics
    except Exception as failure:
        _log.warning("could not export the metrics of this run: %s", failure)


def write_text_file(file: Path, metrics: Iterable[RunMetric]) -> None:
    """Add the increments in ``metrics`` to the counters in ``file``, and update its gauges.

    The counters of a damaged file restart from zero. The file is replaced in one step.
    """
    from prometheus_client import CollectorRegistry, write_to_textfile
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.parser import text_string_to_metric_families

    stored: list[Metric] = []
    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError("it is larger than 16 MiB")
        stored = list(text_string_to_metric_families(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, IndexError, OSError) as failure:
        _log.warning("cannot read %s (%s). Its counters restart from zero.", file, failure)

    metrics = list(metrics)
    updated = {(_printable(item.labels["profile"]), item.labels["flow"]) for item in metrics}
    values: dict[str, dict[Labels, float]] = {}
    kinds: dict[str, tuple[str, str]] = {item.name: (item.kind, item.description) for item in metrics}
    for family in stored:
        if not family.name.startswith("mergegate_") or family.type not in ("counter", "gauge"):
            continue
        name, kind = family.name.removeprefix("mergegate_"), family.type
        kinds.setdefault(name, (kind, family.documentation))
        samples = {tuple(sorted(sample.labels.items())): float(sample.value) for sample in family.samples}
        for labels, value in samples.items():
            series = (dict(labels).get("profile", ""), dict(labels).get("flow", ""))
            # Gauges of an earlier run of the same profile and flow are outdated, except for the time of the last
            # release.
            if kind == "counter" or series not in updated or name.startswith("last_release"):
                values.setdefault(name, {})[labels] = value
    for item in metrics:
        labels = tuple(sorted((label, _printable(text)) for label, text in item.labels.items()))
        start = values.get(item.name, {}).get(labels, 0.0) if item.kind == "counter" else 0.0
        values.setdefault(item.name, {})[labels] = start + item.value

    class _Collector:
        def collect(self) -> Iterator[Metric]:
            for name, samples in values.items():
                kind, description = kinds[name]
                family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
                label_names = sorted({label for labels in samples for label, _ in labels})
                metric = family(f"mergegate_{name}", description, labels=label_names)
                for labels, value in samples.items():
                    metric.add_metric([dict(labels).get(label, "") for label in label_names], value)
                yield metric

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector())
    write_to_textfile(str(file), registry)


def _printable(text: str) -> str:
    """Replace characters that some parsers treat as the end of a line."""
    return "".join(character if character.isprintable() else "?" for character in text)


def tracked_numbers(record: RunRecord) -> dict[str, float]:
    """Return the numbers of a run (points, ratios, seconds, bytes). Trackers group the names by their first part."""
    numbers = {"seconds": record.seconds, "bytes_merged": float(record.bytes_merged)}
    if record.perplexity is not None:
        numbers["perplexity_ratio"] = record.perplexity
    for score in record.scores:
        if score.merge is not None:
            numbers[f"score/{score.task}"] = score.merge
        numbers |= {f"drop/{score.task}": score.drop, f"drop_low/{score.task}": score.low}
        numbers |= {f"drop_high/{score.task}": score.high}
    return numbers


def export_to_trackers(record: RunRecord, home: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Send the numbers of a run to each tracker that ``environment`` names. It never raises.

    ``home`` is the directory of the project's state. wandb stores its files below it.
    """
    if destination := environment.get(WANDB, ""):
        try:
            team, _, project = destination.rpartition("/")
            wandb: Any = importlib.import_module("wandb")
            parents = {parent.name: f"{parent.ref}@{parent.revision or parent.digest}" for parent in record.parents}
            config = {"profile": record.profile, "method": record.method, "recipe": record.recipe, "parents": parents}
            run = wandb.init(
                project=project,
                entity=team or None,
                name=f"{record.profile} {record.version or record.status}",
                job_type=record.flow,
                dir=str(home),
                config=config,
                settings=wandb.Settings(silent=True, disable_git=True, disable_code=True, init_timeout=30),
            )
            run.log(tracked_numbers(record))
            run.summary.update({"status": record.status, "message": record.message, "release": record.version or ""})
            is_good = record.status in ("released", "passed", "nothing new", "promoted", "waiting")
            run.finish(exit_code=0 if is_good else 1)
        except ImportError:
            _log.warning("%s is set, but wandb is not installed: %s", WANDB, pip_command("mergegate[wandb]"))
        except Exception as failure:
            _log.warning("could not send this run to Weights & Biases: %s", failure)
    if experiment := environment.get(MLFLOW, "").strip():
        address = environment.get("MLFLOW_TRACKING_URI", "").strip()
        if not address.startswith(("http://", "https://")):
            problem = "MLFLOW_TRACKING_URI is not an http(s) address. This run is not sent to MLflow."
            _log.warning("%s is set, but %s", MLFLOW, problem)
            return
        try:
            token = environment.get("MLFLOW_TRACKING_TOKEN", "")
            with MlflowClient(address, _MLFLOW_TIMEOUT_S, token) as client:
                _log_to_mlflow(client, experiment, record)
        except MlflowError as failure:
            _log.warning("could not send this run to MLflow: %s", failure)
        except Exception as failure:
            _log.warning("could not send this run to MLflow: %s: %s", type(failure).__name__, failure)


def _log_to_mlflow(client: MlflowClient, experiment: str, record: RunRecord) -> None:
    experiment_id = client.experiment_id(experiment)
    if not experiment_id:
        # If another process creates the experiment first, this request changes nothing and the next one finds it.
        client.post("experiments/create", {"name": experiment})
        experiment_id = client.experiment_id(experiment)
    if not experiment_id:
        raise MlflowError(f"the experiment {experiment!r} does not exist, and the server did not create it")

    now = round(time.time() * 1000)
    tags = {"status": record.status, "message": record.message, "release": record.version or "", "run": record.run}
    tags |= {"flow": record.flow, "at": record.location}
    body = {
        "experiment_id": experiment_id,
        "run_name": f"{record.profile} {record.version or record.status}",
        "start_time": now - round(1000 * record.seconds),
        "tags": tag_entries({f"mergegate.{key}": value for key, value in tags.items()}),
    }
    run = str(member(client.post("runs/create", body), "run", "info", "run_id"))
    if not run:
        raise MlflowError("the server returned no ID for the new run")

    params = {"profile": record.profile, "method": record.method, "recipe": record.recipe}
    params |= {f"parent.{item.name}": f"{item.ref}@{item.revision or item.digest}" for item in record.parents}
    params |= {f"set.{key}": value for key, _, value in (item.partition("=") for item in record.overrides)}
    metrics = metric_entries(tracked_numbers(record), now)
    client.post("runs/log-batch", {"run_id": run, "metrics": metrics, "params": param_entries(params)})
    good = record.status in ("released", "passed", "nothing new")
    status = "FINISHED" if good else "KILLED" if record.status == "interrupted" else "FAILED"
    client.post("runs/update", {"run_id": run, "status": status, "end_time": now})


_MAX_PARAM, _MAX_TAG, _MAX_KEY = 6000, 5000, 250  # MLflow's limits, in characters


class MlflowError(Exception):
    """The server did not answer (``status`` is None), or rejected a request. The message gives the reason."""

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status

    @property
    def is_transient(self) -> bool:
        """Whether the request may succeed if it is repeated."""
        return self.status is None or self.status in TRANSIENT_STATUSES


class MlflowClient:
    """Client of one MLflow server. As a context manager, it closes its connection.

    ``timeout`` is the longest time without a byte, in seconds. ``token`` is a bearer token. A request raises
    MlflowError if the server does not answer or rejects it.
    """

    def __init__(self, url: str, timeout: float, token: str = "") -> None:
        self._http = JsonClient(url, timeout, token, connections=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._http.close()

    def get(self, path: str, **parameters: str) -> dict[str, Any]:
        """Send GET and return the answer, or an empty dict if the requested object does not exist."""
        return self._request(f"{path}?{urlencode(parameters)}", None)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send POST and return the answer, or an empty dict if the object exists already."""
        return self._request(path, body)

    def experiment_id(self, name: str) -> str:
        """Return the ID of an experiment, or an empty string if it does not exist."""
        return str(member(self.get("experiments/get-by-name", experiment_name=name), "experiment", "experiment_id"))

    def _request(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        try:
            answer = self._http.request(f"/api/2.0/mlflow/{path}", body)
        except Unreachable as error:
            raise MlflowError(str(error)) from None
        content = answer.body if isinstance(answer.body, Mapping) else {}
        if answer.ok:
            return dict(content)
        is_missing_alias = path.startswith("registered-models/alias?") and answer.status in (400, 404)
        if is_missing_alias or content.get("error_code") in ("RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"):
            return {}
        raise MlflowError(answer.complaint, answer.status)


def member(value: object, *path: str) -> Any:
    """Return the value at the nested keys ``path`` of an answer, or an empty string if it is missing."""
    for key in path:
        value = value.get(key, "") if isinstance(value, Mapping) else ""
    return value


def metric_entries(numbers: Mapping[str, float], timestamp_ms: int) -> list[dict[str, object]]:
    """Return metrics in MLflow's format, with invalid characters in their names replaced."""
    return [
        {"key": mlflow_key(name), "value": number, "timestamp": timestamp_ms, "step": 0}
        for name, number in numbers.items()
    ]


def param_entries(params: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the non-empty parameters of a run in MLflow's format, cut to its length limits."""
    return [{"key": mlflow_key(key), "value": value[:_MAX_PARAM]} for key, value in params.items() if value]


def tag_entries(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the non-empty tags of a run or a model version in MLflow's format, cut to its length limit."""
    return [{"key": key, "value": value[:_MAX_TAG]} for key, value in tags.items() if value]


def mlflow_key(name: str) -> str:
    """Return ``name`` cut to MLflow's length limit, with each character that MLflow rejects replaced by ``_``."""
    accepted = (character if character.isalnum() or character in "_-. /" else "_" for character in name)
    return "".join(accepted)[:_MAX_KEY]

"""Export metrics about runs for monitoring, as a Prometheus text file or through OpenTelemetry. Off by default.

::

    MERGEGATE_METRICS=/var/lib/node_exporter/mergegate.prom      # a text file, for node_exporter's textfile collector
    MERGEGATE_OTEL=1 OTEL_EXPORTER_OTLP_ENDPOINT=http://…:4318   # pushed at the end of each run; extra "otel"

Prometheus cannot scrape a process that ends, so each run exports its metrics at its end, from its record in the
history. Gauges describe the last run of each profile and flow, and counters add up over all runs. The text file is
read, updated and replaced in one step. If it cannot be read, its counters restart from zero, which Prometheus handles
like any restart.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from mergegate.merge_core.errors import EXIT_CODES, pip_command
from mergegate.merge_core.files import hold_lock
from mergegate.tasks.release.report import RunRecord

METRICS, OTEL = "MERGEGATE_METRICS", "MERGEGATE_OTEL"
_MAX_FILE_BYTES = 16 << 20
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

    Raises:
        OSError: The file cannot be written.
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

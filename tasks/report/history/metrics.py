"""Export numbers about runs for monitoring, as a Prometheus text file or through OpenTelemetry. Off by default.

::

    MERGEGATE_METRICS=/var/lib/node_exporter/mergegate.prom      # a text file, for node_exporter's textfile collector
    MERGEGATE_OTEL=1 OTEL_EXPORTER_OTLP_ENDPOINT=http://…:4318   # pushed at the end of each run; extra "otel"

A run is a process that ends, so Prometheus cannot scrape it. It exports its numbers at the end instead, from its line
in the history. Gauges describe the last run of each profile and flow, and counters add up over all runs. The file is
read, updated and replaced in one step. If it cannot be read, it is started again: its counters restart from zero, which
Prometheus handles like any restart.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from mergegate.merge_core.errors import EXIT_CODES
from mergegate.merge_core.files import locked
from mergegate.tasks.report.history.record import RunRecord

METRICS, OTEL = "MERGEGATE_METRICS", "MERGEGATE_OTEL"
_STATUSES = tuple(EXIT_CODES)
_MAX_FILE_BYTES = 16 << 20  # largest file to read, in bytes
_log = logging.getLogger(__name__)


class RunNumber(NamedTuple):
    """One number about one run."""

    name: str  # without the prefix and, for a counter, without '_total'
    kind: Literal["counter", "gauge"]
    unit: str  # in OpenTelemetry's notation (UCUM)
    says: str
    labels: Mapping[str, str]
    value: float


def numbers_of(record: RunRecord) -> Iterator[RunNumber]:
    """Yield the increments of the counters and the new values of the gauges after a run."""
    base = {"profile": record.profile, "flow": record.flow}
    yield RunNumber("runs", "counter", "1", "Runs that ended, by how.", base | {"status": record.status}, 1)
    yield RunNumber("run_seconds", "counter", "s", "Time that runs took.", base, record.seconds)
    yield RunNumber("made_bytes", "counter", "By", "Artifacts that the store lacked before.", base, record.bytes_made)
    for stage in record.stages:
        stage_labels = base | {"stage": stage.name}
        yield RunNumber(
            "stage_seconds", "counter", "s", "Time that calls of a stage took.", stage_labels, stage.seconds
        )
        for outcome, count in (("cached", stage.cached), ("worked", stage.calls - stage.cached)):
            yield RunNumber(
                "stage_calls", "counter", "1", "Calls of a stage, by how.", stage_labels | {"outcome": outcome}, count
            )
    yield RunNumber("last_run_timestamp_seconds", "gauge", "s", "When the last run ended.", base, record.ended)
    yield RunNumber("last_run_seconds", "gauge", "s", "Time that the last run took.", base, record.seconds)
    for status in dict.fromkeys((*_STATUSES, record.status)):
        labels = base | {"status": status}
        yield RunNumber("last_run", "gauge", "1", "How the last run ended: 1.", labels, float(status == record.status))
    if record.status == "released":
        yield RunNumber(
            "last_release_timestamp_seconds", "gauge", "s", "When it was last released.", base, record.ended
        )
    for score in record.scores:
        guard_labels = base | {"task": score.task, "reference": score.reference}
        yield RunNumber("drop_points", "gauge", "1", "Points below the reference.", guard_labels, score.drop)
        yield RunNumber(
            "max_drop_points", "gauge", "1", "Points that the profile allows.", guard_labels, score.max_drop
        )
        if score.merge is not None:
            yield RunNumber("score_points", "gauge", "1", "Score of the merge.", guard_labels, score.merge)
    if record.perplexity is not None:
        yield RunNumber("perplexity_ratio", "gauge", "1", "Over that of the better parent.", base, record.perplexity)


def export_metrics(record: RunRecord, home: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Export the numbers of a run to the configured destinations.

    This never raises an error, so it cannot fail the run.

    Args:
        record: Record of the run.
        home: Directory of the project's state, which holds the lock on the file.
        environment: Environment variables that name the destinations.
    """
    numbers = list(numbers_of(record))
    try:
        if path := environment.get(METRICS):
            with locked(home / "metrics.lock", required=False):
                write_text_file(Path(path), numbers)
        if environment.get(OTEL, "").lower() in ("1", "true", "yes"):
            _push(numbers)
    except Exception as failure:
        _log.warning("numbers for operators were not written: %s", failure)


def write_text_file(file: Path, numbers: Iterable[RunNumber]) -> None:
    """Add ``numbers`` to the numbers in ``file``, and replace the file.

    Raises:
        OSError: If the file cannot be written.
    """
    from prometheus_client import CollectorRegistry, write_to_textfile
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

    numbers = list(numbers)
    previous = _read(file)
    updated = {(_printable(item.labels["profile"]), item.labels["flow"]) for item in numbers}
    values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    kinds: dict[str, tuple[str, str]] = {item.name: (item.kind, item.says) for item in numbers}
    for name, (kind, says, samples) in previous.items():
        kinds.setdefault(name, (kind, says))
        for labels, value in samples.items():
            series = (dict(labels).get("profile", ""), dict(labels).get("flow", ""))
            # Gauges of an earlier run of the same profile and flow are outdated, except for the time of the last
            # release.
            if kind == "counter" or series not in updated or name.startswith("last_release"):
                values.setdefault(name, {})[labels] = value
    for item in numbers:
        labels = tuple(sorted((label, _printable(text)) for label, text in item.labels.items()))
        start = values.get(item.name, {}).get(labels, 0.0) if item.kind == "counter" else 0.0
        values.setdefault(item.name, {})[labels] = start + item.value

    class _Values:
        def collect(self) -> Iterator[Metric]:
            for name, samples in values.items():
                kind, says = kinds[name]
                family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
                names = sorted({label for labels in samples for label, _ in labels})
                metric = family(f"mergegate_{name}", says, labels=names)
                for labels, value in samples.items():
                    metric.add_metric([dict(labels).get(label, "") for label in names], value)
                yield metric

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Values())
    write_to_textfile(str(file), registry)


def _printable(text: str) -> str:
    """Replace characters that some parsers treat as the end of a line."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _read(file: Path) -> dict[str, tuple[str, str, dict[tuple[tuple[str, str], ...], float]]]:
    """Return the kind, the help text and the values by labels of each metric.

    Metrics of other programs are skipped. A damaged file gives an empty result.
    """
    from prometheus_client.parser import text_string_to_metric_families

    metrics: dict[str, tuple[str, str, dict[tuple[tuple[str, str], ...], float]]] = {}
    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError("too large to be ours")
        for family in text_string_to_metric_families(file.read_text(encoding="utf-8")):
            samples = {tuple(sorted(sample.labels.items())): float(sample.value) for sample in family.samples}
            if family.name.startswith("mergegate_") and family.type in ("counter", "gauge"):
                metrics[family.name.removeprefix("mergegate_")] = (family.type, family.documentation, samples)
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, IndexError, OSError) as failure:
        _log.warning("%s cannot be read (%s): its counters begin anew", file, failure)
        return {}
    return metrics


def _push(numbers: Iterable[RunNumber]) -> None:
    """Send the numbers to the collector that OpenTelemetry's own variables (``OTEL_EXPORTER_OTLP_ENDPOINT``) name."""
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    except ImportError:
        _log.warning('%s is set, but OpenTelemetry is not installed: pip install "mergegate[otel]"', OTEL)
        return
    provider = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter(timeout=10))], shutdown_on_exit=False)
    try:
        meter = provider.get_meter("mergegate")
        instruments: dict[str, object] = {}
        for item in numbers:
            create = meter.create_counter if item.kind == "counter" else meter.create_gauge
            if item.name not in instruments:
                instruments[item.name] = create(f"mergegate.{item.name}", item.unit, item.says)
            instrument = instruments[item.name]
            if item.kind == "counter":
                instrument.add(item.value, dict(item.labels))  # type: ignore[attr-defined]
            else:
                instrument.set(item.value, dict(item.labels))  # type: ignore[attr-defined]
    finally:
        provider.shutdown(timeout_millis=15_000)  # sends the numbers

"""Numbers about runs for those who watch many machines: as a Prometheus text file, or by OpenTelemetry. Off by default.

::

    MERGEGATE_METRICS=/var/lib/node_exporter/mergegate.prom      # a text file, for node_exporter's textfile collector
    MERGEGATE_OTEL=1 OTEL_EXPORTER_OTLP_ENDPOINT=http://…:4318   # pushed at the end of each run; extra "otel"

A run is a process that ends, so nobody can scrape it: what it has to say it says at its end, from its line in the
history. Gauges tell of the last run of each profile and flow, counters add up over all runs; the file is read, added to
and replaced in one step. One that cannot be read is begun anew: its counters start from nothing, which Prometheus
knows from any restart.
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
_LARGEST = 16 << 20  # bytes of a file that we would read
_log = logging.getLogger(__name__)


class RunNumber(NamedTuple):
    """One number about one run."""

    name: str  # without the prefix and, of a counter, without '_total'
    kind: Literal["counter", "gauge"]
    unit: str  # as OpenTelemetry (UCUM) writes it
    says: str
    labels: Mapping[str, str]
    value: float


def numbers_of(record: RunRecord) -> Iterator[RunNumber]:
    """What a run adds to the counters, and what the gauges say after it."""
    of = {"profile": record.profile, "flow": record.flow}
    yield RunNumber("runs", "counter", "1", "Runs that ended, by how.", of | {"status": record.status}, 1)
    yield RunNumber("run_seconds", "counter", "s", "Time that runs took.", of, record.seconds)
    yield RunNumber("made_bytes", "counter", "By", "Artifacts that the store lacked before.", of, record.bytes_made)
    for stage in record.stages:
        named = of | {"stage": stage.name}
        yield RunNumber("stage_seconds", "counter", "s", "Time that calls of a stage took.", named, stage.seconds)
        for how, count in (("cached", stage.cached), ("worked", stage.calls - stage.cached)):
            yield RunNumber("stage_calls", "counter", "1", "Calls of a stage, by how.", named | {"outcome": how}, count)
    yield RunNumber("last_run_timestamp_seconds", "gauge", "s", "When the last run ended.", of, record.ended)
    yield RunNumber("last_run_seconds", "gauge", "s", "Time that the last run took.", of, record.seconds)
    for status in dict.fromkeys((*_STATUSES, record.status)):
        labels = of | {"status": status}
        yield RunNumber("last_run", "gauge", "1", "How the last run ended: 1.", labels, float(status == record.status))
    if record.status == "released":
        yield RunNumber("last_release_timestamp_seconds", "gauge", "s", "When it was last released.", of, record.ended)
    for score in record.scores:
        on = of | {"task": score.task, "reference": score.reference}
        yield RunNumber("drop_points", "gauge", "1", "Points below the reference.", on, score.drop)
        yield RunNumber("max_drop_points", "gauge", "1", "Points that the profile allows.", on, score.max_drop)
        if score.merge is not None:
            yield RunNumber("score_points", "gauge", "1", "Score of the merge.", on, score.merge)
    if record.perplexity is not None:
        yield RunNumber("perplexity_ratio", "gauge", "1", "Over that of the better parent.", of, record.perplexity)


def export_metrics(record: RunRecord, home: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Say it where somebody asked for it. Never an error of the run.

    Args:
        home: The project's state, where the lock on the file lies.
    """
    numbers = list(numbers_of(record))
    try:
        if file := environment.get(METRICS):
            with locked(home / "metrics.lock", required=False):
                write_text_file(Path(file), numbers)
        if environment.get(OTEL, "").lower() in ("1", "true", "yes"):
            _push(numbers)
    except Exception as failure:
        _log.warning("numbers for operators were not written: %s", failure)


def write_text_file(file: Path, numbers: Iterable[RunNumber]) -> None:
    """Add ``numbers`` to those that stand in ``file``, and replace it.

    Raises:
        OSError: when a disk does not let it be written.
    """
    from prometheus_client import CollectorRegistry, write_to_textfile
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

    numbers = list(numbers)
    known = _read(file)
    told = {(_printable(one.labels["profile"]), one.labels["flow"]) for one in numbers}
    values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    kinds: dict[str, tuple[str, str]] = {one.name: (one.kind, one.says) for one in numbers}
    for name, (kind, says, samples) in known.items():
        kinds.setdefault(name, (kind, says))
        for labels, value in samples.items():
            whose = (dict(labels).get("profile", ""), dict(labels).get("flow", ""))
            # What a gauge said of an earlier run of the same is over; but a release stays one.
            if kind == "counter" or whose not in told or name.startswith("last_release"):
                values.setdefault(name, {})[labels] = value
    for one in numbers:
        labels = tuple(sorted((label, _printable(text)) for label, text in one.labels.items()))
        added = values.get(one.name, {}).get(labels, 0.0) if one.kind == "counter" else 0.0
        values.setdefault(one.name, {})[labels] = added + one.value

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
    """A label that every parser takes for one: what ends a line in some does not in others."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _read(file: Path) -> dict[str, tuple[str, str, dict[tuple[tuple[str, str], ...], float]]]:
    """By name: kind, help, and the value of each set of labels. Of what is not ours, or damaged: nothing."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, tuple[str, str, dict[tuple[tuple[str, str], ...], float]]] = {}
    try:
        if file.stat().st_size > _LARGEST:
            raise ValueError("too large to be ours")
        for family in text_string_to_metric_families(file.read_text(encoding="utf-8")):
            samples = {tuple(sorted(one.labels.items())): float(one.value) for one in family.samples}
            if family.name.startswith("mergegate_") and family.type in ("counter", "gauge"):
                found[family.name.removeprefix("mergegate_")] = (family.type, family.documentation, samples)
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, IndexError, OSError) as failure:
        _log.warning("%s cannot be read (%s): its counters begin anew", file, failure)
        return {}
    return found


def _push(numbers: Iterable[RunNumber]) -> None:
    """Send them to the collector that OpenTelemetry's own variables name (``OTEL_EXPORTER_OTLP_ENDPOINT``)."""
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
        made: dict[str, object] = {}
        for one in numbers:
            make = meter.create_counter if one.kind == "counter" else meter.create_gauge
            if one.name not in made:
                made[one.name] = make(f"mergegate.{one.name}", one.unit, one.says)
            instrument = made[one.name]
            if one.kind == "counter":
                instrument.add(one.value, dict(one.labels))  # type: ignore[attr-defined]
            else:
                instrument.set(one.value, dict(one.labels))  # type: ignore[attr-defined]
    finally:
        provider.shutdown(timeout_millis=15_000)  # which sends it

"""Test the export of a run's numbers to monitoring systems and to Weights & Biases, which never fails the run."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders.results import build
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from mergegate.tasks.release.report import RunRecord, RunScore, RunStage
from mergegate.tasks.release.telemetry.exports import (
    METRICS,
    OTEL,
    export_metrics,
    export_to_trackers,
    run_metrics,
    tracked_numbers,
    write_text_file,
)


def parse_text_file(file: Path) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return every sample in a file, parsed by Prometheus' own parser."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(file.read_text())
        for sample in family.samples
    }


def run(status: str = "released", profile: str = "demo", seconds: float = 2.0) -> RunRecord:
    stage = RunStage(name="evaluate", seconds=1.5, calls=3, cached=1, status="made")
    score = build(RunScore, task="copy", merge=99.0, drop=1.0, low=0, high=2)
    ran = {"profile": profile, "status": status, "ended": 1_700_000_000.0, "seconds": seconds, "bytes_made": 100}
    return build(RunRecord, **ran, stages=(stage,), scores=(score,))


NAMES = st.text(min_size=1, max_size=20).map(lambda text: "".join(one if one.isprintable() else "?" for one in text))
DAMAGE = [b"", b"\xff\xfe\x00", b"mergegate_runs_total{ 1\n", b"# TYPE x counter\nx nan nan nan\n"]


class TestTextFile:
    def test_counters_add_up_over_runs_and_gauges_describe_the_last_run(self, tmp_path: Path) -> None:
        file = tmp_path / "mergegate.prom"
        for record in (run(), run("refused", seconds=3.0), run("refused", profile="other")):
            export_metrics(record, tmp_path, {METRICS: str(file)})
        labels = {("profile", "demo"), ("flow", "release")}
        samples = parse_text_file(file)
        assert samples["mergegate_runs_total", frozenset({*labels, ("status", "released")})] == 1
        assert samples["mergegate_runs_total", frozenset({*labels, ("status", "refused")})] == 1
        assert samples["mergegate_run_seconds_total", frozenset(labels)] == 5
        calls = {*labels, ("stage", "evaluate")}
        assert samples["mergegate_stage_calls_total", frozenset({*calls, ("outcome", "cached")})] == 2
        assert samples["mergegate_stage_calls_total", frozenset({*calls, ("outcome", "worked")})] == 4
        assert samples["mergegate_made_bytes_total", frozenset(labels)] == 200
        assert samples["mergegate_last_run", frozenset({*labels, ("status", "refused")})] == 1
        assert samples["mergegate_last_run", frozenset({*labels, ("status", "released")})] == 0
        assert samples["mergegate_last_run_seconds", frozenset(labels)] == 3
        assert samples["mergegate_last_release_timestamp_seconds", frozenset(labels)] == 1_700_000_000
        guard = frozenset({*labels, ("task", "copy"), ("reference", "base")})
        assert (samples["mergegate_score_points", guard], samples["mergegate_drop_points", guard]) == (99, 1)

    def test_a_removed_task_loses_its_score(self, tmp_path: Path) -> None:
        file = tmp_path / "m.prom"
        write_text_file(file, run_metrics(run()))
        write_text_file(file, run_metrics(run().model_copy(update={"scores": ()})))
        assert not [name for name, _ in parse_text_file(file) if "score" in name]

    @pytest.mark.story
    @given(st.lists(st.tuples(NAMES, st.sampled_from(["released", "refused"])), min_size=1, max_size=6))
    @settings(max_examples=25)
    def test_every_run_is_counted_once_for_any_profile_name(
        self, tmp_path_factory: pytest.TempPathFactory, runs: list[tuple[str, str]]
    ) -> None:
        file = tmp_path_factory.mktemp("m") / "m.prom"
        for name, status in runs:
            write_text_file(file, run_metrics(run(status, profile=name)))
        counted = {
            labels: value for (name, labels), value in parse_text_file(file).items() if name == "mergegate_runs_total"
        }
        assert sum(counted.values()) == len(runs)
        assert {dict(labels)["profile"] for labels in counted} == {name for name, _ in runs}

    def test_a_line_break_in_a_name_does_not_end_the_line(self, tmp_path: Path) -> None:
        write_text_file(tmp_path / "m.prom", run_metrics(run(profile='a\r\n\u2028"} 7\nmergegate_runs_total 9')))
        assert len([name for name, _ in parse_text_file(tmp_path / "m.prom") if name == "mergegate_runs_total"]) == 1

    @pytest.mark.parametrize("damage", DAMAGE)
    def test_a_damaged_file_is_replaced(self, tmp_path: Path, damage: bytes) -> None:
        file = tmp_path / "m.prom"
        file.write_bytes(damage)
        export_metrics(run(), tmp_path, {METRICS: str(file)})
        assert any(name == "mergegate_runs_total" for name, _ in parse_text_file(file))

    def test_no_temporary_file_remains(self, tmp_path: Path) -> None:
        export_metrics(run(), tmp_path, {METRICS: str(tmp_path / "m.prom")})
        assert [path.name for path in tmp_path.glob("m.prom*")] == ["m.prom"]

    def test_nothing_is_written_unless_configured(self, tmp_path: Path) -> None:
        export_metrics(run(), tmp_path, {})
        assert not list(tmp_path.iterdir())

    def test_an_unwritable_path_logs_a_warning(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            export_metrics(run(), tmp_path, {METRICS: str(tmp_path / "missing" / "m.prom")})
        assert "could not export the metrics" in caplog.text

    def test_a_suite_has_a_drop_but_no_score(self, tmp_path: Path) -> None:
        suite = build(RunScore, task="mean", drop=1.0, low=0, high=2)
        record = run().model_copy(update={"scores": (suite,), "perplexity": 1.5})
        write_text_file(tmp_path / "m.prom", run_metrics(record))
        values = {name: value for (name, _), value in parse_text_file(tmp_path / "m.prom").items()}
        assert (values["mergegate_drop_points"], values["mergegate_perplexity_ratio"]) == (1, 1.5)
        assert "mergegate_score_points" not in values


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """Run an OpenTelemetry collector on loopback. Yield its URL and the bodies it received."""
    received: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.story
def test_an_opentelemetry_collector_receives_the_same_metrics(
    tmp_path: Path, collector: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    address, received = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    export_metrics(run(), tmp_path, {OTEL: "1"})
    request = ExportMetricsServiceRequest.FromString(received[-1])
    metrics = {one.name: one for scope in request.resource_metrics[0].scope_metrics for one in scope.metrics}
    assert {one.name for one in run_metrics(run())} == {name.removeprefix("mergegate.") for name in metrics}
    calls = {
        {label.key: label.value.string_value for label in point.attributes}["outcome"]: point.as_double or point.as_int
        for point in metrics["mergegate.stage_calls"].sum.data_points
    }
    assert calls == {"cached": 1, "worked": 2}


# --- Weights & Biases

RECORD = build(
    RunRecord,
    seconds=61,
    status="refused",
    message="demo is not released",
    perplexity=1.01,
    scores=(
        build(RunScore, task="mean of 2", drop=1.5, low=1, high=2),
        build(RunScore, task="gsm8k", merge=51.5, drop=2.5, low=1, high=4, outcome="fail"),
    ),
)


def test_every_guard_becomes_grouped_numbers() -> None:
    suite = {"drop/mean of 2": 1.5, "drop_low/mean of 2": 1, "drop_high/mean of 2": 2}
    task = {"score/gsm8k": 51.5, "drop/gsm8k": 2.5, "drop_low/gsm8k": 1, "drop_high/gsm8k": 4}
    assert tracked_numbers(RECORD) == {"seconds": 61, "bytes_merged": 0, "perplexity_ratio": 1.01, **suite, **task}


def test_wandb_is_not_imported_unless_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    export_to_trackers(RECORD, tmp_path, {})


def test_a_missing_or_failing_wandb_logs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setitem(sys.modules, "wandb", None)
    export_to_trackers(RECORD, tmp_path, {"MERGEGATE_WANDB": "acme/releases"})
    assert "pip install 'mergegate[wandb]'" in caplog.text

    def refuse(**_: Any) -> None:
        raise RuntimeError("no key")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=refuse, Settings=dict))
    export_to_trackers(RECORD, tmp_path, {"MERGEGATE_WANDB": "releases"})
    assert "could not send this run to Weights & Biases: no key" in caplog.text


@pytest.mark.story
def test_wandb_writes_the_run_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="an extra: pip install 'mergegate[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    export_to_trackers(RECORD, tmp_path, {"MERGEGATE_WANDB": "acme/releases"})
    wandb.teardown()  # the process that wandb starts writes when it ends
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = written.read_bytes()
    assert b"score/gsm8k" in content
    assert b"demo is not released" in content

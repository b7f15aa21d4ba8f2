"""Test the exported run metrics: monitoring systems receive the numbers in the history."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from history_samples import nights
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from mergegate.tasks.report import RunRecord, RunScore, RunStage
from mergegate.tasks.report.history.metrics import METRICS, OTEL, export_metrics, numbers_of, write_text_file


def read(file: Path) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return every sample in a file, parsed by Prometheus' own parser."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(file.read_text())
        for sample in family.samples
    }


def run(status: str = "released", profile: str = "demo", seconds: float = 2.0, cached: int = 1) -> RunRecord:
    return RunRecord(
        run="r",
        flow="release",
        profile=profile,
        ended=1_700_000_000.0,
        seconds=seconds,
        status=status,
        message="",
        stages=(RunStage(name="evaluate", seconds=1.5, calls=3, cached=cached, status="made"),),
        scores=(
            RunScore(
                task="copy", reference="base", merge=99.0, drop=1.0, low=0, high=2, max_drop=3, margin=3, outcome="pass"
            ),
        ),
        bytes_made=100,
    )


NAMES = st.text(min_size=1, max_size=20).map(lambda text: "".join(one if one.isprintable() else "?" for one in text))
DAMAGE = [b"", b"\xff\xfe\x00", b"mergegate_runs_total{ 1\n", b"# TYPE x counter\nx nan nan nan\n"]


class TestTextFile:
    def test_counters_add_up_over_runs_and_gauges_tell_of_the_last(self, tmp_path: Path) -> None:
        file = tmp_path / "mergegate.prom"
        for one in (run(), run("refused", seconds=3.0), run("refused", profile="other")):
            export_metrics(one, tmp_path, {METRICS: str(file)})
        of = {("profile", "demo"), ("flow", "release")}
        found = read(file)
        assert found["mergegate_runs_total", frozenset({*of, ("status", "released")})] == 1
        assert found["mergegate_runs_total", frozenset({*of, ("status", "refused")})] == 1
        assert found["mergegate_run_seconds_total", frozenset(of)] == 5
        calls = {*of, ("stage", "evaluate")}
        assert found["mergegate_stage_calls_total", frozenset({*calls, ("outcome", "cached")})] == 2
        assert found["mergegate_stage_calls_total", frozenset({*calls, ("outcome", "worked")})] == 4
        assert found["mergegate_made_bytes_total", frozenset(of)] == 200
        assert found["mergegate_last_run", frozenset({*of, ("status", "refused")})] == 1
        assert found["mergegate_last_run", frozenset({*of, ("status", "released")})] == 0
        assert found["mergegate_last_run_seconds", frozenset(of)] == 3
        assert found["mergegate_last_release_timestamp_seconds", frozenset(of)] == 1_700_000_000
        on = frozenset({*of, ("task", "copy"), ("reference", "base")})
        assert (found["mergegate_score_points", on], found["mergegate_drop_points", on]) == (99, 1)

    def test_a_task_that_is_gone_has_no_score_any_more(self, tmp_path: Path) -> None:
        file = tmp_path / "m.prom"
        write_text_file(file, numbers_of(run()))
        write_text_file(file, numbers_of(run().model_copy(update={"scores": ()})))
        assert not [name for name, _ in read(file) if "score" in name]

    @given(st.lists(st.tuples(NAMES, st.sampled_from(["released", "refused"])), min_size=1, max_size=6))
    @settings(max_examples=25)
    def test_whatever_names_say_every_run_is_counted_once(
        self, tmp_path_factory: pytest.TempPathFactory, runs: list[tuple[str, str]]
    ) -> None:
        file = tmp_path_factory.mktemp("m") / "m.prom"
        for name, status in runs:
            write_text_file(file, numbers_of(run(status, profile=name)))
        counted = {labels: value for (name, labels), value in read(file).items() if name == "mergegate_runs_total"}
        assert sum(counted.values()) == len(runs)
        assert {dict(labels)["profile"] for labels in counted} == {name for name, _ in runs}

    def test_a_name_ends_no_line(self, tmp_path: Path) -> None:
        write_text_file(tmp_path / "m.prom", numbers_of(run(profile='a\r\n\u2028"} 7\nmergegate_runs_total 9')))
        assert len([name for name, _ in read(tmp_path / "m.prom") if name == "mergegate_runs_total"]) == 1

    @pytest.mark.parametrize("damage", DAMAGE)
    def test_a_file_that_is_no_such_thing_is_begun_anew(self, tmp_path: Path, damage: bytes) -> None:
        file = tmp_path / "m.prom"
        file.write_bytes(damage)
        export_metrics(run(), tmp_path, {METRICS: str(file)})
        assert any(name == "mergegate_runs_total" for name, _ in read(file))

    def test_others_may_read_it(self, tmp_path: Path) -> None:
        export_metrics(run(), tmp_path, {METRICS: str(tmp_path / "m.prom")})
        assert [path.name for path in tmp_path.glob("m.prom*")] == ["m.prom"]

    def test_nothing_is_written_that_nobody_asked_for(self, tmp_path: Path) -> None:
        export_metrics(run(), tmp_path, {})
        assert not list(tmp_path.iterdir())

    def test_a_place_that_cannot_be_written_is_a_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            export_metrics(run(), tmp_path, {METRICS: str(tmp_path / "nowhere" / "m.prom")})
        assert "numbers for operators were not written" in caplog.text

    def test_a_whole_record_of_a_night_can_be_told(self, tmp_path: Path) -> None:
        write_text_file(tmp_path / "m.prom", numbers_of(nights(1)[0]))
        assert read(tmp_path / "m.prom")


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


def test_a_collector_gets_the_same_numbers(
    tmp_path: Path, collector: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    address, received = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    export_metrics(run(), tmp_path, {OTEL: "1"})
    sent = ExportMetricsServiceRequest.FromString(received[-1])
    metrics = {one.name: one for scope in sent.resource_metrics[0].scope_metrics for one in scope.metrics}
    assert {one.name for one in numbers_of(run())} == {name.removeprefix("mergegate.") for name in metrics}
    calls = {
        {label.key: label.value.string_value for label in point.attributes}["outcome"]: point.as_double or point.as_int
        for point in metrics["mergegate.stage_calls"].sum.data_points
    }
    assert calls == {"cached": 1, "worked": 2}

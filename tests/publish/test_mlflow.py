"""Test MLflow's registry as a target: each version points to a complete release, and the alias is set last."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from faulty_proxy import FaultyProxy, faulty_proxy
from real_servers import running_server
from release_samples import publishable
from small_mlflow import SmallMlflow, small_mlflow
from small_registry import SmallRegistry, small_registry
from target_contract import ALIAS, attempts_with_fault, publish_files, require_aliases, target_of

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.release.publish.content import ReleaseFile, written_file
from mergegate.tasks.release.publish.releases import check_release
from mergegate.tasks.release.publish.targets import PublishTarget, find_release
from mergegate.tasks.release.publish.targets.mlflow import describe_release
from mergegate.tasks.release.report import RunRecord, RunScore
from mergegate.tasks.release.telemetry import export_to_trackers

PROJECT = Path(__file__).resolve().parents[2]
MLFLOW = PROJECT / ".venv-mlflow" / "bin" / "mlflow"
needs_mlflow = pytest.mark.skipif(
    not MLFLOW.exists() and "MERGEGATE_REQUIRE_MLFLOW" not in os.environ, reason="make test-mlflow"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyProxy]:
    """Run the real MLflow server on SQLite, behind a proxy."""
    place = tmp_path_factory.mktemp("mlflow")
    storage = ["--backend-store-uri", f"sqlite:///{place}/mlflow.db", "--artifacts-destination", str(place / "files")]
    settings = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "PYTHONPATH": ""}

    def command(port: int) -> list[str]:
        return [str(MLFLOW), "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1", *storage]

    with running_server(place, command, "/health", **settings) as url, faulty_proxy(url) as proxy:
        yield proxy


@pytest.fixture
def blobs(home: Path) -> Iterator[SmallRegistry]:
    with small_registry() as registry:
        yield registry


def files(weights: str) -> tuple[ReleaseFile, ...]:
    guard = {"task": "mmlu", "reference": "general", "merge_score": 0.61, "drop": 0.4, "low": -0.9, "high": 1.7}
    predicate = {
        "buildDefinition": {
            "externalParameters": {"recipe": [{"merge_method": "ties"}], "profile": "demo"},
            "resolvedDependencies": [{"name": "acme/general", "uri": "pkg:huggingface/acme/general@0123"}],
        },
        "mergegate_verdict": {"outcome": "pass", "guards": [guard]},
    }
    provenance = json.dumps({"predicate": predicate})
    return (written_file("model.safetensors", weights), written_file("provenance.json", provenance))


def target(tracking: str, blobs: SmallRegistry, model: str) -> PublishTarget:
    place = {"to": "oci", "repository": f"{blobs.url.removeprefix('http://')}/acme/demo"}
    return target_of({"to": "mlflow", "model": model, "storage": place, "tracking_uri": tracking})


def ask(server: FaultyProxy, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    url = f"http://{server.upstream}/api/2.0/mlflow/{path}"
    with urlopen(Request(url, data, {"Content-Type": "application/json"})) as answer:
        return json.loads(answer.read())


DROP = {"task": "gsm8k", "reference": "a", "merge": 51.5, "drop": 9.8, "low": 7, "high": 12, "max_drop": 3, "margin": 3}
REFUSED = RunRecord(
    run="7f", flow="release", profile="demo", ended=0.0, seconds=61, status="refused",
    message="demo is not released\nreverse lost 9.8 points", overrides=("evaluate.documents=200",),
    scores=(RunScore.model_validate({**DROP, "outcome": "fail"}),),
)  # fmt: skip


def tracking(url: str) -> dict[str, str]:
    return {"MERGEGATE_MLFLOW": "nightly merges", "MLFLOW_TRACKING_URI": url}


def test_a_run_that_was_refused_is_tracked_in_mlflow_when_asked(tmp_path: Path) -> None:
    with small_mlflow() as server:
        export_to_trackers(REFUSED, tmp_path, {"MLFLOW_TRACKING_URI": server.url})
        assert not server.experiments
        export_to_trackers(REFUSED, tmp_path, tracking(server.url))
        export_to_trackers(REFUSED.model_copy(update={"status": "passed"}), tmp_path, tracking(server.url))
        assert server.experiments == {"nightly merges": "1"}
        assert [run["info"]["status"] for run in server.runs] == ["FAILED", "FINISHED"]
        data = server.runs[0]["data"]
        assert {one["key"]: one["value"] for one in data["metrics"]}["drop/gsm8k"] == 9.8
        assert {"key": "mergegate.message", "value": REFUSED.message} in data["tags"]
        assert {"key": "set.evaluate.documents", "value": "200"} in data["params"]


def test_an_mlflow_that_does_not_answer_or_has_no_address_is_said_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    export_to_trackers(REFUSED, tmp_path, {"MERGEGATE_MLFLOW": "releases"})
    assert "MLFLOW_TRACKING_URI is not an http(s) address" in caplog.text
    export_to_trackers(REFUSED, tmp_path, tracking("http://127.0.0.1:9"))
    assert "could not send this run to MLflow" in caplog.text


@pytest.mark.story
@needs_mlflow
def test_the_real_mlflow_takes_a_run_that_was_refused(server: FaultyProxy, tmp_path: Path) -> None:
    export_to_trackers(REFUSED, tmp_path, tracking(server.url))
    place = ask(server, "experiments/get-by-name?experiment_name=nightly%20merges")["experiment"]["experiment_id"]
    (run,) = ask(server, "runs/search", {"experiment_ids": [place]})["runs"]
    assert run["info"]["status"] == "FAILED"
    assert {one["key"]: one["value"] for one in run["data"]["metrics"]}["drop_high/gsm8k"] == 12


def test_the_registration_follows_from_the_provenance() -> None:
    said = describe_release(files("w"), "demo", "v1", "champion", "oci://here")
    expected = {"score/mmlu": 0.61, "drop/mmlu/general": 0.4, "low/mmlu/general": -0.9, "high/mmlu/general": 1.7}
    assert said.metrics == expected
    assert said.facts["mergegate.parent.0"] == "acme/general pkg:huggingface/acme/general@0123"
    assert len(said.facts["mergegate.recipe"]) == 64
    assert describe_release(files("x"), "demo", "v1", "champion", "").digest != said.digest


def test_an_invalid_setting_is_reported_with_its_field(
    blobs: SmallRegistry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(InvalidInput, match=r"p: publish\.tracking_uri"):
        target("sqlite:///here", blobs, "demo")
    without = target("http://127.0.0.1:9", blobs, "demo").model_copy(update={"tracking_uri": None})
    with pytest.raises(InvalidInput, match="MLFLOW_TRACKING_URI"):
        without.check(tmp_path)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(Refused, match="MLflow does not answer"):
        target("http://127.0.0.1:9", blobs, "demo").check(tmp_path)
    assert blobs.tags == {}


@pytest.mark.story
@needs_mlflow
def test_a_release_is_registered_with_its_scores_and_found_by_its_alias(
    server: FaultyProxy, blobs: SmallRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect_api: None
) -> None:
    to = target(server.url, blobs, "support assistant")
    to.check(tmp_path)
    first = publish_files(to, files("w"), "v1")
    assert (first.new, first.location) == (True, "models:/support assistant/1")
    server.begin()
    assert not publish_files(to, files("w"), "v1").new
    assert [path for path in server.written("POST", "PATCH", "DELETE") if "runs/search" not in path] == []
    assert publish_files(to, files("x"), "v2").location == "models:/support assistant/2"
    (version,) = ask(server, "model-versions/search?filter=version_number%3D2")["model_versions"][:1] or [None]
    assert version["source"].startswith(f"oci://{blobs.url.removeprefix('http://')}/acme/demo@sha256:")
    run = ask(server, f"runs/get?run_id={version['run_id']}")["run"]
    assert run["info"]["status"] == "FINISHED"
    assert {one["key"]: one["value"] for one in run["data"]["metrics"]}["high/mmlu/general"] == 1.7
    assert publish_files(to, files("w"), "v1").location == "models:/support assistant/1", "made champion again"
    to.set_alias(tmp_path, "v1", ALIAS)
    to.set_alias(tmp_path, "v2", ALIAS)
    assert (to.resolve_alias(tmp_path, ALIAS), to.resolve_alias(tmp_path, "champion")) == ("v2", "v1")
    with pytest.raises(InvalidInput, match="no version 'v3'"):
        to.set_alias(tmp_path, "v3", ALIAS)
    full = publishable(tmp_path / "full").publish(target(server.url, blobs, "full"), tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    assert check_release(find_release("models:/full@champion"), recompute=True).files > 5
    assert full.new
    with pytest.raises(InvalidInput, match="no such version or alias"):
        find_release("models:/full/9")


@pytest.mark.proof
@pytest.mark.parametrize(
    ("kind", "stride"),
    [pytest.param("drop", 15, id="drop-some"), ("drop", 1), *((kind, 7) for kind in ("before", "503", "down"))],
)
def test_a_fault_at_any_request_leaves_the_alias_at_a_whole_release(
    blobs: SmallRegistry, monkeypatch: pytest.MonkeyPatch, kind: str, stride: int
) -> None:
    """Only requests to MLflow get faults. The tests of the underlying storage target cover its own requests."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    old, new = files("old"), files("new")
    whole = [{one.name: (one.size, one.sha256) for one in release} for release in (old, new)]
    with small_mlflow() as mlflow, faulty_proxy(mlflow.url) as proxy:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.url)
        to = target(proxy.url, blobs, "demo")

        publish_files(to, old, "v1")
        tags, before = dict(blobs.tags), copy.deepcopy({name: getattr(mlflow, name) for name in SmallMlflow.STATE})

        def attempt(*_: object) -> dict[str, object]:
            blobs.tags = dict(tags)
            vars(mlflow).update(copy.deepcopy(before))
            try:
                return {"new": publish_files(to, new, "v2").new}
            except Refused as error:
                return {"refused": str(error)}

        for outcome in attempts_with_fault(proxy, kind, stride, 20, attempt):
            assert ("run again later" in str(outcome.get("refused"))) == (kind == "down")
            assert find_release("models:/demo@champion").files() in whole
            assert publish_files(to, new, "v2").location == "models:/demo/2", "one version, not two"
            assert find_release("models:/demo@champion").files() == whole[1]
            sources = [version["source"] for version in mlflow.models["demo"]]
            assert len(sources) == len(set(sources))


def test_the_current_release_is_complete_once_the_alias_points_to_it(blobs: SmallRegistry, tmp_path: Path) -> None:
    with small_mlflow() as mlflow:
        to = target(mlflow.url, blobs, "demo")
        assert to.current_release(tmp_path) is None
        publish_files(to, files("old"), "v1")
        publish_files(to.storage, files("new"), "v2")  # type: ignore[attr-defined]  # as a run interrupted at this point
        behind = to.current_release(tmp_path)
        assert behind is not None
        assert not behind.complete
        assert publish_files(to, files("new"), "v2").new
        assert to.current_release(tmp_path) == dataclasses.replace(behind, complete=True)
        mlflow.aliases["demo", "champion"] = "1"  # as if a user had moved the alias
        assert to.current_release(tmp_path) == behind


def test_an_alias_is_one_of_the_registered_model(blobs: SmallRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_mlflow() as mlflow, faulty_proxy(mlflow.url) as proxy:
        to = target(proxy.url, blobs, "demo")
        for weights, version in (("w", "v1"), ("x", "spring"), ("y", "v2")):
            publish_files(to, files(weights), version)
        require_aliases(
            to, lambda: (mlflow.models, {**mlflow.aliases, ("demo", ALIAS): ""}), lambda: proxy.written("POST")
        )
        monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow.url)
        first = find_release(f"{to.address}:v1")
        assert find_release(f"models:/demo@{ALIAS}").files() == first.files()
        with pytest.raises(InvalidInput, match="moves with every release"):
            to.set_alias(Path(), "v1", "champion")

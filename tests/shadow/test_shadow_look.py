"""Successive looks, also killed ones: a good candidate is promoted, and a worse one is rolled back."""

from __future__ import annotations

import asyncio
import json
import runpy
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from asgi_server import serving_asgi
from loopback import answering
from openai_server import OpenAiServer, serving
from recorded_traffic import VERSION, pair, prefer_good_answers

from mergegate.tasks.shadow import FollowedRouting, Routing, ShadowSettings, records_url, routing_file, write_routing
from mergegate.tasks.shadow.arms import RecordedPair
from mergegate.tasks.shadow.traffic import (
    Recorder,
    ReplaySettings,
    ShadowProxy,
    open_records,
    open_redaction,
    read_traffic,
    replay,
)

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS / "flows"))

from demo_project import Project, make_project  # noqa: E402  # from the tests of flows

from mergegate.tasks.shadow import ArmRow, read_routing  # noqa: E402
from mergegate.tasks.shadow.arms import ShadowRecord  # noqa: E402

HOUR = 3600.0


@dataclass
class WatchedProject:
    """A project whose profile ``watched`` has a section ``shadow``."""

    project: Project
    began: float

    @property
    def routing_file(self) -> Path:
        return self.project.home / "shadow" / "watched.json"

    @property
    def routing(self) -> Routing:
        routing = read_routing(self.routing_file)
        assert routing is not None
        return routing

    def watch(self, **changes: Any) -> None:
        """Write the initial routing, as a proxy does at its start."""
        defaults = {"candidate": VERSION, "mode": "mirror", "share": 0.1, "serving": "watch", "why": ""}
        write_routing(self.routing_file, Routing(**{**defaults, "since": self.began, **changes}))

    def record(self, pairs: Sequence[RecordedPair], rows: Sequence[ArmRow] = ()) -> None:
        """Write records, as the proxy does."""
        records = [each for one in pairs for each in (one.parent, one.candidate._replace(request=b""))]
        for number, row in enumerate(rows):
            common = {"exchange": f"row-{number}-{row.at}", "candidate": VERSION, "request_id": "r", "session": "s"}
            records.append(ShadowRecord(**common, path="/v1/chat/completions", request=b"", **row._asdict()))
        with open_records(f"sqlite:///{self.project.home / 'shadow' / 'watched.sqlite'}") as database:
            database.write(records)

    def look(self, *arguments: str) -> Any:
        return self.project.mergegate("shadow", "evaluate", "profiles/watched.yaml", *arguments)

    def decide(self, command: str, *arguments: str) -> Any:
        return self.project.mergegate("shadow", command, "profiles/watched.yaml", *arguments)


def watched(directory: Path, url: str, *, hours: float = 30.0, **shadow: Any) -> WatchedProject:
    """Create a project that has shadowed a release for `hours`, with a judge at `url`.

    ``shadow`` holds keys that override the ``shadow`` section.
    """
    project = make_project(directory)
    content = yaml.safe_load((project.root / "profiles" / "demo.yaml").read_text())
    servers = {name: {"url": "http://127.0.0.1:1/v1"} for name in ("parent", "candidate")}
    judge = {"url": url, "model": "judge-1", "attempts": 1}
    content |= {"name": "watched", "shadow": {**servers, "judge": judge, "alias": None, **shadow}}
    (project.root / "profiles" / "watched.yaml").write_text(yaml.safe_dump(content))
    watched_project = WatchedProject(project, time.time() - hours * HOUR)
    watched_project.watch()
    return watched_project


def rows(began: float, count: int, *, hours: float = 30.0, failing: float = 0.0, first: float = 0.02) -> list[ArmRow]:
    """Return requests of both arms, spread over `hours`.

    ``failing`` is the share of requests that the candidate fails, and ``first`` its time to the first byte in seconds.
    """
    result = []
    for number in range(count):
        at = began + hours * HOUR * (number + 1) / count
        fails = failing > 0 and number % round(1 / failing) == 0
        result.append(ArmRow(at, "parent", "answer", 200, "", False, 0.02 + 0.0001 * (number % 50), 0.3))
        result.append(
            ArmRow(at, "candidate", "copy", 503 if fails else 200, "", False, first + 0.0001 * (number % 50), 0.3)
        )
    return result


PROJECT = Path(__file__).resolve().parents[2]
RULE = {"minimum_pairs": 30, "pairs_per_look": 400}


@pytest.fixture
def judge() -> Iterator[OpenAiServer]:
    with serving(prefer_good_answers) as asked:
        yield asked


def alias_of(watch: WatchedProject) -> str:
    """Return the version that 'production' names at a publish target with two versions; initially 'before'."""
    link = watch.project.root / "releases" / "demo" / "production"
    if not link.parent.is_dir():
        for version in (VERSION, "before"):
            (link.parent / version).mkdir(parents=True)
        link.symlink_to("before")
    return str(link.readlink())


def traffic(watch: WatchedProject, count: int, *, better: int = 0, worse: int = 0) -> list[RecordedPair]:
    """Return pairs, of every ten `better` won and `worse` lost by the candidate; the others are ties."""
    found = []
    for number in range(count):
        parent = "good" if number % 10 >= better else "bad"
        candidate = "good" if number % 10 < 10 - worse else "bad <script>"
        found.append(pair(number, parent=parent, candidate=candidate, at=watch.began + number))
    return found


def told(result: Any) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


@pytest.mark.proof
def test_a_better_candidate_is_promoted_once(tmp_path: Path, prefect_api: None, judge: OpenAiServer) -> None:
    watch = watched(tmp_path, judge.url, rule=RULE, alias="production")
    watch.record(traffic(watch, 100, better=5), rows(watch.began, 100))
    assert alias_of(watch) == "before"
    result = watch.look("--json")
    answer = told(result)
    assert (result.exit_code, answer["status"], answer["version"]) == (0, "promoted", VERSION)
    assert (watch.routing.serving, alias_of(watch)) == ("promoted", VERSION)
    assert watch.routing.why in answer["message"]
    assert "examples" not in answer["shadow"]

    asked = len(judge.bodies)
    again = watch.look()
    assert again.exit_code == 0
    assert "nothing new" in again.output
    assert len(judge.bodies) == asked

    status = told(watch.decide("status", "--json"))
    assert (status["status"], status["shadow"]["serving"], status["shadow"]["pairs"]) == ("promoted", "promoted", 100)
    history = told(watch.project.mergegate("history", "--json"))["runs"]
    assert sorted((run["flow"], run["status"]) for run in history) == [
        ("shadow", "nothing new"),
        ("shadow", "promoted"),
    ]

    back = watch.decide("rollback", "--reason", "users complain")
    assert back.exit_code == 0, back.output
    assert watch.routing.serving == "rolled back"
    assert "users complain" in watch.routing.why
    assert alias_of(watch) == "before"


@pytest.mark.proof
def test_a_worse_candidate_is_rolled_back_with_its_losses_only_on_the_page(
    tmp_path: Path, prefect_api: None, judge: OpenAiServer
) -> None:
    watch = watched(tmp_path, judge.url, rule=RULE)
    watch.record(traffic(watch, 60, worse=6), rows(watch.began, 60))
    result = watch.look()
    assert result.exit_code == 3
    assert watch.routing.serving == "rolled back"
    reports = watch.project.home / "reports"
    page = (reports / "watched.shadow.html").read_text()
    assert "bad &lt;script&gt;" in page
    assert "&lt;b&gt;is&lt;/b&gt;" in page
    (kept,) = (reports / "watched").glob("*.html")
    assert "&lt;script&gt;" not in kept.read_text()
    again = watch.look("--json")
    assert (again.exit_code, told(again)["status"]) == (0, "nothing new")


@pytest.mark.proof  # Runs several looks.
def test_equal_answers_wait_for_both_minima_and_a_look_is_bounded(
    tmp_path: Path, prefect_api: None, judge: OpenAiServer
) -> None:
    watch = watched(tmp_path, judge.url, rule={"minimum_pairs": 30, "pairs_per_look": 25}, hours=5)
    watch.record(traffic(watch, 60), rows(watch.began, 60, hours=5))
    first = told(watch.look("--json"))
    assert (first["status"], first["shadow"]["pairs"], first["shadow"]["waiting"]) == ("waiting", 25, 35)
    assert [told(watch.look("--json"))["shadow"]["pairs"] for _ in range(2)] == [50, 60]
    last = watch.look("--json")
    assert (last.exit_code, told(last)["status"]) == (0, "nothing new")
    assert watch.routing.serving == "watch"
    assert judge.bodies == []


@pytest.mark.proof
@pytest.mark.parametrize(
    ("failing", "first", "says"), [(0.2, 0.02, "requests failed"), (0.0, 0.5, "times slower")], ids=["fails", "slow"]
)
def test_a_failing_or_slow_candidate_is_killed(
    tmp_path: Path, prefect_api: None, judge: OpenAiServer, failing: float, first: float, says: str
) -> None:
    watch = watched(tmp_path, judge.url)
    watch.record(traffic(watch, 5), rows(watch.began, 250, failing=failing, first=first))
    result = watch.look()
    assert (result.exit_code, watch.routing.serving) == (3, "killed")
    assert says in watch.routing.why
    assert "killed" in result.output


@pytest.mark.story
def test_a_candidate_killed_by_the_proxy_is_reported_once(
    tmp_path: Path, prefect_api: None, judge: OpenAiServer
) -> None:
    watch = watched(tmp_path, judge.url)
    watch.watch(serving="killed", why="the switch")
    assert watch.look().exit_code == 3
    again = watch.look()
    assert again.exit_code == 0
    assert "nothing new" in again.output


@pytest.mark.story  # Runs several looks.
def test_promotion_requires_approval_and_records_who_gave_it(
    tmp_path: Path, prefect_api: None, judge: OpenAiServer
) -> None:
    watch = watched(tmp_path, judge.url, rule=RULE, approval=True)
    watch.record(traffic(watch, 100, better=5), rows(watch.began, 100))
    refused = watch.look()
    assert refused.exit_code == 3
    assert "needs approval before mergegate may promote it" in refused.output
    assert watch.routing.serving == "watch"
    assert watch.look("--approve").exit_code == 0
    assert watch.routing.serving == "promoted"
    assert "approved in advance" in watch.routing.why


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("promote", "profiles/watched.yaml"), "Missing option '--reason'"),
        (("evaluate", "profiles/demo.yaml"), "no section 'shadow'"),
        (("evaluate", "profiles/watched.yaml"), "no release is watched yet"),
        (("status", "profiles/watched.yaml"), "no release is watched yet"),
    ],
)
def test_meaningless_commands_are_refused(
    tmp_path: Path, prefect_api: None, judge: OpenAiServer, arguments: tuple[str, ...], says: str
) -> None:
    watch = watched(tmp_path, judge.url)
    watch.routing_file.unlink()
    result = watch.project.mergegate("shadow", *arguments)
    assert result.exit_code == 2
    assert says in result.output


# End to end: users from a file, the real proxy, models of the demo family, a judge that can spell, and one look.

PROFILES = Path(__file__).resolve().parents[2] / "profiles"


@pytest.mark.story
@pytest.mark.parametrize(
    ("parent", "candidate", "status", "code"),
    [pytest.param("reverser", "ties", "promoted", 0, marks=pytest.mark.proof), ("ties", "lopsided", "rolled back", 3)],
)
def test_a_good_merge_is_promoted_and_the_lopsided_one_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parent: str, candidate: str, status: str, code: int
) -> None:
    project = make_project(tmp_path)
    monkeypatch.setenv("MERGEGATE_HOME", str(project.home))
    models = {"reverser": PROFILES / "demo" / "models" / "reverser"}
    for recipe in {parent, candidate} - {"reverser"}:
        models[recipe] = project.root / recipe
        assert project.mergegate("merge", f"profiles/demo/recipes/{recipe}.yaml", recipe).exit_code == 0
    demo = runpy.run_path(str(PROFILES / "demo" / "server.py"))
    section = yaml.safe_load((PROFILES / "demo-shadow.yaml").read_text())["shadow"]
    arms = {"parent": demo["Model"](models[parent]), "candidate": demo["Model"](models[candidate])}
    with ExitStack() as stack:
        for name, content in {**arms, "judge": demo["Judge"]()}.items():
            server = stack.enter_context(answering(demo["serve"](content, 0)))
            section[name]["url"] = f"http://127.0.0.1:{server.server_address[1]}/v1"
        write_profile(project.root, {**section, "alias": None})
        settings = ShadowSettings.model_validate(section)
        routing = Routing(candidate="v1", mode="mirror", share=1.0, since=time.time())
        write_routing(routing_file("watched"), routing)
        recorder = Recorder(lambda: open_records(records_url("watched", settings)), open_redaction((), None), settings)
        proxy = ShadowProxy(settings, FollowedRouting(routing_file("watched"), routing), recorder)
        traffic = read_traffic(PROFILES / "demo" / "traffic.jsonl", "demo")[:240]
        with serving_asgi(proxy.application()) as url:
            pace = ReplaySettings(settings.session_header, rate=1000, concurrency=2)
            done = asyncio.run(replay(traffic, url, pace))
            assert dict(done.statuses) == {"200": 240}
            while recorder.counts().get("copies", 0) < 240:
                time.sleep(0.05)
        looked = WatchedProject(project, routing.since).look("--json")
    said = json.loads(looked.stdout)
    assert (said["status"], looked.exit_code) == (status, code)
    assert said["shadow"]["losses" if status == "promoted" else "wins"] <= 10


def write_profile(root: Path, section: dict[str, Any]) -> None:
    content = yaml.safe_load((root / "profiles" / "demo.yaml").read_text())
    (root / "profiles" / "watched.yaml").write_text(yaml.safe_dump({**content, "name": "watched", "shadow": section}))

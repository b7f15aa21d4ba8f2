"""End to end: users from a file, the real proxy, models of the demo family, a judge that can spell, and one look."""

from __future__ import annotations

import asyncio
import json
import runpy
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from asgi_server import serving_asgi
from loopback import answering
from watched_project import WatchedProject, make_project

from mergegate.tasks.shadow import FollowedRouting, Routing, ShadowSettings, records_url, routing_file, write_routing
from mergegate.tasks.shadow.records import open_records
from mergegate.tasks.shadow.traffic import Recorder, ReplaySettings, ShadowProxy, open_redaction, read_traffic, replay

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
pytestmark = pytest.mark.story


@pytest.mark.parametrize(
    ("parent", "candidate", "status", "code"),
    [
        pytest.param("reverser", "ties", "promoted", 0, marks=pytest.mark.proof),
        ("ties", "lopsided", "rolled back", 3),
    ],
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
        limits = {"queue_size": 10_000, "max_body_bytes": 1 << 20, "retention_days": 1}
        recorder = Recorder(lambda: open_records(records_url("watched", settings)), open_redaction((), None), **limits)
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

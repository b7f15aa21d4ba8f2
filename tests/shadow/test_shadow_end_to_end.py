"""End to end: users from a file, the real proxy, models of the demo family, a judge that can spell, and one look."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from stub_openai import serving
from watched_project import WatchedProject, make_project

from mergegate.tasks.shadow import FollowedRouting, Routing, ShadowSettings, records_url, routing_file, write_routing
from mergegate.tasks.shadow.records import open_records
from mergegate.tasks.shadow.traffic import Recorder, ReplaySettings, ShadowProxy, open_redaction, read_traffic, replay

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
pytestmark = pytest.mark.story


def demo_server() -> Any:
    """Import ``profiles/demo/server.py`` as a module."""
    spec = importlib.util.spec_from_file_location("demo_server", PROFILES / "demo" / "server.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def served(who: Any) -> Iterator[str]:
    server = demo_server().serve(who, 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()


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
    server = demo_server()
    with ExitStack() as stack:
        urls = {
            "parent": stack.enter_context(served(server.Model(models[parent]))),
            "candidate": stack.enter_context(served(server.Model(models[candidate]))),
            "judge": stack.enter_context(served(server.Judge())),
        }
        section = yaml.safe_load((PROFILES / "demo-shadow.yaml").read_text())["shadow"]
        for name, url in urls.items():
            section[name]["url"] = url
        write_profile(project.root, {**section, "alias": None})
        settings = ShadowSettings.model_validate(section)
        routing = Routing(candidate="v1", mode="mirror", share=1.0, since=time.time())
        write_routing(routing_file("watched"), routing)
        recorder = Recorder(
            lambda: open_records(records_url("watched", settings)), open_redaction((), None), queue_size=10_000,
            max_body_bytes=1 << 20, retention_days=1,
        )  # fmt: skip
        proxy = ShadowProxy(settings, FollowedRouting(routing_file("watched"), routing), recorder)
        traffic = read_traffic(PROFILES / "demo" / "traffic.jsonl", "demo")[:240]
        with serving(proxy.application()) as url:
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

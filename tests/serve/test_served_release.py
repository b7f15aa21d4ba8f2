"""Releases of the demo with the real vLLM: each is served once for all runs, and a mixture of dense models too."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from real_server import PROJECT, real_server

from mergegate.tasks.serve.launch import PYTHON

sys.path.append(str(PROJECT / "tests" / "flows"))

from demo_project import Project, make_project  # Shared with the flow tests.

pytestmark = real_server

# The report mentions some names several times; each is listed here once.
CHECKS = (
    *("tensors", "vocabulary", "finite weights", "ready", "finite logprobs", "text", "greedy twice", "no loop"),
    *("parity", "tokenizer", "chat", "chat template", "end of sequence", "stops", "over-long prompt", "throughput"),
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, prefect_api: None) -> tuple[Project, str, dict[str, Any]]:
    """Return a project, the name of its profile, and the output of its first run."""
    project = make_project(tmp_path_factory.mktemp("served"))
    profile = project.edit("demo-served.yaml", "serve:\n", f"serve:\n  python: {PROJECT / PYTHON}\n")
    result = project.mergegate("run", profile, "--json")
    assert result.exit_code == 0, result.output
    return project, profile, json.loads(result.stdout)


Served = tuple[Project, str, dict[str, Any]]


def test_the_demo_passes_every_check_and_is_released(served: Served) -> None:
    project, _, outcome = served
    assert outcome["status"] == "released"
    checks = {check["name"]: check["outcome"] for check in outcome["content"]["served"]}
    assert checks == dict.fromkeys(CHECKS, "pass")
    assert (project.root / "releases" / "edited-demo-served" / "latest" / "model.safetensors").is_file()


def test_the_report_says_by_what_it_was_served_and_what_was_asked(served: Served) -> None:
    _, _, outcome = served
    page = Path(outcome["report"]).read_text()
    assert re.search(r"Served by vllm(-cpu)? \d", page)
    assert [name for name in CHECKS if f">{name}<" not in page] == []


def test_a_second_run_starts_no_server(served: Served) -> None:
    project, profile, _ = served
    (before,) = project.artifacts("serve")
    log = project.home / "store" / "serve" / before / "server.log"
    written = log.stat().st_mtime_ns
    result = project.mergegate("run", profile)
    assert result.exit_code == 0, result.output
    assert "nothing new" in result.output
    assert re.search(r"= serve\b", result.output)
    assert project.artifacts("serve") == {before}
    assert log.stat().st_mtime_ns == written


SERVE = f"""
serve:
  python: {PROJECT / PYTHON}
  prompts: ["rev: abcd>", "copy: abcd>", "the old "]
  texts: ["rev: hgfe>efgh", "copy: hgfe>hgfe", "the old pig sees the red cat."]
  stops: ["rev: abcd>", "copy: abcd>"]
publish:"""


def test_an_upcycled_mixture_is_served_and_released(tmp_path: Path, prefect_api: None) -> None:
    project = make_project(tmp_path)
    result = project.mergegate("run", project.edit("demo-upcycled.yaml", "\npublish:", SERVE), "--json")
    assert result.exit_code == 0, result.output
    outcome = json.loads(result.stdout)
    assert outcome["status"] == "released"
    checks = {check["name"]: check["outcome"] for check in outcome["content"]["served"]}
    assert {"tensors", "ready", "parity", "greedy twice", "stops", "end of sequence"} <= checks.keys()
    assert set(checks.values()) == {"pass"}

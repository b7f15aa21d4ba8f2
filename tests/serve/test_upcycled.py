"""``profiles/demo-upcycled.yaml`` with the real vLLM: a mixture built from dense models is served as a mixture."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from real_server import PROJECT, real_server

from mergegate.tasks.serve.launch import PYTHON

sys.path.append(str(PROJECT / "tests" / "flows"))

from demo_project import make_project  # Shared with the flow tests.

pytestmark = real_server

SERVE = f"""
serve:
  python: {PROJECT / PYTHON}
  prompts: ["rev: abcd>", "copy: abcd>", "the old "]
  texts: ["rev: hgfe>efgh", "copy: hgfe>hgfe", "the old pig sees the red cat."]
  stops: ["rev: abcd>", "copy: abcd>"]
publish:"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, prefect_api: None) -> dict[str, Any]:
    project = make_project(tmp_path_factory.mktemp("upcycled"))
    result = project.mergegate("run", project.edit("demo-upcycled.yaml", "\npublish:", SERVE), "--json")
    assert result.exit_code == 0, result.output
    loaded: dict[str, Any] = json.loads(result.stdout)
    return loaded


def test_the_upcycled_mixture_is_served_and_released(outcome: dict[str, Any]) -> None:
    assert outcome["status"] == "released"
    checks = {check["name"]: check["outcome"] for check in outcome["content"]["served"]}
    assert {"tensors", "ready", "parity", "greedy twice", "stops", "end of sequence"} <= checks.keys()
    assert set(checks.values()) == {"pass"}

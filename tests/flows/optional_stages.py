"""Write profiles with optional stages, and start the servers that those stages call."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from demo_project import Project
from loopback import Answer
from openai_server import completion, serving
from typer.testing import Result

TESTS = Path(__file__).resolve().parents[1]
OPENAI_SERVER = TESTS / "openai_server.py"


def says(verdict: str) -> Answer:
    return completion(
        {"reasoning": "so", "correctness": verdict, "relevance": "tie", "clarity": "tie", "verdict": verdict}
    )


def profile(project: Project, name: str, **keys: Any) -> str:
    """Write the demo's profile with additional keys and its own target, and return its path."""
    content = yaml.safe_load((project.root / "profiles" / "demo.yaml").read_text())
    content["publish"]["path"] = f"../releases/{name}"
    perplexity = keys.pop("perplexity", {})
    content["perplexity"].update(perplexity)
    content.update(name=name, **keys)
    (project.root / "profiles" / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return f"profiles/{name}.yaml"


def asks_a_judge(project: Project, url: str) -> dict[str, Any]:
    prompts = [{"prompt": f"rev: {word}>"} for word in ("abcd", "pig", "cat", "red", "dog", "tree", "old", "sun")]
    (project.root / "profiles" / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
    return {
        "url": url,
        "model": "judge-1",
        "prompts": "prompts.jsonl",
        "guarded_by": "shifter",
        "chat_template": False,
        "max_new_tokens": 6,
    }


def served_by_a_stand_in(*arguments: str, version: str = "1") -> dict[str, Any]:
    """Return the ``serve`` section of a profile for a fake server that answers like the model in its ``--model``."""
    return {
        "command": [sys.executable, str(OPENAI_SERVER), "--port", "{port}", "--name", "{name}", *arguments],
        "prompts": ["rev: abcd>"],
        "texts": ["the old pig sees the red cat."],
        "max_tokens": 16,
        "version": version,
        "parents": True,
    }


def run_with_everything(project: Project) -> Result:
    """Run the demo with the ensemble, a judge that always answers "tie", and a server."""
    with serving(lambda body: says("tie")) as asked:
        more = {
            "judge": {**asks_a_judge(project, asked.url), "on_inconclusive": "warn"},
            "serve": served_by_a_stand_in("--model", "{model}"),
            "perplexity": {"ensemble": True},
        }
        return project.mergegate("run", profile(project, "everything", **more), "--json")

"""Helpers for tests of parents on the Hub: a recipe, a profile, the command line, and the size of headers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

CARD = "---\nlicense: apache-2.0\n---\n# a model\n"
RECIPE = """\
merge_method: ties
base_model: acme/base
models:
  - {model: acme/math, parameters: {weight: 0.5, density: 0.5}}
  - {model: acme/code, parameters: {weight: 0.5, density: 0.5}}
"""


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set HF_HUB_OFFLINE for the rest of the test."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def header_sizes(models: Path) -> dict[str, int]:
    """Return the number of bytes before the first weight, by the SHA-256 of each model's safetensors files."""
    from mergegate.merge_core.files.hashing import sha256_file

    files = list(models.glob("*/model*.safetensors"))
    return {sha256_file(file): 8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files}


def mergegate(*arguments: str) -> Result:
    """Run the command in this process. An unexpected exception fails the test."""
    from mergegate.flows.cli.app import app

    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def write_profile(place: Path, *, name: str = "demo", recipe: str = RECIPE, **more: object) -> Path:
    """Write a profile, with evidence that is never reached, and return its path."""
    (place / "held-out.jsonl").write_text('{"text": "t1 t2 t3"}\n')
    (place / "recipe.yaml").write_text(recipe)
    profile = {"name": name, "recipe": "recipe.yaml", "perplexity": {"documents": "held-out.jsonl"}, **more}
    file = place / f"{name}.yaml"
    file.write_text(json.dumps(profile))
    return file

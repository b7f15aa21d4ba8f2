"""``mergegate plan`` reads only the headers of Hub checkpoints, with ranged requests to a fake Hub on loopback.

The library reads HF_ENDPOINT at import, so every test runs the command in a separate process.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hub_stand_in import COMMIT, serving
from sparse_models import header_bytes, llama, save_sparse, weights_of

PROJECT = Path(__file__).resolve().parents[2]
SMALL = {"layers": 3, "hidden": 1024, "wide": 4096, "keys": 256, "tokens": 2000}
RECIPE = """merge_method: ties
base_model: acme/base
models:
  - {model: acme/math, parameters: {weight: 0.5, density: 0.5}}
  - {model: acme/code, parameters: {weight: 0.5, density: 0.5}}
"""


@pytest.fixture
def repositories(tmp_path: Path) -> dict[str, Path]:
    shards = {"base": 3, "math": 3, "code": 1}
    return {
        f"acme/{name}": save_sparse(tmp_path / "hub" / name, llama(**SMALL), shards=count)
        for name, count in shards.items()
    }


def plan(tmp_path: Path, recipe: str, **environment: str) -> tuple[int, dict[str, object], str]:
    """Run ``mergegate plan --json``, and return its exit code, result and standard error."""
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    ours = {"HF_HOME": str(tmp_path / "hf"), "MERGEGATE_HOME": str(tmp_path / "state"), "HF_HUB_DISABLE_XET": "1"}
    command = [
        sys.executable,
        "-c",
        "from mergegate.flows.cli import main; main()",
        "plan",
        str(file),
        "--json",
        "--no-probe",
    ]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")],
        env={**clean, **ours, **environment},
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.story
def test_no_weight_is_read_from_the_hub(tmp_path: Path, repositories: dict[str, Path]) -> None:
    with serving(repositories) as hub:
        code, _, errors = plan(tmp_path, RECIPE, HF_ENDPOINT=hub.url)
    assert code == 0, errors
    files = {f"{d.name}/{file.name}": file for d in repositories.values() for file in weights_of(d)}
    assert len(files) == 7
    assert {name: hub.served[name] for name in files} == {name: header_bytes(file) for name, file in files.items()}


@pytest.mark.story
def test_a_remote_plan_is_the_plan_of_the_same_files_here(tmp_path: Path, repositories: dict[str, Path]) -> None:
    with serving(repositories) as hub:
        _, remote, _ = plan(tmp_path, RECIPE, HF_ENDPOINT=hub.url)
    _, local, _ = plan(tmp_path, RECIPE.replace("acme/", f"{tmp_path}/hub/"))
    assert remote["needs"] == local["needs"]
    weights = sum(file.stat().st_size for d in repositories.values() for file in weights_of(d))
    assert (remote["bytes_to_download"], local["bytes_to_download"]) == (weights, 0)


@pytest.mark.story
def test_what_was_fetched_once_is_not_fetched_again(tmp_path: Path, repositories: dict[str, Path]) -> None:
    with serving(repositories) as hub:
        _, first, _ = plan(tmp_path, RECIPE, HF_ENDPOINT=hub.url)
        tokenizers = hub.served["base/tokenizer.json"]
        _, second, _ = plan(tmp_path, RECIPE, HF_ENDPOINT=hub.url)
        assert hub.served["base/tokenizer.json"] == tokenizers > 0
    assert second["bytes_to_download"] == first["bytes_to_download"]


@pytest.mark.story
def test_the_token_goes_with_every_request(tmp_path: Path, repositories: dict[str, Path]) -> None:
    with serving(repositories) as hub:
        plan(tmp_path, RECIPE, HF_ENDPOINT=hub.url, HF_TOKEN="hf_secret")
        assert hub.tokens == {"Bearer hf_secret"}


@pytest.mark.story
def test_preflight_sees_remote_checkpoints_too(tmp_path: Path, repositories: dict[str, Path]) -> None:
    other = {f"t{number}": 15 - number for number in range(16)}
    tokenizer = {"model": {"type": "WordLevel", "vocab": other}}
    (repositories["acme/math"] / "tokenizer.json").write_text(json.dumps(tokenizer))
    script = (
        "import sys; from mergegate.merge_core import load_recipe, preflight\n"
        "from mergegate.tasks.checkpoints import open_parent, resolve_parents\n"
        "recipe = load_recipe(sys.argv[1]); found = resolve_parents(recipe)\n"
        "findings = preflight(recipe, {parent.ref: open_parent(parent) for parent in found})\n"
        "print([finding.where for finding in findings], {parent.ref: parent.revision for parent in found})"
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    with serving(repositories) as hub:
        ours = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, "-c", script, RECIPE],
            env={**clean, **ours},
            cwd=PROJECT,
            capture_output=True,
            text=True,
            check=True,
        )
    revisions = dict.fromkeys(("acme/math", "acme/code", "acme/base"), COMMIT)
    assert done.stdout.strip() == f"['acme/math: tokenizer.json'] {revisions}"


@pytest.mark.story
def test_a_server_without_ranges_is_refused_before_it_sends_weights(
    tmp_path: Path, repositories: dict[str, Path]
) -> None:
    with serving(repositories, honours_ranges=False) as hub:
        code, answer, _ = plan(tmp_path, RECIPE, HF_ENDPOINT=hub.url)
    assert code == 2
    assert "ranged read" in str(answer["message"])
    assert hub.served["code/model.safetensors"] < weights_of(repositories["acme/code"])[0].stat().st_size


@pytest.mark.story
def test_a_lying_header_on_the_hub_is_refused(tmp_path: Path, repositories: dict[str, Path]) -> None:
    file = weights_of(repositories["acme/code"])[0]
    os.truncate(file, file.stat().st_size - 1)
    with serving(repositories) as hub:
        code, answer, _ = plan(tmp_path, RECIPE, HF_ENDPOINT=hub.url)
    assert code == 2
    assert "truncated" in str(answer["message"])


@pytest.mark.story
def test_an_unknown_repository_is_named(tmp_path: Path, repositories: dict[str, Path]) -> None:
    with serving(repositories) as hub:
        code, answer, _ = plan(tmp_path, RECIPE.replace("acme/math", "acme/maths"), HF_ENDPOINT=hub.url)
    assert code == 2
    assert str(answer["message"]).startswith("acme/maths: neither a local directory nor a Hub repository")


@pytest.mark.story
def test_offline_says_so(tmp_path: Path) -> None:
    code, answer, _ = plan(tmp_path, RECIPE, HF_HUB_OFFLINE="1")
    assert code == 2
    assert "HF_HUB_OFFLINE forbids" in str(answer["message"])


@pytest.mark.story
def test_an_unreachable_hub_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:  # A port without a listener.
        taken.bind(("127.0.0.1", 0))
        code, answer, _ = plan(tmp_path, RECIPE, HF_ENDPOINT=f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert code == 3
    assert "the Hub does not serve it" in str(answer["message"])

"""Check the image, the Compose file, the work pools and the pull-request example without building them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from mergegate.flows.cli.app import app
from mergegate.flows.outcome import RunOutcome
from mergegate.flows.profile import load_profile, parse_profile

PROJECT = Path(__file__).resolve().parents[2]
CONTAINERS = PROJECT / "containers"
EXAMPLE = PROJECT / "docs" / "examples" / "gate-recipes.yml"
FILES = (CONTAINERS / "Dockerfile", CONTAINERS / "compose.yaml", PROJECT / "prefect.yaml", EXAMPLE)
USER = 1000


def read_yaml(path: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load(path.read_text())
    return found


def compose() -> dict[str, Any]:
    return read_yaml(CONTAINERS / "compose.yaml")


def pools() -> dict[str, dict[str, Any]]:
    """Return the job variables of the definitions in ``prefect.yaml`` by pool type."""
    said = read_yaml(PROJECT / "prefect.yaml")["definitions"]["in-containers"]
    return {name.removesuffix("-pool"): one["job_variables"] for name, one in said.items()}


def options_of(command: str) -> set[str]:
    known: Any = get_command(app)
    return {name for parameter in known.commands[command].params for name in parameter.opts}


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, **{"check": True, **options})


@pytest.fixture(scope="module")
def kubernetes() -> dict[str, Any]:
    """Return the pool template that ``containers/kubernetes_pool.py`` prints."""
    found: dict[str, Any] = json.loads(run(sys.executable, CONTAINERS / "kubernetes_pool.py").stdout)
    return found


def docker() -> dict[str, Any]:
    """Return Prefect's template of a Docker pool."""
    import prefect

    known = Path(prefect.__file__).parent / "server/api/collections_data/views/aggregate-worker-metadata.json"
    own: dict[str, Any] = json.loads(known.read_text())["prefect-docker"]["docker"]
    return dict(own["default_base_job_configuration"])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_command_that_is_named_is_there_with_its_options(file: Path) -> None:
    commands: Any = get_command(app)
    text = file.read_text()
    named = re.findall(r"(?<![\w/.-])mergegate (?!mergegate)((?:[a-z]+)(?: [^\n#|&;'\"]*)?)", text)
    services = compose()["services"].values() if file.name == "compose.yaml" else ()
    named += [" ".join(one["command"][1:]) for one in services if one.get("command", [""])[0] == "mergegate"]
    checked = 0
    for words in (line.split() for line in named):
        if words[0] not in commands.commands:
            assert words[0] in ("in", "deploys"), f"{file.name}: no command {words[0]!r}"  # part of a sentence
            continue
        assert {word for word in words[1:] if word.startswith("--")} <= options_of(words[0]), words
        checked += 1
    assert checked or file.name == "prefect.yaml"


@cache
def known_settings() -> tuple[str, set[str]]:
    """Return the sources of the product, and the names of Prefect's settings."""
    from prefect.settings import get_current_settings

    ours = "".join(one.read_text() for it in ("flows", "tasks", "merge_core") for one in (PROJECT / it).rglob("*.py"))
    return ours, set(get_current_settings().to_environment_variables(exclude_unset=False, include_secrets=True))


@pytest.mark.parametrize("file", [*FILES, CONTAINERS / "with-secrets"], ids=lambda file: file.name)
def test_every_setting_that_is_named_is_one(file: Path) -> None:
    names = set(re.findall(r"\b((?:PREFECT|MERGEGATE)_[A-Z_]+[A-Z])\b", file.read_text()))
    ours, prefects = known_settings()
    compose_only = {"MERGEGATE_PROJECT"}  # defined by the Compose file itself
    assert {name for name in names - compose_only - prefects if name not in ours} == set(), "nobody reads them"


def test_an_image_is_built_from_what_there_is_and_the_context_lets_it_through() -> None:
    said = (CONTAINERS / "Dockerfile").read_text()
    admitted = {line[1:] for line in (PROJECT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [name for line in re.findall(r"^COPY (.*)", said, re.MULTILINE) for name in line.split()[:-1]]
    sources = [name for name in copied if not name.startswith("--")]
    assert {name for name in sources if not (PROJECT / name).exists()} == set()
    assert set(sources) == admitted
    assert "containers/secrets" not in admitted
    assert "/containers/secrets/" in (PROJECT / ".gitignore").read_text().splitlines()


def test_an_image_has_the_tested_versions_no_root_and_no_secret() -> None:
    said = (CONTAINERS / "Dockerfile").read_text()
    installs = [line for line in re.split(r"\n(?! )", said.replace("\\\n", " ")) if "pip install" in line]
    for line in installs:
        for command in re.findall(r"pip install [^;&]*", line):
            assert "--constraint constraints.txt" in command or "--no-deps" in command, command
    assert re.findall(r"^USER (.*)", said, re.MULTILINE) == ["${USER_ID}:${USER_ID}"]
    assert f"ARG USER_ID={USER}" in said
    assert not re.search(r"(?i)(token|password|auth_string)\s*=", said)
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"ARG EXTRAS=(.*)|extras, such as \"(.*?)\"", said)
    assert {one for pair in named for one in ",".join(pair).split(",") if one} <= set(extras)
    for needed in ("sweep", "served"):  # extras that can be written as requirement lines
        assert not any(one.startswith("mergegate[") for one in extras[needed])


def test_the_requirements_of_an_image_are_those_of_the_project() -> None:
    said = (CONTAINERS / "Dockerfile").read_text().replace("\\\n", "")
    program = re.search(r'RUN python -c "(.*?)" > needed.txt', said, re.DOTALL)
    assert program is not None
    done = run(sys.executable, "-c", program[1], cwd=PROJECT, env={**os.environ, "EXTRAS": "sweep"})
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert done.stdout.splitlines() == [*project["dependencies"], *project["optional-dependencies"]["sweep"]]


def test_services_have_the_secrets_volumes_and_neighbours_that_they_name() -> None:
    said = compose()
    for name, service in said["services"].items():
        assert set(service.get("secrets", ())) <= set(said["secrets"]), name
        assert set(service.get("depends_on", ())) <= set(said["services"]), name
        named = {mount.split(":")[0] for mount in service.get("volumes", ()) if not mount.startswith("$")}
        assert named <= set(said["volumes"]), name
        for needed in service.get("depends_on", {}).values():
            assert needed == {"condition": "service_healthy"}
        if "build" in service:
            built = service["build"]
            assert (CONTAINERS / built["context"] / built["dockerfile"]).resolve() == CONTAINERS / "Dockerfile"
    for name in said["secrets"]:
        assert said["secrets"][name] == {"file": f"secrets/{name}"}
        assert name in (CONTAINERS / "compose.yaml").read_text().partition("services:")[0], "how it is made is not said"
    assert all("healthcheck" in said["services"][name] for name in ("database", "server"))
    assert said["services"]["server"]["ports"] == ["127.0.0.1:4200:4200"], "it is open to others"


def test_a_secret_becomes_a_variable_and_does_not_replace_one(tmp_path: Path) -> None:
    for name, text in {"PGPASSWORD": "s e$cret\n", "HOME": "no", "EMPTY": "", "a-file": "x"}.items():
        (tmp_path / name).write_text(text)
    script = 'printf "%s|%s|%s" "$PGPASSWORD" "$HOME" "${EMPTY-unset}"; exit 7'
    environment = {"PATH": os.environ["PATH"], "HOME": "/there", "SECRETS": str(tmp_path)}
    done = run(CONTAINERS / "with-secrets", "sh", "-c", script, env=environment, check=False)
    assert (done.stdout, done.returncode, done.stderr) == ("s e$cret|/there|unset", 7, "")


def test_pools_take_what_the_project_sets(kubernetes: dict[str, Any]) -> None:
    from prefect.utilities.schema_tools import is_valid_schema, validate

    for kind, template in (("docker", docker()), ("kubernetes", kubernetes)):
        is_valid_schema(template["variables"])
        assert set(pools()[kind]) <= set(template["variables"]["properties"]), kind
        validate(pools()[kind], template["variables"], raise_on_error=True, preprocess=False)


def test_a_job_on_kubernetes_has_its_gpu_its_volume_its_secret_and_no_root(kubernetes: dict[str, Any]) -> None:
    from prefect.utilities.templating import apply_values, find_placeholders

    properties = kubernetes["variables"]["properties"]
    used = {one.name for one in find_placeholders(kubernetes["job_configuration"])}
    assert used <= set(properties)
    defaults = {name: one["default"] for name, one in properties.items() if "default" in one}
    job = apply_values(kubernetes["job_configuration"], {**defaults, **pools()["kubernetes"]})
    pod = job["job_manifest"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 1}
    assert container["image"] == "mergegate:gpu"
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "mergegate-project"
    assert container["volumeMounts"] == [{"name": pod["volumes"][0]["name"], "mountPath": "/project"}]
    assert container["envFrom"][0]["secretRef"]["name"] == "mergegate"
    assert pod["securityContext"]["runAsUser"] == USER


def test_what_is_deployed_by_default_needs_no_container() -> None:
    said = read_yaml(PROJECT / "prefect.yaml")
    assert {one["work_pool"]["name"] for one in said["deployments"]} == {"mergegate"}


def test_the_example_gates_a_profile_that_would_publish_and_publishes_nothing() -> None:
    said = read_yaml(EXAMPLE)
    profile = PROJECT / said["env"]["PROFILE"]
    steps = said["jobs"]["gate"]["steps"]
    runs = [step["run"] for step in steps if "run" in step]
    for command, line in zip(("check", "run"), runs[1:], strict=True):
        assert re.search(rf"mergegate {command}\b", line)
    assert "del(.publish)" in runs[2]
    assert load_profile(profile).publish is not None
    without = {name: value for name, value in read_yaml(profile).items() if name != "publish"}
    assert parse_profile({**without, "root": profile.parent}, "profile").publish is None
    (upload,) = [step for step in steps if "upload-artifact" in step.get("uses", "")]
    assert upload["if"] == "always()"
    assert upload["with"]["path"] == ".mergegate/reports"
    assert said["permissions"] == {"contents": "read"}


def test_the_nightly_release_needs_no_secret_and_calls_what_there_is(tmp_path: Path) -> None:
    text = (PROJECT / "docs" / "examples" / "nightly-release.yml").read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read", "id-token": "write"}
    assert "secrets." not in text
    assert "pull_request" not in workflow[True], "YAML reads the key `on` as true"
    steps = workflow["jobs"]["release"]["steps"]
    runs = [step["run"] for step in steps if "run" in step]
    called = re.findall(r"mergegate (\w+) (?:\"\$PROFILE\")((?: --[a-z-]+)*)", "\n".join(runs))
    for name, options in called:
        assert set(options.split()) <= options_of(name)
    assert [name for name, _ in called] == ["check", "run"]

    # The summary is written by the step's own script from the object that `run --json` prints.
    (script,) = [step["run"] for step in steps if step.get("name") == "Summarize the outcome"]
    summary = tmp_path / "summary.md"
    environment = {"PATH": os.environ["PATH"], "GITHUB_STEP_SUMMARY": str(summary)}
    if shutil.which("jq"):
        keys = {"status": "released", "message": "released demo 6c6e", "location": "https://hub.example/acme/demo"}
        assert keys.keys() - {"message"} <= RunOutcome.model_fields.keys()
        (tmp_path / "outcome.json").write_text(json.dumps(keys))
        run("bash", "-e", "-c", script, cwd=tmp_path, env=environment)
        assert summary.read_text() == "## released\n\nreleased demo 6c6e\n\nhttps://hub.example/acme/demo\n"
        (tmp_path / "outcome.json").unlink()
    run("bash", "-e", "-c", script, cwd=tmp_path, env=environment)
    assert "did not start" in summary.read_text()


def test_the_weekly_job_calls_what_there_is() -> None:
    weekly = read_yaml(PROJECT / "docs" / "examples" / "newest.yml")
    commands = [step["run"] for step in weekly["jobs"]["newest"]["steps"] if "run" in step]
    assert commands[0] == "make newest"
    assert re.search(r"^newest:", (PROJECT / "Makefile").read_text(), re.MULTILINE)
    assert "newest.md" in commands[1]
    assert "newest.md" in (PROJECT / ".ci" / "newest.py").read_text()

"""Test whole runs that release to the Hub, with a token or as a trusted publisher, and leave no trace of any token."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import CompletedProcess, run
from threading import Event, Thread
from typing import Any

import pytest
from hub_look_alike import WRITER, Fault, LookAlike, hub
from look_alike_repository import Repository, plain
from oidc_look_alike import PublisherEntry, job_environment
from signing_keys import write_keys

from mergegate.tasks.models.checkpoints import read_card

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "variants"))
from rounded_format import rounded_registered

sys.path.pop(0)

DEMO = Path(__file__).resolve().parents[2] / "profiles" / "demo"
HUB_PARENTS = f"""\
name: hub-parents
recipe:
  merge_method: linear
  models: [{{model: acme/base}}, {{model: acme/reverser}}]
  parameters: {{weight: 0.5}}
  dtype: bfloat16
perplexity: {{documents: {DEMO}/data/held-out.jsonl, max_increase: 99%}}
publish: {{path: hub-parents}}
"""

WITH_TOKEN = {"HF_TOKEN": WRITER}

pytestmark = pytest.mark.proof


def profile(repo: str) -> str:
    return f"""\
name: demo
recipe: {DEMO}/recipes/ties.yaml
perplexity: {{documents: {DEMO}/data/held-out.jsonl, max_increase: 5%}}
publish: {{to: hub, repo: {repo}, sign_key: release.key}}
"""


@dataclass(frozen=True)
class Project:
    """A directory with a profile that releases to the Hub stand-in."""

    root: Path
    stand_in: LookAlike

    def mergegate(self, *arguments: str, credential: Mapping[str, str] = WITH_TOKEN) -> CompletedProcess[str]:
        """Run the command in a separate process, as a user would. The default credential is the token of a writer."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PREFECT_"))}
        ours = {
            **credential,
            "HF_ENDPOINT": self.stand_in.url,
            "HF_HOME": str(self.root / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "MERGEGATE_HOME": str(self.root / "state"),
            # Log as much as possible, because a test searches the logs for the token.
            "PREFECT_LOGGING_LEVEL": "DEBUG",
            "PREFECT_LOGGING_TO_API_ENABLED": "1",
            "HF_HUB_VERBOSITY": "debug",
        }
        command = [sys.executable, "-c", "from mergegate.flows.cli import main; main()", *arguments]
        settings = {"cwd": self.root, "capture_output": True, "text": True, "check": False}
        done = run(command, env={**clean, **ours}, **settings)
        (self.root / f"output-{len(list(self.root.glob('output-*')))}.log").write_text(done.stdout + done.stderr)
        return done


@contextmanager
def project_on_hub(
    directories: pytest.TempPathFactory, begin_records: Callable[[Path], None], **profiles: str
) -> Iterator[Project]:
    """Yield a project with these profiles, and with a Hub of its own."""
    root = directories.mktemp("project")
    write_keys(root)
    begin_records(root / "state")
    for name, text in profiles.items():
        (root / f"{name}.yaml").write_text(text)
    with hub(directories.mktemp("hub")) as stand_in:
        yield Project(root, stand_in)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, begin_records: Callable[[Path], None]) -> Iterator[Project]:
    profiles = {"demo": profile("acme/demo"), "elsewhere": profile("other/demo")}
    with project_on_hub(tmp_path_factory, begin_records, **profiles) as made:
        yield made


@pytest.fixture(scope="module")
def released(project: Project) -> Project:
    """Release the demo to the Hub, after one refused run, in a run with faults."""
    project.stand_in.set_faults([])
    refused = project.mergegate("run", "elsewhere.yaml")
    assert refused.returncode == 3, refused.stderr
    assert "is not a member of other" in " ".join(refused.stdout.split())
    project.stand_in.set_faults(
        [Fault("fail", path="/commit/main"), Fault("drop", path="/tag/"), Fault("fail", path="/preupload/", times=2)]
    )
    done = project.mergegate("run", "demo.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    return project


def test_the_run_releases_to_the_hub_and_the_next_has_nothing_new(released: Project) -> None:
    repository = released.stand_in.repositories["acme/demo"]
    (version,) = repository.tags
    assert [commit.title for commit in repository.history()] == [f"Release {version}", "initial commit"]
    assert repository.branches == {"main": repository.tags[version]}
    again = json.loads(released.mergegate("run", "demo.yaml", "--json").stdout)
    assert (again["status"], again["version"]) == ("nothing new", version)


def test_it_is_verified_by_the_hubs_own_hashes_without_its_weights(released: Project) -> None:
    (version,) = released.stand_in.repositories["acme/demo"].tags
    released.stand_in.log.clear()
    done = released.mergegate("verify", "acme/demo", "--key", "release.pub")
    assert done.returncode == 0, done.stderr
    assert "the signature is valid" in done.stdout
    assert f"its content matches its version {version}" in done.stdout
    assert not any(entry.path.startswith("/_storage") for entry in released.stand_in.log)
    assert released.mergegate("verify", f"acme/demo@{version}").returncode == 0
    assert released.mergegate("verify", "acme/demo", "--verdict").returncode == 0
    assert released.mergegate("verify", "acme/demo@v9").returncode == 2


def test_a_release_edited_on_the_hub_is_refused(released: Project) -> None:
    repository = released.stand_in.repositories["acme/demo"]
    before = repository.branches["main"]
    tree = dict(repository.at("main").tree)
    statement = tree["provenance.json"].data.replace(b'"merge": 0', b'"merge": 1')
    tree["provenance.json"] = plain(statement)
    repository.add("main", before, "edited by hand", tree)
    try:
        done = released.mergegate("verify", "acme/demo")
        assert done.returncode == 3
        assert "provenance.json: sha256 is" in done.stderr
        tree["model.safetensors"] = replace(tree["model.safetensors"], sha256="0" * 64)
        repository.add("main", before, "other weights", tree)
        done = released.mergegate("verify", "acme/demo")
        assert done.returncode == 3
        assert "model.safetensors: sha256 is 000000000000…" in done.stderr
    finally:
        repository.branches["main"] = before


def test_it_is_reproduced_from_the_hub(released: Project) -> None:
    done = released.mergegate("reproduce", "acme/demo", "--parents", str(DEMO / "recipes"))
    assert done.returncode == 0, done.stderr
    assert "= model.safetensors" in done.stdout


def test_parents_on_the_hub_are_in_card_and_provenance_and_are_fetched_again_at_their_commit(project: Project) -> None:
    project.stand_in.set_faults([])
    commits = {name: put_on_hub(project, name) for name in ("base", "reverser")}
    (project.root / "hub-parents.yaml").write_text(HUB_PARENTS)
    done = project.mergegate("run", "hub-parents.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    release = project.root / "hub-parents" / "latest"
    card = read_card(release).fields
    assert (card["base_model"], card["base_model_relation"]) == (["acme/base", "acme/reverser"], "merge")
    statement = json.loads((release / "provenance.json").read_text())
    dependencies = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert [one["uri"] for one in dependencies] == [f"pkg:huggingface/acme/{n}@{c}" for n, c in commits.items()]

    put_on_hub(project, "base", b"\0")
    (project.root / "hf").rename(project.root / "hf-of-the-release")
    again = project.mergegate("reproduce", "hub-parents/latest")
    assert again.returncode == 0, again.stderr
    assert "= model.safetensors" in again.stdout
    del project.stand_in.repositories["acme/base"]
    (project.root / "hf").rename(project.root / "hf-of-the-reproduction")
    gone = project.mergegate("reproduce", "hub-parents/latest")
    assert gone.returncode in (2, 3)
    assert "acme/base" in gone.stderr
    assert "Traceback" not in gone.stderr


def put_on_hub(project: Project, name: str, addition: bytes = b"") -> str:
    """Commit a demo model, with this addition to its weights, to a repository of acme and return the commit ID."""
    directory = project.root / f"hub-{name}"
    shutil.copytree(DEMO / "models" / name, directory, dirs_exist_ok=True)
    for path in directory.iterdir():
        weights = path.suffix == ".safetensors"
        data = path.read_bytes()
        path.write_bytes(data + addition if weights else data.replace(b"../base", b"acme/base"))
    return project.stand_in.add_model(f"acme/{name}", directory, private=True).id


def test_the_token_is_nowhere(released: Project) -> None:
    told = json.loads(released.mergegate("run", "elsewhere.yaml", "--json").stdout)
    assert told["status"] == "refused"
    files = [path for path in released.root.rglob("*") if path.is_file()]
    assert {"prefect.db", "report.html"} <= {path.name for path in files}
    assert len([path for path in files if path.name.startswith("output-")]) >= 3
    assert [path for path in files if WRITER.encode() in path.read_bytes()] == []


def test_the_token_is_in_no_command_line(project: Project) -> None:
    seen: list[bytes] = []

    def look(_: object) -> None:
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                seen.append(process.read_bytes())
            except OSError:
                continue  # the process has ended

    project.stand_in.after.append(look)
    try:
        project.mergegate("verify", "acme/demo")
    finally:
        project.stand_in.after.remove(look)
    assert any(b"mergegate.flows.cli" in line for line in seen)
    assert not any(WRITER.encode() in line for line in seen)


@pytest.fixture(scope="module")
def publisher(tmp_path_factory: pytest.TempPathFactory, begin_records: Callable[[Path], None]) -> Iterator[Project]:
    """Yield a project whose two repositories trust the CI job ``job_environment``."""
    demo = profile("acme/demo") + "variants: [{format: rounded, bits: 8}]\n"
    with (
        project_on_hub(tmp_path_factory, begin_records, demo=demo) as project,
        rounded_registered(tmp_path_factory.mktemp("rounded") / "s"),
    ):
        for name in ("acme/demo", "acme/demo-Rounded"):
            project.stand_in.repositories[name] = Repository(name, private=True)
            project.stand_in.oidc.publishers.append(PublisherEntry(name))
        yield project


@contextmanager
def environments_of_children(home: Path) -> Iterator[dict[bytes, set[bytes]]]:
    """Collect the environments of all processes with this state directory, by command line, while the block runs."""
    seen: dict[bytes, set[bytes]] = {}
    ended = Event()

    def look() -> None:
        while not ended.wait(0.2):
            for path in Path("/proc").glob("[0-9]*/environ"):
                with suppress(OSError):  # the process has ended
                    command = path.with_name("cmdline")
                    before, data = command.read_bytes(), path.read_bytes()
                    # A process that starts another program between the reads has two command lines.
                    if str(home).encode() in data and command.read_bytes() == before:
                        seen.setdefault(before, set()).add(data)

    thread = Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def test_a_job_without_a_token_releases_a_merge_and_its_variants(publisher: Project) -> None:
    server = publisher.stand_in
    job = job_environment(server.url)
    # The token that the run obtained for its checks expires in the middle of the publication.
    lost: list[str] = []

    def revoke(request: Any) -> None:
        if "/preupload/" in request.path and not lost:
            lost.extend(server.oidc.tokens)
            server.oidc.tokens.clear()

    server.after.append(revoke)
    with environments_of_children(publisher.root / "state") as environments:
        done = publisher.mergegate("run", "demo.yaml", "--events", "-v", credential=job)
    assert done.returncode == 0, done.stdout + done.stderr
    assert lost
    for name in ("acme/demo", "acme/demo-Rounded"):
        repository = server.repositories[name]
        (version,) = repository.tags
        assert [commit.title for commit in repository.history()] == [f"Release {version}", "initial commit"]

    # A provider that issues one id token in advance: nothing is new, and the release can be verified.
    issued = {"HF_OIDC_ID_TOKEN": server.oidc.issue(server.url)}
    again = publisher.mergegate("run", "demo.yaml", "--json", credential=issued)
    assert json.loads(again.stdout)["status"] == "nothing new"
    reader = {**issued, "HF_OIDC_RESOURCE": "acme/demo"}
    assert publisher.mergegate("verify", "acme/demo", "--key", "release.pub", credential=reader).returncode == 0

    secrets = [secret.encode() for secret in [*server.oidc.secrets(), *lost]]
    files = [path for path in publisher.root.rglob("*") if path.is_file()]
    assert {"prefect.db", "report.html", "output-2.log"} <= {path.name for path in files}
    assert [path for path in files if any(secret in path.read_bytes() for secret in secrets)] == []
    stored = [file.data for repository in server.repositories.values() for file in repository.at("main").tree.values()]
    stored += [path.read_bytes() for path in server.objects.root.rglob("*") if path.is_file()]
    assert not any(secret in data for data in stored for secret in secrets)
    # The supervisor of a confined process is mergegate's own code. The confined process sees none of its environment.
    request_token = job["ACTIONS_ID_TOKEN_REQUEST_TOKEN"].encode()
    programs = {line for line, found in environments.items() if any(request_token in data for data in found)}
    assert len(environments) > len(programs), "confined processes were seen"
    (own,) = (line for line in programs if b"sandbox/supervision.py" not in line)
    assert b"demo.yaml" in own
    assert not any(
        word in data for found in environments.values() for data in found for word in (b"HF_TOKEN=", b"hf_jwt")
    )

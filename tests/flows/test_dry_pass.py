"""The dry pass: it finds a scheduled run with no work, and for every kind of change it is as strict as a full run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from demo_project import Project, expect
from samples import sampled

from mergegate.flows import release
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.base.stage import WorkRequired, dry_pass, require_work_allowed
from mergegate.tasks.release.report import read_history

PROFILE = "profiles/demo.yaml"


Answer = tuple[str, str | None, str]  # status, version and message, which the user sees
Change = Callable[[Project], None]


@pytest.fixture(scope="module")
def own(demo: Project) -> Project:
    """Return the released demo, up to date, with its own copy of the model family whose files tests may change."""
    family = demo.root / "profiles" / "demo"
    source = family.resolve()
    family.unlink()
    shutil.copytree(source, family)
    assert demo.mergegate("run", PROFILE).exit_code == 0
    return demo


def looked(project: Project, *, overrides: tuple[str, ...] = (), publish: bool = True) -> Answer | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project.root)
        patch.setenv("MERGEGATE_HOME", str(project.home))
        outcome = release.run_release_dry_pass(Path(PROFILE), overrides, publish, None)
    return outcome and (outcome.status, outcome.version, outcome.message)


def run(project: Project, monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Run the release in full, without the dry pass."""
    with monkeypatch.context() as patch:
        patch.setattr(release, "run_release_dry_pass", lambda *_: None)
        printed = project.mergegate("run", PROFILE, "--json")
    said = json.loads(printed.stdout)
    return said["status"], said.get("version"), said["message"]


def edited(file: str, old: str, new: str) -> Change:
    def change(project: Project) -> None:
        path = project.root / file
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))

    return change


def flipped(file: str, at: int = -1) -> Change:
    """Return a change that flips one bit of a file and keeps its size."""

    def change(project: Project) -> None:
        path = project.root / file
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.chmod(0o644)
        path.write_bytes(content)

    return change


def removed(pattern: str) -> Change:
    def change(project: Project) -> None:
        found = sorted(project.root.glob(pattern))
        assert found
        for path in found:
            path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)

    return change


def damaged(pattern: str) -> Change:
    """Return a change that flips one bit in the last byte of the first file that matches the pattern."""

    def change(project: Project) -> None:
        flipped(str(min(project.root.glob(pattern)).relative_to(project.root)))(project)

    return change


def led_elsewhere(project: Project) -> None:
    latest = project.latest
    other = latest.resolve().with_name("0123456789ab")
    shutil.copytree(latest.resolve(), other)
    latest.unlink()
    latest.symlink_to(other.name)


def touched(project: Project) -> None:
    for path in (project.root / "profiles" / "demo").rglob("*.safetensors"):
        path.touch()


# Every kind of change: the function that applies it to the project, and whether it leaves work to do.
MODELS, STORE = "profiles/demo/models", ".mergegate/store"
CHANGES: dict[str, tuple[Change, bool]] = {
    "nothing": (lambda project: None, False),
    "a comment in the profile": (edited(PROFILE, "name: demo", "name: demo  # of two skills"), False),
    "another threshold": (edited(PROFILE, "max_drop: 3", "max_drop: 2"), True),
    "another target": (edited(PROFILE, "../releases/demo", "../releases/elsewhere"), True),
    "another version": (edited(PROFILE, "to: directory", "to: directory, version: v2"), True),
    "another recipe": (edited(PROFILE, "recipes/ties.yaml", "recipes/dare_ties.yaml"), True),
    "a limit of no stage": (edited(PROFILE, "recipe:", "limits: {stages: {merg: 1 h}}\nrecipe:"), True),
    "a profile that means nothing": (edited(PROFILE, "recipe:", "recipes:"), True),
    "a bit of a weight": (flipped(f"{MODELS}/reverser/model.safetensors"), True),
    "weights that were touched": (touched, True),
    "a parent that is gone": (removed(f"{MODELS}/shifter"), True),
    "a configuration": (edited(f"{MODELS}/base/config.json", "{", '{"of": "ours", '), True),
    "a tokenizer": (edited(f"{MODELS}/base/tokenizer.json", "{", "{ "), True),
    "a licence": (edited(f"{MODELS}/reverser/README.md", "apache-2.0", "cc-by-nc-4.0"), True),
    "a document of a task": (edited("profiles/demo/data/copy.jsonl", '"', ' "'), True),
    "how a task is asked": (edited("profiles/demo/tasks/copy.yaml", "doc_to_text: ", "doc_to_text: 'say ' "), True),
    "a held-out document": (edited("profiles/demo/data/held-out.jsonl", "a", "b"), True),
    "a release that is gone": (removed("releases/demo/*"), True),
    "latest that leads elsewhere": (led_elsewhere, True),
    "a bit of the release": (damaged("releases/demo/latest/*.safetensors"), True),
    **{
        f"the store without its {stage}": (removed(f"{STORE}/{stage}"), True)
        for stage in ("merge", "evaluate", "gate", "report", "licenses")
    },
    "a bit of the merge": (damaged(f"{STORE}/merge/*/*.safetensors"), True),
    "hashes that nobody remembers": (removed(f"{STORE}/hashes.sqlite"), True),
}


@pytest.fixture
def copied(own: Project, tmp_path: Path) -> Project:
    project = Project(tmp_path / "project")
    shutil.copytree(own.root, project.root, symlinks=True)
    return project


@pytest.mark.proof
@pytest.mark.parametrize("kind", sampled(CHANGES, list(CHANGES)[:1], pytest.mark.proof))
def test_a_dry_pass_returns_the_outcome_of_the_run_or_nothing(
    copied: Project, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    project = copied
    run(project, monkeypatch)  # The copied files are new to the hash cache, so this run hashes them.
    assert looked(project) is not None
    change, is_work = CHANGES[kind]
    change(project)
    found = looked(project)
    assert (found is None) == is_work
    said = run(project, monkeypatch)
    assert found in (None, said)


@pytest.mark.story
def test_a_run_without_work_needs_no_prefect_and_is_archived(own: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_history(own.home / "reports").records
    log = own.root / "machines.jsonl"
    monkeypatch.setenv("MERGEGATE_LOG", str(log))
    monkeypatch.setattr("mergegate.flows.prefect_api.configured_url", lambda: None)
    monkeypatch.setattr("mergegate.flows.prefect_api.local_api", None)  # Any call fails.
    expect(own.mergegate("run", PROFILE), 0, "nothing new", "= evaluate")
    *others, last = read_history(own.home / "reports").records
    assert (len(others), last.status, last.flow) == (len(before), "nothing new", "release")
    assert (own.home / "reports" / last.report).is_file()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines[-1] | {"event": "run ended", "status": "nothing new", "profile": "demo"} == lines[-1]
    assert {"merge", "gate", "publish"} <= {one["stage"] for one in lines[:-1]}


@pytest.mark.story
def test_a_run_that_was_not_published_has_something_to_do_when_it_may(own: Project) -> None:
    own.mergegate("run", PROFILE, "--no-publish")
    said = looked(own, publish=False)
    assert said is not None
    assert said[0] == "passed"
    assert looked(own, overrides=("publish.path=../releases/new",)) is None


@pytest.mark.story
def test_what_other_people_look_at_is_told_to_their_server(own: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mergegate.flows.prefect_api.configured_url", lambda: "http://127.0.0.1:4200/api")
    before = looked(own)
    monkeypatch.setattr(release, "run_release_dry_pass", lambda *_: pytest.fail("nobody is to look"))
    printed = own.mergegate("run", PROFILE, "--json")
    assert before is not None
    assert json.loads(printed.stdout)["status"] == "nothing new"


@pytest.mark.story
def test_an_invalid_setting_is_refused(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MERGEGATE_STORE_QUOTA", "much")
    assert project.mergegate("run", PROFILE).exit_code == 2


@pytest.mark.story
def test_newer_libraries_or_a_newer_stage_are_something_to_do(own: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    from mergegate.tasks.quality.gate import gate

    with monkeypatch.context() as patch:
        patch.setenv("MERGEGATE_STORE_QUOTA", "much")
        assert looked(own) is None
    with monkeypatch.context() as patch:
        patch.setattr(gate, "version", gate.version + 1)
        assert looked(own) is None
    with monkeypatch.context() as patch:
        patch.setattr("mergegate.tasks.base.stage.environment._installed", lambda name: "99")
        assert looked(own) is None
    assert looked(own) is not None


def test_nothing_is_read_for_its_hash_and_nobody_takes_the_interrupt_for_his_own(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"much to read")
    memo = HashMemo(tmp_path / "hashes.sqlite", lambda path: require_work_allowed(f"read {path}"))

    def careless() -> None:
        try:
            memo.sha256(tmp_path / "file")
        except Exception:
            pytest.fail("taken for an error")

    with dry_pass(), pytest.raises(WorkRequired, match="file"):
        careless()
    known = memo.sha256(tmp_path / "file")
    with dry_pass():
        assert memo.sha256(tmp_path / "file") == known

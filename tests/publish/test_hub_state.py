"""Test the next step of a publication for every possible state of a Hub repository."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mergegate.tasks.checkpoints.hub.access import RemoteFile
from mergegate.tasks.publish.targets.contract import PublicationBlocked
from mergegate.tasks.publish.targets.hub_state import (
    ChangeSettings,
    CreateBranch,
    CreateRepository,
    DeleteBranch,
    DesiredFile,
    DesiredState,
    Done,
    Head,
    ObservedState,
    Promote,
    StageFiles,
    Step,
    Tag,
    next_step,
)

WEIGHTS = DesiredFile(size=9, sha256="a" * 64, blob=None)
CARD = DesiredFile(size=4, sha256="b" * 64, blob="b" * 40)
DESIRED = DesiredState("v2", {"README.md": CARD, "model.safetensors": WEIGHTS})
PUBLIC = replace(DESIRED, visibility="public")

ATTRIBUTES = RemoteFile(10, "0" * 40)
RELEASED = {
    ".gitattributes": ATTRIBUTES,
    "README.md": RemoteFile(4, "b" * 40),
    "model.safetensors": RemoteFile(9, "1" * 40, "a" * 64),
}
OLD = {**RELEASED, "model.safetensors": RemoteFile(9, "2" * 40, "c" * 64), "model-2.safetensors": ATTRIBUTES}

EMPTY = Head("e" * 40, {".gitattributes": ATTRIBUTES})
OLD_MAIN = Head("1" * 40, OLD)
STAGED = Head("5" * 40, RELEASED)
NEW_MAIN = Head("2" * 40, RELEASED)
FRESH = ObservedState(exists=True, main=EMPTY)
REPLACING = ObservedState(exists=True, main=OLD_MAIN, tagged=None, tags={"v1": OLD_MAIN.commit})
BOTH = ("README.md", "model.safetensors")


def case(title: str, *values: object) -> Any:
    return pytest.param(*values, id=title)


REPLACED = (("model.safetensors",), ("model-2.safetensors",))  # files to send and to delete
TAGGED = replace(FRESH, main=NEW_MAIN, tagged=NEW_MAIN)
GATED = replace(FRESH, private=False, gated="auto")


@pytest.mark.parametrize(
    ("desired", "observed", "step"),
    [
        case("no repository", DESIRED, ObservedState(exists=False), CreateRepository()),
        case("empty repository", DESIRED, FRESH, CreateBranch(EMPTY.commit)),
        case("empty branch", DESIRED, replace(FRESH, staged=EMPTY), StageFiles(EMPTY.commit, BOTH, ())),
        case(
            "branch with the old release",
            *(DESIRED, replace(REPLACING, staged=OLD_MAIN), StageFiles(OLD_MAIN.commit, *REPLACED)),
        ),
        case("staged", DESIRED, replace(REPLACING, staged=STAGED), Promote(OLD_MAIN.commit, STAGED, *REPLACED)),
        case("promoted, not tagged", DESIRED, replace(REPLACING, main=NEW_MAIN, staged=STAGED), Tag(NEW_MAIN.commit)),
        case(
            "tagged, branch still there",
            *(DESIRED, replace(REPLACING, main=NEW_MAIN, staged=STAGED, tagged=NEW_MAIN)),
            DeleteBranch("mergegate-staging/v2"),
        ),
        case(
            "the branch of a run that died",
            *(DESIRED, replace(REPLACING, main=NEW_MAIN, tagged=NEW_MAIN, leftovers=("mergegate-staging/v0",))),
            DeleteBranch("mergegate-staging/v0"),
        ),
        case("released", DESIRED, TAGGED, Done(NEW_MAIN.commit)),
        case("the same content under a new name", DESIRED, replace(FRESH, main=NEW_MAIN), Tag(NEW_MAIN.commit)),
        case(
            "another release is current",
            *(DESIRED, replace(REPLACING, tagged=NEW_MAIN), Promote(OLD_MAIN.commit, NEW_MAIN, *REPLACED)),
        ),
        case(
            "what a person changed after the release stays",
            *(DESIRED, ObservedState(exists=True, main=Head("9" * 40, OLD), tagged=NEW_MAIN), Done(NEW_MAIN.commit)),
        ),
        case("still private", PUBLIC, replace(FRESH, staged=STAGED), Promote(EMPTY.commit, STAGED, BOTH, ())),
        case(
            "complete: now it is opened",
            *(PUBLIC, replace(TAGGED, staged=STAGED), ChangeSettings(private=False, gated=False)),
        ),
        case(
            "a repository that was made private after its release stays private", PUBLIC, TAGGED, Done(NEW_MAIN.commit)
        ),
        case(
            "gated before anything is staged",
            *(replace(PUBLIC, gated="manual"), replace(REPLACING, private=False)),
            ChangeSettings(private=False, gated="manual"),
        ),
        case("the gate is lifted only for the release", PUBLIC, GATED, CreateBranch(EMPTY.commit)),
        case(
            "the gate is lifted with the release",
            *(PUBLIC, replace(GATED, main=NEW_MAIN, staged=STAGED, tagged=NEW_MAIN)),
            ChangeSettings(private=False, gated=False),
        ),
    ],
)
def test_the_next_step_follows_from_the_state(desired: DesiredState, observed: ObservedState, step: Step) -> None:
    assert next_step(desired, observed) == step


@pytest.mark.parametrize(
    ("observed", "expected_head", "found"),
    [
        case("tag", replace(FRESH, tagged=OLD_MAIN), None, "already published with other content"),
        case("main changed meanwhile", replace(REPLACING, staged=STAGED), EMPTY.commit, "main is at 1111"),
        case("changed before a return", replace(REPLACING, tagged=NEW_MAIN), EMPTY.commit, "main is at 1111"),
        case("public, though private wanted", replace(FRESH, private=False), None, "the repository is public"),
        case("no main", ObservedState(exists=True), None, "no branch 'main'"),
    ],
)
def test_a_step_that_would_break_a_guarantee_is_blocked_with_a_remedy(
    observed: ObservedState, expected_head: str | None, found: str
) -> None:
    step = next_step(DESIRED, observed, expected_head)
    assert isinstance(step, PublicationBlocked)
    assert found in step.found
    assert step.remedy


def test_a_main_with_this_release_is_not_a_foreign_change() -> None:
    assert next_step(DESIRED, replace(FRESH, main=NEW_MAIN, staged=STAGED), expected_head=EMPTY.commit) == Tag(
        NEW_MAIN.commit
    )


@pytest.mark.parametrize(
    ("remote", "held"),
    [
        (RemoteFile(9, "1" * 40, "a" * 64), True),
        (RemoteFile(9, "1" * 40, "d" * 64), False),
        (RemoteFile(8, "1" * 40, "a" * 64), False),
        (RemoteFile(9, "1" * 40), False),
        (None, False),
    ],
)
def test_a_large_file_is_known_by_its_sha256(remote: RemoteFile | None, held: bool) -> None:
    assert WEIGHTS.matches(remote) is held


@pytest.mark.parametrize(("blob", "held"), [("b" * 40, True), ("c" * 40, False)])
def test_a_small_file_is_known_by_its_git_id(blob: str, held: bool) -> None:
    assert CARD.matches(RemoteFile(4, blob)) is held


def test_the_steps_lead_from_an_empty_hub_to_a_release() -> None:
    observed, steps = ObservedState(exists=False), []
    while not isinstance(step := next_step(PUBLIC, observed, EMPTY.commit), Done):
        steps.append(type(step).__name__)
        match step:
            case CreateRepository():
                observed = FRESH
            case CreateBranch():
                observed = replace(observed, staged=observed.main)
            case StageFiles():
                observed = replace(observed, staged=STAGED)
            case Promote():
                observed = replace(observed, main=NEW_MAIN)
            case Tag(commit):
                observed = replace(observed, tagged=NEW_MAIN, tags={"v2": commit})
            case ChangeSettings(private, gated):
                observed = replace(observed, private=private, gated=gated)
            case DeleteBranch():
                observed = replace(observed, staged=None)
    assert " ".join(steps) == "CreateRepository CreateBranch StageFiles Promote Tag ChangeSettings DeleteBranch"

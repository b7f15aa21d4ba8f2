"""Test the next step of a publication for every possible state of a Hub repository."""

from __future__ import annotations

from dataclasses import replace

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


@pytest.mark.parametrize(
    ("desired", "observed", "step"),
    [
        pytest.param(DESIRED, ObservedState(exists=False), CreateRepository(), id="no repository"),
        pytest.param(DESIRED, FRESH, CreateBranch(EMPTY.commit), id="empty repository"),
        pytest.param(DESIRED, replace(FRESH, staged=EMPTY), StageFiles(EMPTY.commit, BOTH, ()), id="empty branch"),
        pytest.param(
            DESIRED,
            replace(REPLACING, staged=OLD_MAIN),
            StageFiles(OLD_MAIN.commit, ("model.safetensors",), ("model-2.safetensors",)),
            id="branch with the old release",
        ),
        pytest.param(
            DESIRED,
            replace(REPLACING, staged=STAGED),
            Promote(OLD_MAIN.commit, STAGED, ("model.safetensors",), ("model-2.safetensors",)),
            id="staged",
        ),
        pytest.param(
            DESIRED, replace(REPLACING, main=NEW_MAIN, staged=STAGED), Tag(NEW_MAIN.commit), id="promoted, not tagged"
        ),
        pytest.param(
            DESIRED,
            replace(REPLACING, main=NEW_MAIN, staged=STAGED, tagged=NEW_MAIN),
            DeleteBranch("mergegate-staging/v2"),
            id="tagged, branch still there",
        ),
        pytest.param(
            DESIRED,
            replace(REPLACING, main=NEW_MAIN, tagged=NEW_MAIN, leftovers=("mergegate-staging/v0",)),
            DeleteBranch("mergegate-staging/v0"),
            id="the branch of a run that died",
        ),
        pytest.param(DESIRED, replace(FRESH, main=NEW_MAIN, tagged=NEW_MAIN), Done(NEW_MAIN.commit), id="released"),
        pytest.param(
            DESIRED, replace(FRESH, main=NEW_MAIN), Tag(NEW_MAIN.commit), id="the same content under a new name"
        ),
        pytest.param(
            DESIRED,
            replace(REPLACING, tagged=NEW_MAIN),
            Promote(OLD_MAIN.commit, NEW_MAIN, ("model.safetensors",), ("model-2.safetensors",)),
            id="another release is current",
        ),
        pytest.param(
            DESIRED,
            ObservedState(exists=True, main=Head("9" * 40, OLD), tagged=NEW_MAIN),
            Done(NEW_MAIN.commit),
            id="what a person changed after the release stays",
        ),
        pytest.param(
            PUBLIC, replace(FRESH, staged=STAGED), Promote(EMPTY.commit, STAGED, BOTH, ()), id="still private"
        ),
        pytest.param(
            PUBLIC,
            replace(FRESH, main=NEW_MAIN, staged=STAGED, tagged=NEW_MAIN),
            ChangeSettings(private=False, gated=False),
            id="complete: now it is opened",
        ),
        pytest.param(
            PUBLIC,
            replace(FRESH, main=NEW_MAIN, tagged=NEW_MAIN),
            Done(NEW_MAIN.commit),
            id="a repository that was made private after its release stays private",
        ),
        pytest.param(
            replace(PUBLIC, gated="manual"),
            replace(REPLACING, private=False),
            ChangeSettings(private=False, gated="manual"),
            id="gated before anything is staged",
        ),
        pytest.param(
            PUBLIC,
            replace(FRESH, private=False, gated="auto"),
            CreateBranch(EMPTY.commit),
            id="the gate is lifted only for the release",
        ),
        pytest.param(
            PUBLIC,
            replace(FRESH, private=False, gated="auto", main=NEW_MAIN, staged=STAGED, tagged=NEW_MAIN),
            ChangeSettings(private=False, gated=False),
            id="the gate is lifted with the release",
        ),
    ],
)
def test_the_next_step_follows_from_the_state(desired: DesiredState, observed: ObservedState, step: Step) -> None:
    assert next_step(desired, observed) == step


@pytest.mark.parametrize(
    ("observed", "expected_head", "found"),
    [
        pytest.param(replace(FRESH, tagged=OLD_MAIN), None, "already published with other content", id="tag"),
        pytest.param(replace(REPLACING, staged=STAGED), EMPTY.commit, "main is at 1111", id="main changed meanwhile"),
        pytest.param(
            replace(REPLACING, tagged=NEW_MAIN), EMPTY.commit, "main is at 1111", id="changed before a return"
        ),
        pytest.param(
            replace(FRESH, private=False), None, "the repository is public", id="public, though private wanted"
        ),
        pytest.param(ObservedState(exists=True), None, "no branch 'main'", id="no main"),
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
    assert steps == [
        "CreateRepository",
        "CreateBranch",
        "StageFiles",
        "Promote",
        "Tag",
        "ChangeSettings",
        "DeleteBranch",
    ]

"""Test the next step of a publication for every possible state of a Hub repository."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mergegate.tasks.models.checkpoints.hub.access import RemoteFile
from mergegate.tasks.release.publish.targets.hub_publication import (
    DesiredFile,
    DesiredState,
    Head,
    ObservedState,
    Step,
    next_step,
)
from mergegate.tasks.release.publish.targets.reconcile import PublicationBlocked

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


REPLACED = (("model.safetensors",), ("model-2.safetensors",))  # files to send and to delete
DONE, OPEN = Step("Done", NEW_MAIN.commit), Step("ChangeSettings", gated=False)
PROMOTED = replace(REPLACING, main=NEW_MAIN)
TAGGED = replace(FRESH, main=NEW_MAIN, tagged=NEW_MAIN)
GATED = replace(FRESH, private=False, gated="auto")
EDITED = ObservedState(exists=True, main=Head("9" * 40, OLD), tagged=NEW_MAIN)
LEFT = ("mergegate-staging/v0",)
DELETE, DELETE_LEFT = (Step("DeleteBranch", branch=name) for name in ("mergegate-staging/v2", *LEFT))
STATES = {
    "no repository": (DESIRED, ObservedState(exists=False), Step("CreateRepository")),
    "empty repository": (DESIRED, FRESH, Step("CreateBranch", EMPTY.commit)),
    "empty branch": (DESIRED, replace(FRESH, staged=EMPTY), Step("StageFiles", EMPTY.commit, BOTH, ())),
    "old branch": (DESIRED, replace(REPLACING, staged=OLD_MAIN), Step("StageFiles", OLD_MAIN.commit, *REPLACED)),
    "staged": (DESIRED, replace(REPLACING, staged=STAGED), Step("Promote", OLD_MAIN.commit, *REPLACED, STAGED)),
    "promoted, not tagged": (DESIRED, replace(PROMOTED, staged=STAGED), Step("Tag", NEW_MAIN.commit)),
    "tagged": (
        DESIRED,
        replace(PROMOTED, staged=STAGED, tagged=NEW_MAIN),
        Step("DeleteBranch", branch="mergegate-staging/v2"),
    ),
    "the branch of a run that died": (
        DESIRED,
        replace(PROMOTED, tagged=NEW_MAIN, leftovers=LEFT),
        Step("DeleteBranch", branch=LEFT[0]),
    ),
    "released": (DESIRED, TAGGED, DONE),
    "the same content under a new name": (DESIRED, replace(FRESH, main=NEW_MAIN), Step("Tag", NEW_MAIN.commit)),
    "another is current": (
        DESIRED,
        replace(REPLACING, tagged=NEW_MAIN),
        Step("Promote", OLD_MAIN.commit, *REPLACED, NEW_MAIN),
    ),
    "what a person changed after the release stays": (DESIRED, EDITED, DONE),
    "still private": (PUBLIC, replace(FRESH, staged=STAGED), Step("Promote", EMPTY.commit, BOTH, (), STAGED)),
    "complete: now it is opened": (PUBLIC, replace(TAGGED, staged=STAGED), OPEN),
    "a repository that was made private after its release stays private": (PUBLIC, TAGGED, DONE),
    "gated before anything is staged": (
        replace(PUBLIC, gated="manual"),
        replace(REPLACING, private=False),
        Step("ChangeSettings", gated="manual"),
    ),
    "the gate is lifted only for the release": (PUBLIC, GATED, Step("CreateBranch", EMPTY.commit)),
    "the gate is lifted with it": (PUBLIC, replace(GATED, main=NEW_MAIN, staged=STAGED, tagged=NEW_MAIN), OPEN),
}


@pytest.mark.parametrize(("desired", "observed", "step"), STATES.values(), ids=STATES)
def test_the_next_step_follows_from_the_state(desired: DesiredState, observed: ObservedState, step: Step) -> None:
    assert next_step(desired, observed) == step


BLOCKED = {
    "tag": (replace(FRESH, tagged=OLD_MAIN), None, "already published with other content"),
    "main changed meanwhile": (replace(REPLACING, staged=STAGED), EMPTY.commit, "main is at 1111"),
    "changed before a return": (replace(REPLACING, tagged=NEW_MAIN), EMPTY.commit, "main is at 1111"),
    "public, though private wanted": (replace(FRESH, private=False), None, "the repository is public"),
    "no main": (ObservedState(exists=True), None, "no branch 'main'"),
}


@pytest.mark.parametrize(("observed", "expected_head", "found"), BLOCKED.values(), ids=BLOCKED)
def test_a_step_that_would_break_a_guarantee_is_blocked_with_a_remedy(
    observed: ObservedState, expected_head: str | None, found: str
) -> None:
    step = next_step(DESIRED, observed, expected_head)
    assert isinstance(step, PublicationBlocked)
    assert found in step.found
    assert step.remedy


def test_a_main_with_this_release_is_not_a_foreign_change() -> None:
    observed = replace(FRESH, main=NEW_MAIN, staged=STAGED)
    assert next_step(DESIRED, observed, expected_head=EMPTY.commit) == Step("Tag", NEW_MAIN.commit)


@pytest.mark.parametrize(
    ("file", "remote", "held"),
    [
        (WEIGHTS, RemoteFile(9, "1" * 40, "a" * 64), True), (WEIGHTS, RemoteFile(9, "1" * 40, "d" * 64), False),
        (WEIGHTS, RemoteFile(8, "1" * 40, "a" * 64), False), (WEIGHTS, RemoteFile(9, "1" * 40), False),
        (WEIGHTS, None, False), (CARD, RemoteFile(4, "b" * 40), True), (CARD, RemoteFile(4, "c" * 40), False),
    ],
)  # fmt: skip
def test_a_large_file_is_known_by_its_sha256_and_a_small_one_by_its_git_id(
    file: DesiredFile, remote: RemoteFile | None, held: bool
) -> None:
    assert file.matches(remote) is held

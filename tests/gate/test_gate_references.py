"""A guard's reference is a parent, the best parent or the current release."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gate_samples import GUARD, gate_scores, part, right_on, scores_of

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files.hashing import HashMemo
from mergegate.tasks.models.checkpoints.model import Model
from mergegate.tasks.quality.evaluation.scoring.document_scores import PairedScores
from mergegate.tasks.quality.gate import BEST_PARENT, CHAMPION, Guard, check_guards, needs_champion
from mergegate.tasks.quality.gate.evidence import ReferenceChoice, measure_guard
from mergegate.tasks.quality.gate.regression import judge_guards
from mergegate.tasks.quality.gate.statistics import selection_bias
from mergegate.tasks.release.publish.releases.origin import load_released_model
from mergegate.tasks.release.publish.targets.directory import DirectoryTarget

BEST = GUARD.model_copy(update={"guarded_by": BEST_PARENT})
REIGNING = GUARD.model_copy(update={"guarded_by": CHAMPION})


@pytest.mark.parametrize(("reference", "suggestion"), [("revreser", "reverser"), ("champoin", "champion")])
def test_an_unknown_reference_is_rejected_with_a_suggestion(reference: str, suggestion: str) -> None:
    with pytest.raises(InvalidInput, match=f"did you mean '{suggestion}'") as caught:
        check_guards([GUARD, Guard(task="x", guarded_by=reference)], ["base", "reverser"])
    assert caught.value.where == "evaluate.tasks[1].guarded_by"


@pytest.mark.parametrize("reference", [BEST_PARENT, CHAMPION])
def test_best_parent_and_champion_need_no_parent_with_that_name(reference: str) -> None:
    check_guards([Guard(task="x", guarded_by=reference)], ["base"])


def test_a_parent_called_champion_is_ambiguous() -> None:
    with pytest.raises(InvalidInput, match="also the name of a parent"):
        check_guards([REIGNING], ["base", "champion"])


# --- The best parent


def test_the_best_parent_is_the_one_that_scores_best_on_the_task(tmp_path: Path) -> None:
    (guard,) = gate_scores(scores_of(tmp_path, base=100, reverser=395, shifter=200, merge=340), BEST).guards
    assert (guard.reference, guard.candidates, guard.outcome) == ("reverser", 3, "fail")
    assert guard.reason.startswith("reverse lost 13.8 points against reverser (the best of 3 parents), at least ")
    assert f"Choosing the best parent adds up to {guard.selection_bias:.1f} points to the drop" in guard.reason


def test_merge_and_champion_are_not_parents(tmp_path: Path) -> None:
    (guard,) = gate_scores(scores_of(tmp_path, base=100, champion=400, merge=390), BEST).guards
    assert (guard.reference, guard.candidates) == ("base", 1)


@pytest.mark.story
def test_choosing_among_equal_parents_does_not_make_alarms_more_frequent() -> None:
    rng = np.random.default_rng(31)
    strict = GUARD.model_copy(update={"max_drop": 0.0, "guarded_by": BEST_PARENT})
    runs, n, alarms, naive = 400, 300, 0, 0
    for _ in range(runs):
        models = (rng.random((4, n)) < 0.7).astype(float)  # three parents and a merge, all equally good
        *parents, merge = models
        chosen = max(parents, key=np.sum)
        pair = PairedScores(tuple(("reverse", doc) for doc in range(n)), tuple(chosen), tuple(merge))
        bias = selection_bias([parent.tolist() for parent in parents])
        guard = measure_guard(strict, "acc,none", pair, True, choice=ReferenceChoice(BEST_PARENT, 3, bias))
        alarms += judge_guards([guard], 0.95)[0].outcome == "fail"
        naive += guard.interval(0.95).low > 0
    assert alarms / runs <= 0.05 + 3 * (0.05 * 0.95 / runs) ** 0.5
    assert naive / runs > 0.08


# --- The champion


def test_a_merge_that_is_worse_than_the_champion_fails(tmp_path: Path) -> None:
    (guard,) = gate_scores(scores_of(tmp_path, base=100, champion=400, merge=340), REIGNING).guards
    assert guard.reason == "reverse lost 15.0 points against champion, at least 11.9; max_drop is 3"


def test_the_first_release_notes_that_there_is_no_champion(tmp_path: Path) -> None:
    found = scores_of(tmp_path, reverser=400, merge=400)
    verdict = gate_scores(found, GUARD, REIGNING, first_release=True)
    assert (verdict.outcome, len(verdict.guards)) == ("pass", 1)
    assert verdict.notes == ("reverse: no release to compare with yet",)
    alone = gate_scores(found, REIGNING, first_release=True)
    assert (alone.publishable, alone.summary()) == (True, "reverse: no release to compare with yet")


def test_a_champion_without_scores_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no scores for champion"):
        gate_scores(scores_of(tmp_path, reverser=400, merge=400), REIGNING)


def test_only_some_guards_need_a_champion() -> None:
    assert needs_champion([GUARD, REIGNING])
    assert not needs_champion([GUARD, BEST])


def checkpoint(directory: Path, weights: bytes, **beside: str) -> Path:
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(weights)
    (directory / "config.json").write_text("{}")
    for name, text in beside.items():
        (directory / name.replace("_", ".")).write_text(text)
    return directory


def released(root: Path, weights: bytes) -> DirectoryTarget:
    checkpoint(root / "releases" / "v1", weights, README_md="card", provenance_json=json.dumps({"of": "v1"}))
    (root / "releases" / "latest").symlink_to("v1")
    return DirectoryTarget(path=Path("releases"))


def champion_of(tmp_path: Path, merge_weights: bytes, target: DirectoryTarget | None) -> Model | None:
    """Return the released model that a merge with these weights is compared with."""
    stored = checkpoint(tmp_path / "store", merge_weights, manifest_json="{}", value_json="{}")
    merge = Model(name="merge", digest="d" * 64, directory=stored)
    return load_released_model(target, tmp_path, merge, HashMemo(tmp_path / "hashes.sqlite"))


def test_the_champion_is_the_latest_release(tmp_path: Path) -> None:
    champion = champion_of(tmp_path, b"new", released(tmp_path, b"old"))
    assert (champion.name, champion.directory) == (CHAMPION, (tmp_path / "releases" / "v1").resolve())
    assert champion.digest != "d" * 64


def test_a_released_merge_is_its_own_champion_and_evaluated_once(tmp_path: Path) -> None:
    assert champion_of(tmp_path, b"same", released(tmp_path, b"same")).digest == "d" * 64


@pytest.mark.parametrize("target", [DirectoryTarget(path=Path("releases")), None])
def test_before_the_first_release_there_is_no_champion(tmp_path: Path, target: DirectoryTarget | None) -> None:
    assert champion_of(tmp_path, b"new", target) is None


def test_a_task_in_parts_is_compared_with_the_best_parent_over_all_of_them(tmp_path: Path) -> None:
    # Each parent is better on one half; ``reverser`` is better overall.
    right = {"base": (range(200), range(200, 250)), "reverser": (range(190), range(200, 400))}
    found = {
        name: [part(tmp_path / f"{name}1", right_on(first, 200)), part(tmp_path / f"{name}2", right_on(last, 400, 200))]
        for name, (first, last) in right.items()
    }
    found["merge"] = [part(tmp_path / "m", right_on(range(400), 400))]
    assert gate_scores(found, BEST).guards[0].reference == "reverser"

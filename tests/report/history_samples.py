"""Generate a realistic history of 100 nightly runs for three profiles."""

from __future__ import annotations

import random

from builders.results import build

from mergegate.tasks.report import RunParent, RunRecord, RunScore, RunStage

BEGAN = 1_790_000_000.0  # seconds since the epoch
DAY = 86_400.0
TASKS = {
    "support-assistant": ("mmlu", "gsm8k", "tickets"),
    "code-helper": ("humaneval", "mbpp", "ifeval", "mmlu"),
    "translator-eu": ("flores_de", "flores_fr", "flores_pl"),
}
RECIPE = "merge_method: ties\nbase_model: acme/base\nparameters: {{density: {density}}}\n"


def nights(count: int = 100, seed: int = 1) -> list[RunRecord]:
    """Return the nightly runs of all profiles, in the order in which they ended."""
    told = []
    chance = random.Random(seed)
    for number, (profile, tasks) in enumerate(TASKS.items()):
        levels = {task: chance.uniform(45, 88) for task in tasks}
        revision, version = 0, 0
        for night in range(count):
            if chance.random() < 0.12:
                revision += 1
                levels = {task: level + chance.gauss(0.15, 0.8) for task, level in levels.items()}
            scores = tuple(_score(task, level, chance) for task, level in levels.items())
            ending = chance.random()
            status = "refused" if any(score.drop > 3 for score in scores) else "released"
            if ending < 0.04:
                status = "invalid" if ending < 0.01 else "refused"
                scores = ()
            elif ending < 0.05:
                status, scores = "failed", ()
            elif revision == version and status == "released" and night:
                status = "nothing new"
            if status == "released":
                version = revision
            recipe = RECIPE.format(density=0.5 if night < 60 else 0.4)
            began = BEGAN + night * DAY + number * 4000
            run = f"{profile}-{night}"
            told.append(_night(run, profile, began, status, scores, revision, recipe, chance))
    return sorted(told, key=lambda record: record.ended)


STAGES = {"licenses": 0.4, "compat": 2.0, "merge": 260.0, "perplexity": 410.0, "evaluate": 2900.0}
STAGES |= {"gate": 0.6, "report": 4.0, "publish": 95.0}


def _night(
    run: str,
    profile: str,
    began: float,
    status: str,
    scores: tuple[RunScore, ...],
    revision: int,
    recipe: str,
    chance: random.Random,
) -> RunRecord:
    fresh, known = status in ("released", "refused") and bool(scores), bool(scores)
    version = f"{revision:04x}c0ffee12"
    messages = {
        "released": f"released {profile} {version}",
        "nothing new": f"nothing new: {version} is released",
        "failed": f"{profile} failed: ConnectionResetError: reset by peer",
        "invalid": f"{profile}.yaml: unknown key 'recepe'",
        "refused": f"{profile} is not released\n{_worst(scores)}",
    }
    stages = tuple(
        RunStage(
            name=name, seconds=seconds * (chance.uniform(0.8, 1.3) if fresh else 0.02), calls=1, cached=not fresh,
            status="made" if fresh else "cached",
        )
        for name, seconds in STAGES.items()
    )  # fmt: skip
    parents = tuple(
        RunParent(name=name, ref=f"acme/{name}", revision=f"{revision:02d}" * 20, digest=f"{revision:02d}" * 8)
        for name in ("base", "chat", "tools")
    )
    fields = {"status": status, "message": messages[status], "ended": began + chance.uniform(0, 900)}
    if known:
        fields |= {"recipe": recipe, "parents": parents, "scores": scores, "bytes_merged": 16_000_000_000}
        fields |= {"perplexity": 1.0 + chance.uniform(0, 0.02), "perplexity_limit": 1.05}
        fields |= {"seconds": sum(stage.seconds for stage in stages)}
    if fresh:
        fields["bytes_made"] = 16_000_000_000
    if status in ("released", "nothing new"):
        fields["version"] = version
    method = "ties of 3 over acme-base"
    shown = stages if known else stages[:1]
    return build(RunRecord, run=run, profile=profile, method=method, stages=shown, **fields)


def _score(task: str, level: float, chance: random.Random) -> RunScore:
    drop = chance.gauss(0.6, 0.9)
    bounds = {"drop": drop, "low": drop - 1.1, "high": drop + 1.1}
    return build(RunScore, task=task, reference="chat", merge=level, outcome="fail" if drop > 3 else "pass", **bounds)


def _worst(scores: tuple[RunScore, ...]) -> str:
    if not scores:
        return "licences: cc-by-nc-4.0 (of chat) does not permit commercial use"
    worst = max(scores, key=lambda score: score.drop)
    return f"{worst.task}: {worst.drop:.1f} points below chat [{worst.low:.1f}, {worst.high:.1f}], more than 3"

"""Generate a realistic history of 100 nightly runs for three profiles.

Parents move, scores drift, checks refuse a merge and one run crashes. Equal seeds give equal histories.
"""

from __future__ import annotations

import random

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
            told.append(
                night_of_samples(profile, night, number, status, scores, revision, 0.5 if night < 60 else 0.4, chance)
            )
    return sorted(told, key=lambda record: record.ended)


STAGES = {
    "licenses": 0.4,
    "compat": 2.0,
    "merge": 260.0,
    "perplexity": 410.0,
    "evaluate": 2900.0,
    "gate": 0.6,
    "report": 4.0,
    "publish": 95.0,
}


def night_of_samples(
    profile: str,
    night: int,
    number: int,
    status: str,
    scores: tuple[RunScore, ...],
    revision: int,
    density: float,
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
            name=name,
            seconds=seconds * (chance.uniform(0.8, 1.3) if fresh else 0.02),
            calls=1,
            cached=not fresh,
            status="made" if fresh else "cached",
        )
        for name, seconds in STAGES.items()
    )
    parents = tuple(
        RunParent(name=name, ref=f"acme/{name}", revision=f"{revision:02d}" * 20, digest=f"{revision:02d}" * 8)
        for name in ("base", "chat", "tools")
    )
    return RunRecord(
        run=f"{profile}-{night}",
        flow="release",
        profile=profile,
        ended=BEGAN + night * DAY + number * 4000 + chance.uniform(0, 900),
        seconds=sum(stage.seconds for stage in stages) if known else 3.0,
        status=status,
        message=messages[status],
        version=version if status in ("released", "nothing new") else None,
        method="ties of 3 over acme-base",
        recipe=RECIPE.format(density=density) if known else "",
        parents=parents if known else (),
        scores=scores,
        perplexity=1.0 + chance.uniform(0, 0.02) if known else None,
        perplexity_limit=1.05 if known else None,
        stages=stages if known else stages[:1],
        bytes_made=16_000_000_000 if fresh else 0,
        bytes_merged=16_000_000_000 if known else 0,
    )


def _score(task: str, level: float, chance: random.Random) -> RunScore:
    drop = chance.gauss(0.6, 0.9)
    return RunScore(
        task=task,
        reference="chat",
        merge=level,
        drop=drop,
        low=drop - 1.1,
        high=drop + 1.1,
        max_drop=3,
        margin=3,
        outcome="fail" if drop > 3 else "pass",
    )


def _worst(scores: tuple[RunScore, ...]) -> str:
    if not scores:
        return "licences: cc-by-nc-4.0 (of chat) does not permit commercial use"
    worst = max(scores, key=lambda score: score.drop)
    return f"{worst.task}: {worst.drop:.1f} points below chat [{worst.low:.1f}, {worst.high:.1f}], more than 3"

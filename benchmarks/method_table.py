"""Measure how much of two skills each method retains, as usual and at its best scale.

The tables are in ``dev/measurements/method-quality.md``.

::

    .venv/bin/python benchmarks/method_table.py           # the demo family, a few minutes; prints Markdown
    .venv/bin/python benchmarks/method_table.py regmean   # these methods only

The two fine-tunes of the demo's base reverse and shift letters, and all models can copy. 100 documents of each skill
select the scale, once by the likelihood of right answers and once by entropy, which needs no answers. 1,000 other
documents score the merge. A method with ``lambda`` is tried at the scales of ``SCALES``. Other methods have no scale.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

DEMO = PROJECT / "profiles" / "demo"
SKILLS = ("copy-many", "reverse-many", "shift-many")
SEARCH, TEST = 100, 1000
SCALES = (0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.3, 2.6, 3.0)
# Method → parameters of each model and of the recipe; both fine-tunes in order, and the base if it takes part.
USUAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({"weight": 0.5}, {}),
    "task_arithmetic": ({"weight": 0.5}, {}),
    "ties": ({"weight": 1.0, "density": 0.5}, {}),
    "dare_linear": ({"weight": 0.5, "density": 0.5}, {}),
    "dare_ties": ({"weight": 1.0, "density": 0.5}, {}),
    "della": ({"weight": 1.0, "density": 0.5, "epsilon": 0.1}, {}),
    "della_linear": ({"weight": 0.5, "density": 0.5, "epsilon": 0.1}, {}),
    "breadcrumbs": ({"weight": 0.5, "density": 0.9, "gamma": 0.01}, {}),
    "breadcrumbs_ties": ({"weight": 1.0, "density": 0.9, "gamma": 0.01}, {}),
    "consensus_ta": ({"weight": 1.0, "threshold": 0.2}, {}),
    "localize_and_stitch": ({"weight": 1.0, "density": 0.3}, {}),
    "sce": ({}, {"select_topk": 0.5}),
    "ram": ({}, {}),
    "ramplus_tl": ({}, {}),
    "model_stock": ({}, {}),
    "slerp": ({}, {"t": 0.5}),
    "nuslerp": ({"weight": 0.5}, {}),
    "multislerp": ({"weight": 0.5}, {}),
    "karcher": ({}, {}),
    "regmean": ({}, {}),
    "fisher": ({}, {}),
    "wudi": ({}, {}),
    "ace": ({}, {}),
    "svc": ({}, {}),
    "tsv_m": ({}, {}),
    "knots": ({"density": 0.5}, {}),
}
READING = ("regmean", "fisher")
WITHOUT_BASE = ("linear", "slerp", "karcher", "nuslerp", "multislerp")


class Result(NamedTuple):
    """Scores of a merge on one set: exact match in % by skill; nats per token and entropy as means over skills."""

    exact: tuple[float, ...]
    nats: float
    entropy: float


def fill_recipe(method: str, scale: float | None) -> dict[str, Any]:
    """Return the recipe of a method at a scale; None means that the method has no scale."""
    own, shared = USUAL[method]
    models: list[dict[str, Any]] = [{"model": str(DEMO / "models" / name)} for name in ("reverser", "shifter")]
    for model, name in zip(models, ("reverser", "shifter"), strict=True):
        model |= {"parameters": own} if own else {}
        model |= {"text": str(DEMO / f"data/texts/{name}.jsonl")} if method in READING else {}
    recipe: dict[str, Any] = {"merge_method": method, "models": models, "dtype": "bfloat16"}
    if method not in WITHOUT_BASE:
        recipe["base_model"] = str(DEMO / "models/base")
    parameters = shared if scale is None else {**shared, "lambda": scale}
    return {**recipe, "parameters": parameters} if parameters else recipe


def demo_setting(
    recipe: Mapping[str, Any],
    place: Path,
    sizes: Mapping[str, int],
    measures: Sequence[str],
    reading: Sequence[Mapping[str, Any]] = (),
) -> Any:
    """Return a study of the demo's three skills with ``sizes`` documents of each skill per set.

    Args:
        recipe: Recipe that names every model.
        reading: Recipes whose models read texts.
        place: Directory where hashes are cached.
        sizes: Documents per set: ``search``, ``confirmation``.
        measures: Measures of every document.
    """
    from mergegate.merge_core import load_recipe
    from mergegate.merge_core.files import HashMemo
    from mergegate.tasks.merge import prepare_recipe
    from mergegate.tasks.models.checkpoints import pin_checkpoints, resolve_parents
    from mergegate.tasks.quality.evaluation import DocumentSplits, Scoring, pin_data, pin_task
    from mergegate.tasks.sweep import TrialSetting
    from mergegate.tasks.sweep.objective import MetricKey
    from mergegate.tasks.sweep.trial import TrialSet

    hashes = HashMemo(place / "hashes.db")
    tasks = [pin_task(f"tasks/sweep/{skill.removesuffix('-many')}.yaml", DEMO, hashes) for skill in SKILLS]
    division = DocumentSplits(search=sizes["search"], confirmation=sizes["confirmation"])

    def of(name: Any) -> TrialSet:
        only = {"only": division.of(name), "data_digest": None}
        return TrialSet(tuple(pin_data(task.model_copy(update=only)) for task in tasks))

    parents = pin_checkpoints(resolve_parents(load_recipe(dict(recipe), location="methods")), hashes)
    by_ref = {parent.ref: parent for parent in parents}
    os.environ["MERGEGATE_HOME"] = str(place / "home")
    read = [prepare_recipe(load_recipe(dict(one)), by_ref.__getitem__) for one in reading]
    asked: Any = [MetricKey(skill, measure) for skill in SKILLS for measure in measures]  # type: ignore[arg-type]
    return TrialSetting(
        parents=parents,
        sets={"search": of("search"), "confirmation": of("confirmation")},
        metric_keys=tuple(asked),
        scoring=Scoring(dtype="float32"),
        measured={what: found for one in read for what, found in one.calibration_results().items()},
    )


def means_of(setting: Any, recipe: Mapping[str, Any], which: Any) -> dict[str, list[float]]:
    """Score a merge on the documents of one set, and return each requested measure's means by skill."""
    from mergegate.tasks.sweep.study import TrialRequest
    from mergegate.tasks.sweep.trial import score_trial

    scores = score_trial(setting, TrialRequest(recipe, which))
    assert not scores.problem, scores.problem
    found: dict[str, list[float]] = {}
    for asked in setting.metric_keys:  # skill by skill
        found.setdefault(asked.measure, []).append(float(scores.table[asked].mean()))
    return found


def main() -> int:
    """Print the table."""
    from mergegate.merge_core.methods import merge_methods
    from mergegate.tasks.models.checkpoints import end_model_process

    measures = ("exact", "log_likelihood", "entropy")
    with tempfile.TemporaryDirectory(prefix="mergegate-methods-") as name:
        sizes = {"search": SEARCH, "confirmation": TEST}
        setting = demo_setting(
            fill_recipe("ties", 1.0), Path(name), sizes, measures, [fill_recipe(one, 1.0) for one in READING]
        )

        @cache
        def result(method: str, scale: float | None, which: str) -> Result:
            exact, nats, entropy = means_of(setting, fill_recipe(method, scale), which).values()
            return Result(tuple(100 * share for share in exact), sum(nats) / 3, sum(entropy) / 3)

        print("| method | usual parameters | | best scale by right answers | | best scale by entropy | |")
        print("|---|--:|--:|--:|--:|--:|--:|")
        for method in sys.argv[1:] or USUAL:
            has_scale = merge_methods()[method].parameter("lambda") is not None
            usual = result(method, 1.0 if has_scale else None, "confirmation")
            cells = [_exact(usual), _nats(usual)]
            if has_scale:
                tried = {scale: result(method, scale, "search") for scale in SCALES}
                by_answers = max(tried, key=lambda scale: tried[scale].nats)
                by_entropy = max(tried, key=lambda scale: tried[scale].entropy)
                for scale in (by_answers, by_entropy):
                    found = result(method, scale, "confirmation")
                    cells += [f"{scale:g}: {_exact(found)}", _nats(found)]
            else:
                cells += ["", "", "", ""]
            print(f"| `{method}` | {' | '.join(cells)} |", flush=True)
        end_model_process()
    return 0


def _exact(found: Result) -> str:
    copied, reversed_, shifted = found.exact
    return f"{reversed_:.1f} / {shifted:.1f}" + ("" if copied > 99.5 else f" (copying {copied:.1f})")


def _nats(found: Result) -> str:
    return f"{found.nats:.4f}".replace("-", "\N{MINUS SIGN}")


if __name__ == "__main__":
    sys.exit(main())

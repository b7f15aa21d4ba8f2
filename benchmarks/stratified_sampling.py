"""Simulate the gate if the merge answers more of the documents that are likely to change, and fewer of the others.

The tables are in ``dev/measurements/stratified-sampling.md``, and in ``stratified-sampling-cases.md`` next to it::

    .venv/bin/python benchmarks/stratified_sampling.py single      # or: looks, suite, leaves; a few minutes each
    .venv/bin/python benchmarks/stratified_sampling.py measured    # real answers of the demo models

The reference has answered all documents of a choice task. Its margin on a document is the log-likelihood of the right
answer minus that of the best wrong one. The strata are the documents with the 8 % smallest margins, regardless of sign,
those up to 20 % and 40 %, and all others. The merge answers a sample of each stratum. The drop is the mean over the
strata, weighted by their shares of the documents, and its bounds come from the gate's functions: ``binary_bounds`` in
each stratum, joined by ``mean_drop``. Answers are drawn from an unlimited number of documents. A merge that fails at an
early look is still judged at the next one, so the published share is overstated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from mergegate.tasks.quality.evaluation.document_order import interim_looks
from mergegate.tasks.quality.gate.alarms import ALARM_SHARE, Part
from mergegate.tasks.quality.gate.power import DrawnDrops, draw, passing_merges
from mergegate.tasks.quality.gate.sequential import plan_looks
from mergegate.tasks.quality.gate.settings import Guard
from mergegate.tasks.quality.gate.suite import TaskDrop, mean_drop

EDGES = (0.0, 0.08, 0.20, 0.40, 1.0)  # shares of the documents, by distance of the reference's margin from zero
WEIGHTS = np.diff(EDGES)
CONFIDENCE, MARGIN = 0.95, 0.03
GUARD = Guard(task="any", guarded_by="base")  # the defaults: max_drop 2, margin 3, limit 11
# Only the bound stops a merge: the hardest case at the margin.
HARD = Guard(task="any", guarded_by="base", max_drop=3, margin=3)
DISCORDANCES = (0.05, 0.10, 0.20)
DOCUMENTS = (250, 350, 500, 700, 1000, 2000)
LEAVES = 57

Array = NDArray[np.float64]


class Merge(NamedTuple):
    """Share of the documents in each stratum that a merge truly loses, and wins."""

    lost: Array
    won: Array

    @property
    def drop(self) -> float:
        """True drop, in [-1, 1]."""
        return float(WEIGHTS @ (self.lost - self.won))


class StratifiedDrops(NamedTuple):
    """Samples of many simulated merges by stratum, in place of ``gate.power.DrawnDrops``."""

    guard: Guard
    strata: tuple[DrawnDrops, ...]

    def at(self, confidence: float) -> TaskDrop:
        """Return the weighted drop of each merge with its bounds, in points."""
        return TaskDrop(
            self.guard.task, self.guard.weight, *mean_drop([stratum.at(confidence) for stratum in self.strata])
        )


def usual_flips(discordance: float) -> Array:
    """Return the share of each stratum that changes if a merge adds normal noise to margins that are evenly dense."""
    positions = (np.arange(20_000) + 0.5) / 20_000
    low, high = 1e-4, 100.0
    for _ in range(60):
        noise = (low * high) ** 0.5
        low, high = (noise, high) if ndtr(-positions / noise).mean() < discordance else (low, noise)
    flips = ndtr(-positions / noise)
    return np.array([flips[(positions >= first) & (positions < last)].mean() for first, last in pairwise(EDGES)])


def allocate(n: int, discordance: float) -> NDArray[np.int64]:
    """Return about ``n`` documents by stratum, at least two each, proportional to ``W * sqrt(flips + 0.02)``."""
    shares = WEIGHTS * np.sqrt(usual_flips(discordance) + 0.02)
    return np.asarray(np.maximum(2, np.rint(n * shares / shares.sum())), dtype=np.int64)


def in_proportion(flips: Array, drop: float) -> Merge:
    """Return a merge with this true drop that loses and wins the same share of the changes in each stratum."""
    excess = drop / float(WEIGHTS @ flips)
    return Merge(flips * (1 + excess) / 2, flips * (1 - excess) / 2)


def patterns(discordance: float, drop: float) -> dict[str, Merge]:
    """Return merges by where their answers change: near zero margin as expected, everywhere, or only in the last."""
    easy = np.array([0.0, 0.0, 0.0, discordance / WEIGHTS[-1]])
    merges = {
        "usual": usual_flips(discordance),
        "even": np.full(len(WEIGHTS), discordance),
        "far": easy,
    }
    return {name: in_proportion(flips, drop) for name, flips in merges.items()}


def adversaries(discordance: float, drop: float, rng: np.random.Generator) -> Iterator[tuple[str, Merge]]:
    """Yield merges with all losses in one stratum and all wins in one, and 24 with random shares of both."""
    lost, won = (discordance + drop) / 2, (discordance - drop) / 2
    units = np.eye(len(WEIGHTS)) / WEIGHTS
    drawn = [tuple(rng.dirichlet(np.full(len(WEIGHTS), 0.5), 2) / WEIGHTS) for _ in range(24)]
    corners = [(units[i], units[j]) for i in range(len(WEIGHTS)) for j in range(len(WEIGHTS))]
    names = [f"{i} / {j}" for i in range(1, len(WEIGHTS) + 1) for j in range(1, len(WEIGHTS) + 1)] + ["mixed"] * 24
    for name, (losses, wins) in zip(names, [*corners, *drawn], strict=True):
        merge = Merge(lost * losses, won * wins)
        if (merge.lost + merge.won <= 1).all():
            yield name, merge


def sample(
    guard: Guard, merge: Merge, schedule: Sequence[NDArray[np.int64]], runs: int, rng: np.random.Generator
) -> list[StratifiedDrops]:
    """Draw ``runs`` samples of a merge after each look of a schedule of documents by stratum."""
    drops, counts, before = [], np.zeros((len(WEIGHTS), 2, runs)), np.zeros(len(WEIGHTS), dtype=np.int64)
    for sizes in schedule:
        for stratum, (lost, won) in enumerate(zip(merge.lost, merge.won, strict=True)):
            chances = [lost, won, max(0.0, 1 - lost - won)]
            counts[stratum] += rng.multinomial(sizes[stratum] - before[stratum], chances, size=runs)[:, :2].T
        before = sizes
        strata = [
            DrawnDrops(
                guard.model_copy(update={"task": f"stratum {stratum}", "weight": WEIGHTS[stratum]}),
                counts[stratum, 0].copy(),
                counts[stratum, 1].copy(),
                int(sizes[stratum]),
            )
            for stratum in range(len(WEIGHTS))
        ]
        drops.append(StratifiedDrops(guard, tuple(strata)))
    return drops


class Published(NamedTuple):
    """Share of the simulated merges that are published, and the mean number of documents of a task."""

    share: float
    documents: float


def stratified(
    guard: Guard, merge: Merge, plan: tuple[Sequence[int], float], runs: int, rng: np.random.Generator, tasks: int = 1
) -> Published:
    """Return how often a merge is published with a stratified sample, on ``tasks`` tasks in which it is the same.

    ``plan`` is the number of documents after each look, and the discordance that the allocation expects.
    """
    looks, expected = plan
    schedule = [allocate(n, expected) for n in looks]
    guards = [guard.model_copy(update={"task": f"task {number}"}) for number in range(tasks)]
    return _publish([sample(one, merge, schedule, runs, rng) for one in guards], looks, runs)


def at_random(
    guard: Guard, truth: tuple[float, float], looks: Sequence[int], runs: int, rng: np.random.Generator, tasks: int = 1
) -> Published:
    """Return how often a merge with this true drop and discordance is published with a random sample."""
    samples = []
    for number in range(tasks):
        task, before, drops = guard.model_copy(update={"task": f"task {number}"}), 0, []
        lost = won = np.zeros(runs)
        for n in looks:
            fresh = draw(task, *truth, n - before, runs, rng)
            lost, won, before = lost + fresh.lost, won + fresh.won, n
            drops.append(DrawnDrops(task, lost, won, n))
        samples.append(drops)
    return _publish(samples, looks, runs)


def _publish(
    samples: Sequence[Sequence[DrawnDrops] | Sequence[StratifiedDrops]], looks: Sequence[int], runs: int
) -> Published:
    """Judge all tasks at each look until the merge passes; ``samples`` are those of each task, by look."""
    going, used = np.ones(runs, dtype=np.bool_), 0
    for index, look in enumerate(plan_looks(looks, CONFIDENCE)):
        used += int(going.sum()) * (look.documents - (looks[index - 1] if index else 0))
        going &= ~passing_merges([drops[index] for drops in samples], look.confidence, as_suite=len(samples) > 1)  # type: ignore[misc]
    return Published(1 - float(going.mean()), used / runs)


def worst(
    guard: Guard, plan: tuple[Sequence[int], float], runs: int, rng: np.random.Generator, tasks: int = 1
) -> tuple[str, float]:
    """Return the merge at the margin that is published most often, and its share in a fresh simulation."""
    searched = [
        (stratified(guard, merge, plan, max(1, runs // 10), rng, tasks).share, name, merge)
        for name, merge in adversaries(plan[1], MARGIN, rng)
    ]
    _, name, merge = max(searched, key=lambda each: each[0])
    return name, stratified(guard, merge, plan, runs, rng, tasks).share


def documents_for(share: float, n: int, discordance: float, runs: int, rng: np.random.Generator) -> int | None:
    """Return about how many random documents publish an equal merge as often as ``share``; None if too close to 1."""
    if share > 0.998:
        return None
    grid = [round(n * factor) for factor in np.arange(0.6, 3.01, 0.1)]
    shares = [at_random(GUARD, (0.0, discordance), (size,), runs, rng).share for size in grid]
    return round(float(np.interp(share, np.maximum.accumulate(shares), grid)))


def single(runs: int, rng: np.random.Generator) -> list[str]:
    """Return one row per discordance and number of documents, with a single look."""
    rows = [
        _row(
            *("discordance", "documents", "equal: random", "usual", "even", "far", "random documents for *usual*"),
            *("at the margin: random", "usual", "even", "far", "worst", "losses / wins in"),
        ),
        "|" + " --: |" * 13,
    ]
    for discordance in DISCORDANCES:
        for n in DOCUMENTS:
            plan = ((n,), discordance)
            equal = [stratified(GUARD, merge, plan, runs, rng).share for merge in patterns(discordance, 0.0).values()]
            same = documents_for(equal[0], n, discordance, runs, rng)
            margin = [
                stratified(HARD, merge, plan, 5 * runs, rng).share for merge in patterns(discordance, MARGIN).values()
            ]
            name, hardest = worst(HARD, plan, 5 * runs, rng)
            rows.append(
                _row(
                    *(f"{discordance:.2f}", f"{n:,}"),
                    *_percent(at_random(GUARD, (0.0, discordance), (n,), runs, rng).share, *equal),
                    f"{same:,} ({same / n:.1f}x)" if same else "",
                    *_percent(at_random(HARD, (MARGIN, discordance), (n,), 5 * runs, rng).share, *margin, hardest),
                    name,
                )
            )
    return rows


def looks(runs: int, rng: np.random.Generator) -> list[str]:
    """Return one row per discordance and schedule, with interim looks."""
    rows = [
        _row(
            *("discordance", "looks", "equal: random", "documents", "stratified", "documents"),
            *("at the margin: random", "usual", "even", "far", "worst", "losses / wins in"),
        ),
        "|" + " --: |" * 12,
    ]
    for discordance in DISCORDANCES:
        for schedule in (interim_looks(1000, 250), *(interim_looks(2000, first) for first in (250, 350, 500))):
            plan = (schedule, discordance)
            random_equal = at_random(GUARD, (0.0, discordance), schedule, runs, rng)
            equal = stratified(GUARD, patterns(discordance, 0.0)["usual"], plan, runs, rng)
            margin = [
                stratified(HARD, merge, plan, 5 * runs, rng).share for merge in patterns(discordance, MARGIN).values()
            ]
            name, hardest = worst(HARD, plan, 5 * runs, rng)
            rows.append(
                _row(
                    *(f"{discordance:.2f}", " ".join(f"{n:,}" for n in schedule)),
                    *(f"{100 * random_equal.share:.1f}", f"{random_equal.documents:,.0f}"),
                    *(f"{100 * equal.share:.1f}", f"{equal.documents:,.0f}"),
                    *_percent(at_random(HARD, (MARGIN, discordance), schedule, 5 * runs, rng).share, *margin, hardest),
                    name,
                )
            )
    return rows


def suite(runs: int, rng: np.random.Generator) -> list[str]:
    """Return one row per discordance and number of documents of each of seven tasks."""
    rows = [
        _row(
            *("discordance", "documents of a task", "equal: random", "usual", "even", "far"),
            *("at the margin: random", "usual", "even", "far", "worst", "losses / wins in"),
        ),
        "|" + " --: |" * 12,
    ]
    for discordance in DISCORDANCES:
        for n in (100, 250, 500):
            plan = ((n,), discordance)
            equal = [
                stratified(GUARD, merge, plan, runs, rng, 7).share for merge in patterns(discordance, 0.0).values()
            ]
            margin = [
                stratified(HARD, merge, plan, runs, rng, 7).share for merge in patterns(discordance, MARGIN).values()
            ]
            name, hardest = worst(HARD, plan, 2 * runs, rng, 7)
            rows.append(
                _row(
                    *(f"{discordance:.2f}", f"{n:,}"),
                    *_percent(at_random(GUARD, (0.0, discordance), (n,), runs, rng, 7).share, *equal),
                    *_percent(at_random(HARD, (MARGIN, discordance), (n,), runs, rng, 7).share, *margin, hardest),
                    name,
                )
            )
    return rows


@cache
def _raises_alarm(lost: int, won: int, n: int, error: float) -> bool:
    """Return whether the gate's alarm for a task of a group is raised by these counts."""
    return Part("leaf", np.repeat([1.0, -1.0, 0.0], [lost, won, n - lost - won])).exceeds(GUARD.max_drop / 100, error)


def plain_alarms(drops: StratifiedDrops, error: float) -> NDArray[np.bool_]:
    """Return which samples raise the gate's alarm, which does not weight the strata."""
    lost, won = (sum(getattr(one, name) for one in drops.strata).astype(int) for name in ("lost", "won"))
    n = sum(stratum.n for stratum in drops.strata)
    return np.array([_raises_alarm(*pair, n, error) for pair in zip(lost.tolist(), won.tolist(), strict=True)])


def leaves(runs: int, rng: np.random.Generator) -> list[str]:
    """Return one row per case and number of documents: alarms of one task of a group of 57."""
    one = np.ones(len(WEIGHTS))
    # Wins where the sample is thin and losses where it is dense look like a drop without weights.
    apart = {drop: Merge(np.array([0.5, 0, 0, 0]), np.array([0, 0, 0, (0.04 - drop) / 0.6])) for drop in (0.0, 0.02)}
    # All losses in one stratum, up to the largest drop that must not raise an alarm.
    corners = {f"drop of 2, all in stratum {i + 1}": 0.02 * np.eye(4)[i] / WEIGHTS[i] for i in (0, 3)}
    cases = {
        "equal, 5 % change as usual": in_proportion(usual_flips(0.05), 0.0),
        "equal, losses in stratum 1, wins in 4": apart[0.0],
        "drop of 2, losses in stratum 1, wins in 4": apart[0.02],
        **{name: Merge(lost, 0 * one) for name, lost in corners.items()},
        "drop of 10": Merge(0.125 * one, 0.025 * one),
        "drop of 20": Merge(0.225 * one, 0.025 * one),
        "drop of 50": Merge(0.525 * one, 0.025 * one),
    }
    error = ALARM_SHARE * (1 - CONFIDENCE)
    rows = [
        _row("one task of 57", "its documents", "random", "stratified, unweighted", "stratified, weighted"),
        "| --- |" + " --: |" * 4,
    ]
    for name, merge in cases.items():
        for n in (20, 50, 100, 250):
            drops = sample(GUARD, merge, [allocate(n, 0.05)], runs, rng)[0]
            chance = float(WEIGHTS @ merge.lost), float(WEIGHTS @ merge.won)
            simple = draw(GUARD, chance[0] - chance[1], sum(chance), n, runs, rng)
            pairs = zip(simple.lost.astype(int).tolist(), simple.won.astype(int).tolist(), strict=True)
            shares = (
                float(np.mean([_raises_alarm(*pair, n, error / LEAVES) for pair in pairs])),
                float(plain_alarms(drops, error / LEAVES).mean()),
                float(np.mean(drops.at(1 - error / LEAVES).low > GUARD.max_drop)),
            )
            rows.append(_row(name, f"{n:,}", *(f"{100 * share:.3f}" for share in shares)))
    return rows


# --- real answers


def demo_choices(
    models: Path, data: Path, reference: float, other: str, shares: Sequence[float]
) -> tuple[Array, dict[float, NDArray[np.bool_]]]:
    """Return the reference's margin on each document, and which answers each merge gets right.

    The reference has the share ``reference`` of the weights of ``reverser``, and the rest of those of ``base``, so that
    its margins are not all large. A merge has one of ``shares`` of the weights of the model ``other``, and the rest of
    those of the reference. The wrong choices of a document are its answer with two neighboring letters exchanged.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models / "reverser")
    model = AutoModelForCausalLM.from_pretrained(models / "reverser", dtype=torch.float32).eval()
    skilled, base, added = (
        {
            name: tensor.clone()
            for name, tensor in AutoModelForCausalLM.from_pretrained(models / source, dtype=torch.float32)
            .state_dict()
            .items()
        }
        for source in ("reverser", "base", other)
    )
    own = {name: reference * skilled[name] + (1 - reference) * base[name] for name in base}
    documents = [json.loads(line) for line in data.read_text().splitlines()]
    texts: list[tuple[list[int], list[int]]] = []
    owner: list[int] = []
    for number, document in enumerate(documents):
        answer = document["answer"]
        swaps = [answer[:i] + answer[i + 1] + answer[i] + answer[i + 2 :] for i in range(len(answer) - 1)]
        for choice in dict.fromkeys([answer, *swaps]):
            texts.append(
                (tokenizer(document["prompt"]).input_ids, tokenizer(choice, add_special_tokens=False).input_ids)
            )
            owner.append(number)
    owners = np.array(owner)
    first = np.searchsorted(owners, np.arange(len(documents)))

    def margins() -> Array:
        likelihoods = np.zeros(len(texts))
        with torch.no_grad():
            for start in range(0, len(texts), 256):
                some = texts[start : start + 256]
                width = max(len(prompt) + len(choice) for prompt, choice in some)
                tokens = torch.zeros(len(some), width, dtype=torch.long)
                for row, (prompt, choice) in enumerate(some):
                    tokens[row, : len(prompt) + len(choice)] = torch.tensor(prompt + choice)
                logits = model(tokens).logits.log_softmax(-1)
                for row, (prompt, choice) in enumerate(some):
                    steps = torch.arange(len(prompt) - 1, len(prompt) + len(choice) - 1)
                    likelihoods[start + row] = float(logits[row, steps, torch.tensor(choice)].sum())
        wrong = np.full(len(documents), -np.inf)
        others = np.ones(len(texts), dtype=np.bool_)
        others[first] = False
        np.maximum.at(wrong, owners[others], likelihoods[others])
        return np.asarray(likelihoods[first] - wrong)

    model.load_state_dict(own)
    known, right = margins(), {}
    for share in shares:
        model.load_state_dict({name: (1 - share) * own[name] + share * added[name] for name in own})
        right[share] = margins() > 0
    return known, right


def measured(runs: int, rng: np.random.Generator, models: Path, data: Path) -> list[str]:
    """Return one row per merge of the demo models: where real answers change, and how often samples publish them.

    Samples are drawn from the answers of each merge. An equal merge has as many losses as wins in each stratum, and a
    merge at the margin has more losses.
    """
    rows = [
        _row(
            *("reference", "merge", "differ, %", "of it by stratum, %", "drawn documents", "equal: random"),
            *("stratified", "random documents for it", "at the margin: random", "stratified"),
        ),
        "|" + " --: |" * 10,
    ]
    for reference, other, merged in ((0.4, "shifter", (0.2, 0.3)), (1.0, "base", (0.55, 0.6))):
        margins, answers = demo_choices(models, data, reference, other, merged)
        order = np.argsort(np.argsort(np.abs(margins), kind="stable")) / len(margins)
        stratum = np.searchsorted(EDGES[1:-1], order, side="right")
        for share, right in answers.items():
            changed = right != (margins > 0)
            discordance = float(changed.mean())
            flips = np.array([changed[stratum == number].mean() for number in range(len(WEIGHTS))])
            parts = " ".join(f"{100 * part:.0f}" for part in flips * WEIGHTS / max(1e-9, float(WEIGHTS @ flips)))
            for n in (250, 350, 500):
                plan = ((n,), discordance)
                equal = stratified(GUARD, in_proportion(flips, 0.0), plan, runs, rng).share
                same = documents_for(equal, n, discordance, runs, rng)
                rows.append(
                    _row(
                        *(f"{reference:g} reverser", f"{share:g} {other}", f"{100 * discordance:.1f}", parts, f"{n:,}"),
                        *_percent(at_random(GUARD, (0.0, discordance), (n,), runs, rng).share, equal),
                        f"{same:,} ({same / n:.1f}x)" if same else "",
                        *_percent(
                            at_random(HARD, (MARGIN, discordance), (n,), 5 * runs, rng).share,
                            stratified(HARD, in_proportion(flips, MARGIN), plan, 5 * runs, rng).share,
                        ),
                    )
                )
    return rows


def _percent(*shares: float) -> tuple[str, ...]:
    return tuple(f"{100 * share:.1f}" for share in shares)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


TABLES: dict[str, Callable[[int, np.random.Generator], list[str]]] = {
    "single": single,
    "looks": looks,
    "suite": suite,
    "leaves": leaves,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=[*TABLES, "measured"])
    parser.add_argument("--runs", type=int, default=10_000, help="simulated merges of a cell; more for errors")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", type=Path, default=Path("profiles/demo/models"))
    parser.add_argument("--data", type=Path, default=Path("profiles/demo/data/reverse.jsonl"))
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    if arguments.table == "measured":
        print("\n".join(measured(arguments.runs, rng, arguments.models, arguments.data)))
        return
    print("\n".join(TABLES[arguments.table](arguments.runs, rng)))


if __name__ == "__main__":
    main()

"""Compare searches on the demo's two sweeps: CMA-ES and plain random search, with three seeds each.

::

    .venv/bin/python benchmarks/demo_sweeps.py            # twelve sweeps of sixty trials; a quarter of an hour of CPU
    .venv/bin/python benchmarks/demo_sweeps.py --seeds 1 --samplers random --profiles demo-sweep-linear

Each seed is a new search on a new split of the documents, so each confirmation uses fresh documents. The script
releases nothing. It exits with code 1 if a winner is not confirmed at p < .01.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from mergegate.flows.prefect_api import configure, local_api  # noqa: E402  # from this checkout

PROFILES = ("demo-sweep", "demo-sweep-linear")
SAMPLERS = ("cma", "random")
SURE = 0.01
COLUMNS = (
    "sweep",
    "sampler",
    "seed",
    "confirmed, p",
    "hand-written",
    "winner",
    "gain",
    "winner, search documents",
    "documents used",
    "search",
)


class Swept(NamedTuple):
    """The outcome of one sweep."""

    cells: tuple[str, ...]
    sure: bool


def swept(name: str, sampler: str, seed: int) -> Swept:
    """Search and confirm as the flow does, and store only the ledger."""
    from mergegate.flows.attempt import prepare_search
    from mergegate.flows.profile import load_profile
    from mergegate.tasks.base.runners import open_runner
    from mergegate.tasks.sweep import Confirmation, TrialPool, open_ledger, study_key

    profile = load_profile(PROJECT / "profiles" / f"{name}.yaml")
    assert profile.sweep is not None
    documents = profile.sweep.documents.model_copy(update={"seed": seed})
    changed = profile.sweep.model_copy(update={"sampler": sampler, "seed": seed, "documents": documents})
    search = prepare_search(profile.model_copy(update={"sweep": changed}))
    places = search.setting.digest(), study_key(search.problem.space, search.problem.settings)
    began = time.perf_counter()
    with open_runner(profile.runner) as runner, open_ledger(*places) as ledger:
        workshop = TrialPool(search, runner, ledger, profile.runner.parallel_items)
        study = workshop.search_all(lambda progress: None)
        took = time.perf_counter() - began
        verdict = workshop.confirm(study)
    if not isinstance(verdict, Confirmation):
        return Swept((name, sampler, str(seed), f"no: {verdict.why}", *["" for _ in COLUMNS[4:]]), False)
    exact = all(term.measure == "exact" for term in verdict.terms)

    def told(value: float) -> str:
        return f"{100 * value:.1f}" if exact else f"{value:.4f}"

    p = "< 1e-6" if verdict.p_value <= 1e-6 else f"= {verdict.p_value:.1g}"
    cells = (
        name,
        f"`{sampler}`",
        str(seed),
        f"{'yes' if verdict.confirmed else 'no'}, p {p}",
        told(verdict.held_out_reference),
        told(verdict.held_out),
        f"**{told(verdict.gain)}** [{told(verdict.low)}, {told(verdict.high)}]",
        told(verdict.searched),
        f"{100 * study.evaluated_share:.0f} %",
        f"{took:.0f} s",
    )
    return Swept(cells, verdict.confirmed and verdict.p_value < SURE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--profiles", nargs="+", default=PROFILES)
    parser.add_argument("--samplers", nargs="+", default=SAMPLERS)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mergegate-demo-sweeps-") as place:
        os.environ["MERGEGATE_HOME"] = place
        os.environ["HF_HUB_OFFLINE"] = "1"
        configure(Path(place))
        from prefect import flow

        rows = []

        @flow(name="demo-sweeps")
        def all_of_them() -> None:
            print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
            for name in given.profiles:
                for seed in range(given.seeds):
                    for sampler in given.samplers:
                        rows.append(swept(name, sampler, seed))
                        print(f"| {' | '.join(rows[-1].cells)} |", flush=True)

        with local_api():
            all_of_them()
    sys.exit(0 if all(row.sure for row in rows) else 1)


if __name__ == "__main__":
    main()

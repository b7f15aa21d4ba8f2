"""Compare how merge methods handle five clients, one of them faulty, over five rounds.

The tables are in ``dev/measurements/client-rounds.md``.

::

    .venv/bin/python benchmarks/client_rounds.py         # the demo family, three minutes; prints Markdown
    .venv/bin/python benchmarks/client_rounds.py --alike # clients that have all seen of everything

In each round, every client starts from the result of the previous round. Two clients move a third of the way to
reversing letters and two a third of the way to shifting them (``tests/flows/client_rounds.py``). With ``--alike``, all
four move a third of the way to both. The fifth client moves in the opposite direction, five times as far, or is noise
that is five times as large, or contains NaN. The table lists right answers out of 1,000 documents, in %, after the
fifth round.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT / "tests/flows"), str(PROJECT)]

from client_rounds import HONEST, MODELS, Clients  # noqa: E402  # from the tests' folder
from method_table import TEST, demo_setting, means_of  # noqa: E402

ROUNDS = 5
METHODS: dict[str, dict[str, Any]] = {
    "task_arithmetic": {"merge_method": "task_arithmetic"},
    "median": {"merge_method": "median"},
    "trimmed_mean": {"merge_method": "trimmed_mean"},
    "geometric_median": {"merge_method": "geometric_median"},
    "mean, `leave_out_beyond: 3`": {"merge_method": "task_arithmetic", "leave_out_beyond": 3},
    "median, leave_out_beyond 3": {"merge_method": "median", "leave_out_beyond": 3},
}
Train = Callable[[Clients, Path], None]
FIFTH: Mapping[str, Train | None] = {
    "none": None,
    "reversed x 5": lambda clients, begin: clients.turn("eve", begin, 5),
    "noise x 5": lambda clients, begin: clients.confuse("eve", begin, 5),
    "NaN": lambda clients, begin: clients.damage("eve", begin),
}


def merged(recipe: Mapping[str, Any], out: Path, hashes: Any) -> None:
    """Merge one round into ``out``."""
    from mergegate.merge_core import load_recipe, merge_weights, plan_merge
    from mergegate.tasks.merge import prepare_recipe
    from mergegate.tasks.models.checkpoints import pin_checkpoints, resolve_parents

    read = load_recipe(dict(recipe))
    pinned = {one.ref: one for one in pin_checkpoints(resolve_parents(read), hashes)}
    ready = prepare_recipe(read, pinned.__getitem__)
    merge_weights(plan_merge(ready, {ref: one.open() for ref, one in pinned.items()}), out, device="cpu")


def after_rounds(
    method: Mapping[str, Any], fifth: Train | None, place: Path, hashes: Any, *, alike: bool
) -> Path | None:
    """Return the model after the last round, or None if a round could not be merged."""
    from mergegate.merge_core.errors import MergegateError

    begin, clients = MODELS / "base", Clients(place / "clients", alike=alike)
    for number in range(ROUNDS):
        for name in HONEST:
            clients.train(name, begin)
        if fifth:
            fifth(clients, begin)
        models = [{"model": str(one)} for one in sorted((place / "clients").iterdir())]
        if method["merge_method"] == "task_arithmetic":
            models = [{**one, "parameters": {"weight": 1.0}} for one in models]  # type: ignore[dict-item]
        mean = {"parameters": {"normalize": True}} if method["merge_method"] == "task_arithmetic" else {}
        out = place / f"round-{number}"
        recipe = {**method, **mean, "base_model": str(begin), "models": models, "dtype": "bfloat16"}
        try:
            merged(recipe, out, hashes)
        except MergegateError:
            return None
        begin = out
    return begin


def main() -> int:
    """Print the table."""
    from mergegate.merge_core.files import HashMemo
    from mergegate.tasks.models.checkpoints import end_model_process

    alike = "--alike" in sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="mergegate-rounds-") as name:
        place = Path(name)
        os.environ["MERGEGATE_HOME"] = str(place / "home")
        hashes = HashMemo(place / "hashes.db")
        print(f"| the fifth client | {' | '.join(METHODS)} |")
        print("|---|" + "--:|" * len(METHODS))
        for who, fifth in FIFTH.items():
            cells = []
            for method, said in METHODS.items():
                own = place / f"{who}-{method}".replace(" ", "-")
                own.mkdir()
                last = after_rounds(said, fifth, own, hashes, alike=alike)
                if last is None:
                    cells.append("refused")
                    continue
                recipe = {"merge_method": "passthrough", "models": [{"model": str(last)}]}
                setting = demo_setting(recipe, own, {"search": 10, "confirmation": TEST}, ("exact",))
                _, reversed_, shifted = means_of(setting, recipe, "confirmation")["exact"]
                cells.append(f"{100 * reversed_:.1f} / {100 * shifted:.1f}")
            print(f"| {who} | {' | '.join(cells)} |", flush=True)
        end_model_process()
    return 0


if __name__ == "__main__":
    sys.exit(main())

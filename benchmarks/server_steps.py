"""Compare the length of the server's step over five rounds of honest clients: the mean, and twice the mean.

The tables are in ``dev/measurements/client-rounds.md``.

::

    .venv/bin/python benchmarks/server_steps.py [--tired]   # the demo family, two minutes; Markdown

In each round, two clients move a third of the way to reversing and two a third of the way to shifting
(``tests/flows/client_rounds.py``), starting from the result of the previous round. The distance is constant, or
(``--tired``) a third of the remaining way. Each round uses the recipe that a profile would build for it. The table
lists right answers out of 1,000 documents in %, reversing / shifting, with copying in brackets if it is below 99.5.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT / "tests/flows"), str(PROJECT)]

from client_rounds import HONEST, MODELS, WEIGHTS, Clients  # noqa: E402  # from the tests' folder
from method_table import TEST, demo_setting, means_of  # noqa: E402

ROUNDS = 5
STEPS: dict[str, dict[str, Any]] = {
    "mean": {},
    "mean, `lambda: 2`": {"parameters": {"lambda": 2.0}},
}


def next_release(place: Path, said: Mapping[str, Any], released: Path | None, number: int) -> Path:
    """Merge a round of the clients in ``place``, and record the data that the next round needs from a release."""
    import yaml

    from mergegate.flows.candidates import client_round
    from mergegate.merge_core import load_recipe, merge_weights, open_checkpoint, plan_merge
    from mergegate.merge_core.files import sha256_file

    def digest_of(model: Path) -> str:
        return sha256_file(model / WEIGHTS)

    document = {"base_model": "base", "clients": ["clients/*"], "dtype": "bfloat16", **said}
    found = client_round(document, place, "round", last_release=released, digest_of=digest_of)
    text = yaml.safe_dump_all([dict(one) for one in found.documents])
    recipe = load_recipe(text)
    checkpoints = {str(ref): open_checkpoint(place / ref.path) for ref in recipe.references()}
    out = place / f"release-{number}"
    merge_weights(plan_merge(recipe, checkpoints), out, device="cpu")
    parents = [{"digest": {"sha256": digest_of(place / ref.path)}} for ref in recipe.references()]
    predicate = {"buildDefinition": {"resolvedDependencies": parents}}
    (out / "provenance.json").write_text(json.dumps({"predicate": predicate}))
    (out / "recipe.yaml").write_text(text)
    return out


def skills(model: Path, place: Path) -> str:
    """Return a model's score on each skill."""
    recipe = {"merge_method": "passthrough", "models": [{"model": str(model)}]}
    setting = demo_setting(recipe, place, {"search": 10, "confirmation": TEST}, ("exact",))
    copied, reversed_, shifted = means_of(setting, recipe, "confirmation")["exact"]
    also = f" ({100 * copied:.1f})" if copied < 0.995 else ""
    return f"{100 * reversed_:.1f} / {100 * shifted:.1f}{also}"


def main() -> int:
    """Print the table."""
    from mergegate.tasks.models.checkpoints import end_model_process

    with tempfile.TemporaryDirectory(prefix="mergegate-steps-") as name:
        os.environ["MERGEGATE_HOME"] = str(Path(name) / "home")
        print(f"| the server's step | {' | '.join(f'round {number}' for number in range(1, ROUNDS + 1))} |")
        print("|---|" + "--:|" * ROUNDS)
        for step, said in STEPS.items():
            place = Path(name) / step.replace(" ", "-")
            place.mkdir()
            (place / "base").symlink_to(MODELS / "base")
            clients, released, cells = Clients(place / "clients"), None, []
            for number in range(1, ROUNDS + 1):
                for client in HONEST:
                    (clients.approach if "--tired" in sys.argv else clients.train)(client, released or MODELS / "base")
                released = next_release(place, said, released, number)
                cells.append(skills(released, place))
            print(f"| {step} | {' | '.join(cells)} |", flush=True)
        end_model_process()
    return 0


if __name__ == "__main__":
    sys.exit(main())

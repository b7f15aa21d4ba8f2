"""Measure quantized variants of a merge: size, time to build, loss against the merge, and the documents that show it.

::

    python benchmarks/variants_family.py TEXT.jsonl DIRECTORY      # a small family with a profile, or use your own
    python benchmarks/variants.py DIRECTORY/profile.yaml [--page dev/measurements/quantized-variants.md]

The script runs the profile as a user would, without publishing, in a store of its own. Then it builds every variant
twice more, each time in an empty store, and compares the bytes. The evidence is that of the gate, and the numbers of
documents come from simulations with the gate's decision functions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

PROJECT = Path(__file__).resolve().parents[1]
MARGINS = (1.0, 2.0)  # points
CONFIDENCE = 0.975  # of each end of an interval of 95 %
MOST_DOCUMENTS = 200_000


def main() -> None:
    """Run the profile, build the variants again, and print the tables or write them into a page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("profile", type=Path)
    parser.add_argument("--page", type=Path, help="page whose tables between <!-- name --> markers are replaced")
    parser.add_argument("--home", type=Path, help="state directory of the run, to measure again after an interruption")
    parser.add_argument("--build", type=Path, help=argparse.SUPPRESS)  # in a separate process: facts about the merge
    arguments = parser.parse_args()
    if arguments.build:
        build_variants(arguments.profile, json.loads(arguments.build.read_text(encoding="utf-8")))
        return
    with tempfile.TemporaryDirectory(prefix="variants-") as scratch:
        home = (arguments.home or Path(scratch) / "home").absolute()
        content = run_profile(arguments.profile, home)
        passes = [build_again(arguments.profile, content, home, Path(scratch) / f"pass-{at}") for at in (1, 2)]
    tables = {
        "artifacts": artifact_table(content, passes),
        "evidence": evidence_table(content),
        "documents": document_table(content),
    }
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    print(f"{content['name']} on {machine}\n\n" + "\n\n".join(tables.values()))
    if arguments.page:
        page = arguments.page.read_text(encoding="utf-8")
        for name, table in tables.items():
            pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
            page = re.sub(pattern, lambda match, table=table: f"{match[1]}{table}\n{match[2]}", page, flags=re.DOTALL)
        arguments.page.write_text(page, encoding="utf-8")


def run_profile(profile: Path, home: Path) -> dict:
    """Run a profile without publishing, and return the content of its report.

    Raises:
        SystemExit: The merge did not pass, so it has no variants.
    """
    command = [sys.executable, "-m", "mergegate", "run", str(profile), "--no-publish", "--json"]
    environment = {**os.environ, "MERGEGATE_HOME": str(home), "PYTHONPATH": str(PROJECT)}
    ended = subprocess.run(command, env=environment, cwd=PROJECT, stdout=subprocess.PIPE, text=True, check=False)
    outcome = json.loads(ended.stdout) if ended.stdout.strip() else {"message": f"exit code {ended.returncode}"}
    if not (content := outcome.get("content")) or not content.get("variants"):
        sys.exit(f"{profile}: no variant was judged: {outcome['message']}")
    return content


def build_again(profile: Path, content: dict, home: Path, scratch: Path) -> dict[str, dict]:
    """Build every variant in an empty store, and return its digest and CPU seconds by type."""
    scratch.mkdir()
    key = next(artifact["key"] for artifact in content["artifacts"] if artifact["stage"] == "merge")
    facts = {
        "home": str(home),
        "key": key,
        "scratch": str(scratch / "home"),
        "types": [each["type"] for each in content["variants"] if each.get("record")],
    }
    (scratch / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    command = [sys.executable, __file__, str(profile), "--build", str(scratch / "facts.json")]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    ended = subprocess.run(command, env=environment, cwd=PROJECT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


def build_variants(profile_path: Path, facts: dict) -> None:
    """Build the variants of a stored merge in an empty store, and print digests and CPU seconds as JSON."""
    from mergegate.flows.profile import load_profile
    from mergegate.tasks.base.stage import separate_store
    from mergegate.tasks.base.store import Store
    from mergegate.tasks.merge import MERGED, MergeSummary
    from mergegate.tasks.models.checkpoints import Model

    merge = Store(Path(facts["home"]) / "store").open("merge", facts["key"], MergeSummary)
    files = tuple(sorted(merge.files.items()))
    model = Model(name=MERGED, digest=merge.digest, directory=merge.directory, files=files)
    profile = load_profile(profile_path)
    built = {}
    with separate_store(Path(facts["scratch"])):
        for settings in profile.variants:
            for variant_type in settings.variant_types:
                if variant_type in facts["types"]:
                    before = cpu_seconds()
                    artifact = settings.build(model, variant_type, profile.root)
                    built[variant_type] = {"digest": artifact.digest, "seconds": cpu_seconds() - before}
    print(json.dumps(built))


def cpu_seconds() -> float:
    """Return the processor time of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def artifact_table(content: dict, passes: list[dict[str, dict]]) -> str:
    """Return the table of sizes, times and repeated builds."""
    merge = sum(file["size"] for file in content["files"])
    rows = [("merge", f"{merge / 1e6:.2f}", "100 %", "", "")]
    for variant in content["variants"]:
        if not (record := variant.get("record")):
            continue
        name = variant["type"]
        digests = {variant["digest"], *(each[name]["digest"] for each in passes)}
        seconds = " / ".join(f"{each[name]['seconds']:.1f}" for each in passes)
        same = "yes" if len(digests) == 1 else "no"
        rows.append((name, f"{record['bytes'] / 1e6:.2f}", f"{100 * record['bytes'] / merge:.0f} %", seconds, same))
    return table(("artifact", "MB", "of the merge", "CPU s, two builds", "three times the same bytes"), rows)


def evidence_table(content: dict) -> str:
    """Return the table of losses against the merge, over all tasks together, with intervals of 95 %."""
    rows = []
    for variant in content["variants"]:
        if not (gate := variant.get("gate")):
            rows.append((variant["type"], "", "", "", "", variant["reasons"][0]))
            continue
        lost, won, n = counts(gate)
        drift = gate.get("drift")
        cells = ["", "", ""]
        if n:
            low, high = interval(lost, won, n)
            cells = [
                f"{lost} / {won}",
                f"{100 * (lost + won) / n:.1f} %",
                f"{100 * (lost - won) / n:.2f} [{100 * low:.2f}, {100 * high:.2f}]",
            ]
        ratio = f"{drift['ratio']:.4f} [{drift['low']:.4f}, {drift['high']:.4f}]" if drift else ""
        rows.append((f"{variant['type']}, {variant['backend']}", *cells, ratio, variant["outcome"]))
    return table(("variant, runtime", "lost / won", "discordant", "drop, points", "perplexity ratio", "verdict"), rows)


def document_table(content: dict) -> str:
    """Return the table of documents with which an equally good variant passes with probability 0.8."""
    rows = []
    score = 0.0
    for variant in content["variants"]:
        gate = variant.get("gate")
        lost, won, n = counts(gate) if gate else (0, 0, 0)
        if n:
            score = sum(guard["reference_score"] * guard["n"] for guard in gate["guards"]) / n
            share = max(1, lost + won) / n
            rows.append((variant["type"], f"{100 * share:.1f} %", *(f"{documents(share, at):,}" for at in MARGINS)))
    if rows:
        share = 2 * score * (1 - score)  # of two models whose answers are independent
        rows.append(("any, unpaired", f"{100 * share:.1f} %", *(f"{documents(share, at):,}" for at in MARGINS)))
    return table(("variant", "discordant", *(f"margin {at:g}" for at in MARGINS)), rows)


def counts(gate: dict) -> tuple[int, int, int]:
    """Return lost, won and all documents over all guards."""
    return tuple(sum(guard[name] for guard in gate["guards"]) for name in ("lost", "won", "n"))


def interval(lost: int, won: int, n: int) -> tuple[float, float]:
    """Return the bounds of the drop as the gate computes them, in [-1, 1]."""
    from mergegate.tasks.quality.gate.statistics import binary_bounds

    low, high = binary_bounds(np.array([float(lost)]), np.array([float(won)]), n, CONFIDENCE)
    return float(low[0]), float(high[0])


def documents(share: float, margin: float) -> int:
    """Return how many documents an equally good variant needs to pass with probability 0.8, to two digits."""
    from mergegate.tasks.quality.gate.power import PlannedTask, publication_chance
    from mergegate.tasks.quality.gate.settings import GateRule, Guard
    from mergegate.tasks.quality.gate.statistics import POWER

    guard = Guard(task="task", guarded_by="merge", max_drop=margin, margin=margin)

    def passes(n: int) -> bool:
        return publication_chance([PlannedTask(guard, (n,), share)], GateRule(rule="each")) >= POWER

    low, high = 1, 64
    while not passes(high) and high < MOST_DOCUMENTS:
        low, high = high, 2 * high
    while high - low > high // 100:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(middle) else (middle, high)
    digits = len(str(high)) - 2
    return round(high, -digits) if digits > 0 else high


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table whose columns after the first are right-aligned."""
    lines = ["| " + " | ".join(columns) + " |", "| :-- |" + " --: |" * (len(columns) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


if __name__ == "__main__":
    main()

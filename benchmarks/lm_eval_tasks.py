"""List every task that lm-eval ships and whether it can guard a release, for ``dev/measurements/lm-eval-tasks.md``.

    python benchmarks/lm_eval_tasks.py                 # the tables, as Markdown
    python benchmarks/lm_eval_tasks.py --family arc    # each task of one family, with its reason

The script takes half a minute. It loads no data and runs no task. It applies the decision of ``mergegate check`` to the
tasks in lm-eval's own index.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter, defaultdict
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from mergegate.tasks.quality.evaluation.definitions.support import missing_requirements, refusal_of
from mergegate.tasks.quality.evaluation.definitions.tree import TaskLeaf

CRASH = "crash"


def decided() -> list[tuple[str, str, str]]:
    """Return (family, task, outcome) for every task; the outcome is ``supported``, a reason, or ``crash``."""
    from lm_eval import tasks as shipped
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    root = Path(shipped.__file__).parent
    rows = []
    for name, entry in sorted(TaskManager().task_index.items()):
        if entry.kind.name not in ("TASK", "PY_TASK"):
            continue
        family = entry.yaml_path.relative_to(root).parts[0]
        try:
            leaf = TaskLeaf(name, load_yaml(entry.yaml_path, resolve_func=False), entry.yaml_path)
            refusal = refusal_of(leaf.config, missing_requirements(leaf.function_files))
            rows.append((family, name, str(refusal.reason) if refusal else "supported"))
        except Exception as error:  # a crash is an outcome that the table counts
            rows.append((family, name, f"{CRASH}: {type(error).__name__}: {error}"))
    return rows


def tables(rows: list[tuple[str, str, str]]) -> str:
    total = Counter(outcome for _, _, outcome in rows)
    lines = ["| | tasks |", "|---|---:|"]
    lines += [f"| {outcome} | {count:,} |" for outcome, count in total.most_common()]
    if not any(outcome.startswith(CRASH) for outcome in total):
        lines.append("| crash | 0 |")
    families: dict[str, Counter[str]] = defaultdict(Counter)
    for family, _, outcome in rows:
        families[family][outcome] += 1
    whole = [family for family, found in sorted(families.items()) if set(found) == {"supported"}]
    lines += ["", f"All tasks of {len(whole)} families are supported: {', '.join(f'`{each}`' for each in whole)}.", ""]
    lines += ["| family | supported | refused | why |", "|---|---:|---:|---|"]
    for family, found in sorted(families.items()):
        if family in whole:
            continue
        why = "; ".join(f"{name} ({count:,})" for name, count in found.most_common() if name != "supported")
        lines.append(f"| `{family}` | {found['supported']:,} | {found.total() - found['supported']:,} | {why} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="List the lm-eval tasks that can guard a release.")
    parser.add_argument("--family", help="list each task of this directory of lm_eval/tasks")
    wanted = parser.parse_args().family
    rows = decided()
    if wanted:
        for family, name, outcome in rows:
            if family == wanted:
                print(f"{name}: {outcome}")
    else:
        print(tables(rows))


if __name__ == "__main__":
    main()

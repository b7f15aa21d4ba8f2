"""Measure whether a sweep of two real-size siblings ends, and how much memory and disk it takes.

::

    .venv/bin/python benchmarks/sweep_memory.py --work WORK --tokenizer TOKENIZER.json --documents DOCUMENTS.jsonl

Base and siblings are those of ``benchmarks/trial.py`` (random weights, 144 M parameters by default, your tokenizer).
Each line of ``DOCUMENTS`` has ``question``, ``choices`` and ``answer`` (for example, ARC). The script uses 60 of them:
15 for the search, 25 for the confirmation, the rest for the gate. It starts ``mergegate sweep --no-release`` as a user
would. Five times a second it reads the high-water mark (``VmHWM``) of each process and the size of its directories.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import yaml
from measure import family
from trial import make_siblings

PROJECT = Path(__file__).resolve().parents[1]
DOCUMENTS = 60
START = "from mergegate.flows.cli import main; main()"
CARD = "---\nlicense: apache-2.0\n---\n"
TASK = """task: questions
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: loglikelihood
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: " {{choices[answer]}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


class Seen(NamedTuple):
    """Largest resident memory of a process, in bytes."""

    marks: int  # VmHWM
    anonymous: int  # part of it without mapped files, which the parents are read as


def write_project(place: Path, work: Path, documents: Path, trials: int, method: str, workers: int) -> Path:
    """Write a profile with its task next to the models, and return its path."""
    for model in (place / "models").iterdir():
        (model / "README.md").write_text(CARD)
    work.mkdir(parents=True, exist_ok=True)
    lines = documents.read_text().splitlines(keepends=True)
    (work / "questions.jsonl").write_text("".join(lines[:DOCUMENTS]))
    (work / "questions.yaml").write_text(TASK)
    free = {"weight": "$weight"} if method == "linear" else {"weight": "$weight", "density": "$density"}
    models = [{"model": str(place / "models" / name), "parameters": free} for name in ("reverser", "shifter")]
    recipe = {"merge_method": method, "models": models, "dtype": "bfloat16"}
    if method != "linear":
        recipe["base_model"] = str(place / "models/base")
    ranges = {
        "weight": {"low": 0.2, "high": 1.8, "start": 1.0},
        "density": {"low": 0.05, "high": 1.0, "start": 0.5},
    }
    profile = {
        "name": "siblings",
        "recipe": recipe,
        "sweep": {
            "parameters": {name: ranges[name] for name in free},
            "objective": [{"task": "questions.yaml"}],
            "documents": {"search": 15, "confirmation": 25},
            "budget": {"trials": trials},
        },
        "evaluate": {"tasks": [{"task": "questions.yaml", "guarded_by": "reverser", "max_drop": 3}]},
        "runner": {"workers": workers},
    }
    file = work / "profile.yaml"
    file.write_text(yaml.safe_dump(profile, sort_keys=False))
    return file


def watched(command: list[str], environment: dict[str, str], directories: list[Path]) -> tuple[int, dict, dict]:
    """Run ``command``; return exit code, memory of each process by kind, and peak bytes in each directory."""
    running = subprocess.Popen(command, env=environment, cwd=PROJECT)
    seen: dict[int, tuple[str, Seen]] = {}
    most = dict.fromkeys(directories, 0)
    for round_ in itertools.count():
        if running.poll() is not None:
            break
        for pid in family(running.pid):
            if (found := look_at(pid)) is not None:
                before = seen.get(pid, ("", Seen(0, 0)))[1]
                seen[pid] = found[0], Seen(*map(max, before, found[1]))
        if round_ % 5 == 0:
            most = {place: max(size, bytes_in(place)) for place, size in most.items()}
        time.sleep(0.2)
    return running.returncode, {pid: one for pid, one in seen.items() if one[1].marks > 64 << 20}, most


def look_at(pid: int) -> tuple[str, Seen] | None:
    """Return the kind of a process and its memory so far, or None if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if "VmHWM" not in fields:
        return None
    marks, anonymous = (1024 * int(fields[name].split()[0]) for name in ("VmHWM", "RssAnon"))
    return "models" if "answer_questions" in command else "flow", Seen(marks, anonymous)


def bytes_in(place: Path) -> int:
    """Return the bytes of all files below ``place``."""
    total = 0
    for root, _, names in os.walk(place):
        for name in names:
            try:
                total += (Path(root) / name).lstat().st_size
            except OSError:
                continue  # the file was deleted during the scan
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--method", default="ties")
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    place = make_siblings(work, given.tokenizer, given.layers, given.hidden)
    profile = write_project(place, work / "project", given.documents, given.trials, given.method, given.workers)
    home, temporary = work / "home", work / "tmp"
    for directory in (home, temporary):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "MERGEGATE_HOME": str(home), "TMPDIR": str(temporary)}
    began = time.monotonic()
    code, seen, most = watched(
        [sys.executable, "-c", START, "sweep", str(profile), "--no-release"], environment, [home, temporary]
    )
    weights = [file.stat().st_size for file in (place / "models/base").glob("*.safetensors")]
    print(f"exit code {code} after {time.monotonic() - began:.0f} s; weights of a model {mib(sum(weights))}")
    for kind, one in seen.values():
        print(f"process '{kind}': VmHWM {mib(one.marks)}, most anonymous memory seen {mib(one.anonymous)}")
    print(f"most on disk: home {mib(most[home])}, temporary files {mib(most[temporary])}")
    print(f"at the end: home {mib(bytes_in(home))}, temporary files {mib(bytes_in(temporary))}")
    for line in next(home.glob("sweeps/*/trials.journal")).read_text(errors="replace").splitlines():
        if '"seconds"' in line:
            record = json.loads(line[line.index("{") : line.rindex("}") + 1])
            record = record.get("record", record)
            print("  ", {part: round(spent, 2) for part, spent in record["seconds"].items()}, record["problem"])


def mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"


if __name__ == "__main__":
    main()

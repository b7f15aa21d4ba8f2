"""Runs mergekit's own commands on many recipes in one process. Run it with the interpreter of mergekit's environment.

    python run_mergekit.py JOBS.json RESULTS.json

JOBS is a list of ``{"recipe": file, "out": directory, "seed": int, "multi": bool, "final": name or null}``. RESULTS
becomes ``{out: null or the error}``. If all documents of a multi-document recipe have names, ``final`` names the one
whose result is compared. Relative model paths are resolved against the working directory.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main(jobs_file: str, results_file: str) -> None:
    """Run every job, even if an earlier one fails."""
    import torch
    from mergekit.scripts.multimerge import main as merge_many
    from mergekit.scripts.run_yaml import main as merge_one

    torch.set_num_threads(1)
    results: dict[str, str | None] = {}
    began = time.monotonic()
    jobs = json.loads(Path(jobs_file).read_text())
    for job in jobs:
        options = ["--no-copy-tokenizer", "--no-write-model-card", "--quiet", "--random-seed", str(job["seed"])]
        if job["multi"]:
            arguments = [job["recipe"], "--out-path", job["out"], "-I", f"{job['out']}.steps", *options]
        else:
            arguments = [job["recipe"], job["out"], *options]
        try:
            (merge_many if job["multi"] else merge_one)(arguments, standalone_mode=False)
            if job["final"]:
                (Path(f"{job['out']}.steps") / job["final"]).rename(job["out"])
            results[job["out"]] = None
        except Exception as error:
            results[job["out"]] = f"{type(error).__name__}: {error}"
    Path(results_file).write_text(json.dumps(results))
    print(f"{len(jobs)} merges in {time.monotonic() - began:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])

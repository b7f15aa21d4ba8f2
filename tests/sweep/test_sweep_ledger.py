"""The ledger returns each trial exactly as stored: after a kill, a torn line, and while another sweep waits for it."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_search import REV

from mergegate.tasks.sweep.objective import MetricKey, Race
from mergegate.tasks.sweep.study import TrialRequest, TrialScores, open_ledger, request_key

KEY = "a" * 64
PROJECT = Path(__file__).resolve().parent.parent.parent
SCORES = TrialScores(
    {REV: np.array([0.1, math.nan, -1e-300]), MetricKey("copy", "metric", "acc,none"): np.array([1.0, 0.0])},
    dropped=True,
    change=0.1 + 0.2,
    seconds={"merge": 1.5},
    problem="",
)


def same(one: TrialScores | None, other: TrialScores) -> bool:
    for key, numbers in other.table.items():
        assert one.table[key].tobytes() == numbers.tobytes()
    plain = [(s.dropped, repr(s.change), dict(s.seconds or {}), s.problem, list(s.table)) for s in (one, other)]
    return plain[0] == plain[1]


def test_stored_scores_are_read_back_bit_for_bit(tmp_path: Path) -> None:
    with open_ledger(KEY, "s", root=tmp_path) as ledger:
        ledger.add("one", SCORES)
        ledger.add("two", TrialScores({}, problem="refused: NaN"))
    with open_ledger(KEY, "s", root=tmp_path) as ledger:
        assert same(ledger.find("one"), SCORES)
        assert ledger.find("two").problem == "refused: NaN"
        assert ledger.find("three") is None


def test_a_torn_line_is_cut_and_a_corrupt_file_is_an_empty_ledger(tmp_path: Path) -> None:
    with open_ledger(KEY, "s", root=tmp_path) as ledger:
        ledger.add("one", SCORES)
        ledger.add("two", SCORES)
    (journal,) = tmp_path.glob("*/trials.journal")
    lines = journal.read_bytes().splitlines(keepends=True)
    for content, records in ((lines[0] + lines[1][:-20], 1), (os.urandom(4000), 0)):
        journal.write_bytes(content)
        with open_ledger(KEY, "s", root=tmp_path) as ledger:
            assert len(ledger) == records
            ledger.add("two", SCORES)
        with open_ledger(KEY, "s", root=tmp_path) as ledger:
            assert len(ledger) == records + 1
    with open_ledger("b" * 64, "s", root=tmp_path) as ledger:  # Other scoring conditions have another ledger.
        assert len(ledger) == 0


def test_the_time_used_covers_all_runs_of_a_study(tmp_path: Path) -> None:
    with open_ledger(KEY, "s", root=tmp_path) as ledger:
        first = ledger.used_seconds
    with open_ledger(KEY, "s", root=tmp_path) as ledger:
        assert ledger.used_seconds > first
    with open_ledger(KEY, "another", root=tmp_path) as ledger:
        assert ledger.used_seconds < first + 10


def test_the_key_of_a_request_covers_recipe_set_and_race(tmp_path: Path) -> None:
    recipe: dict[str, Any] = {"merge_method": "linear", "models": ["a"]}
    requests = [
        TrialRequest(recipe, directory=tmp_path),
        TrialRequest({**recipe, "models": ["b"]}, directory=tmp_path),
        TrialRequest(recipe, "confirmation", directory=tmp_path),
        TrialRequest(recipe, "search", Race({}, {}, (0.5, 1.0)), tmp_path),
    ]
    assert len({request_key(one) for one in requests}) == len(requests)
    moved = TrialRequest(dict(reversed(recipe.items())), directory=tmp_path / "moved")
    assert request_key(moved) == request_key(requests[0])


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_sweep_ledger import KEY, SCORES
from mergegate.tasks.sweep.study import open_ledger
with open_ledger(KEY, "s", root=Path(sys.argv[1])) as ledger:
    for number in range(10**9):
        ledger.add(str(number), SCORES)
        print(number, flush=True)
"""


@pytest.mark.story
def test_every_acknowledged_record_survives_a_kill(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parent)], stdout=subprocess.PIPE, cwd=PROJECT
    )
    acknowledged = [int(child.stdout.readline()) for _ in range(40)]
    child.send_signal(signal.SIGKILL)
    acknowledged += [int(line) for line in child.stdout if line.endswith(b"\n")]
    child.wait()
    with open_ledger(KEY, "s", root=tmp_path) as ledger:
        assert len(ledger) >= len(acknowledged)
        assert same(ledger.find(str(acknowledged[-1])), SCORES)


def _second(directory: str, events: Any) -> None:
    with open_ledger(KEY, "s", on_wait=lambda: events.put("waits"), root=Path(directory)) as ledger:
        events.put(len(ledger))


@pytest.mark.story
def test_a_second_sweep_waits_and_then_finds_all_records(tmp_path: Path) -> None:
    context = get_context("spawn")
    events = context.Queue()
    with open_ledger(KEY, "s", root=tmp_path) as ledger:
        other = context.Process(target=_second, args=(str(tmp_path), events))
        other.start()
        assert events.get(timeout=120) == "waits"
        ledger.add("one", SCORES)
    assert events.get(timeout=120) == 1
    other.join()

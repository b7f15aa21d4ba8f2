"""Looks that are killed and resumed, in separate processes, from recorded streams to a routing decision."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from patience import HANG_S
from recorded_traffic import RecordedPair, Response, chat, pair, prefer_good_answers, recorded_answer, serving, stream
from watched_project import WatchedProject, rows, watched

PROJECT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.story


def streams(watch: WatchedProject, count: int, *, wrong: int) -> list[RecordedPair]:
    """Return streamed conversations in which the candidate answers `wrong` of every ten incorrectly."""
    pairs = []
    for number in range(count):
        word = "bad" if number % 10 < wrong else "good"
        request = chat("hello", "good day", f"question {number}", stream=True)
        parent = recorded_answer(stream("a ", "good", " one"))
        candidate = recorded_answer(stream("a ", word, f" one {number}"))
        pairs.append(pair(number, request=request, parent=parent, candidate=candidate, at=watch.began + number))
    return pairs


def look(watch: WatchedProject) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"MERGEGATE_HOME": str(watch.project.home), "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-m", "mergegate", "shadow", "evaluate", "profiles/watched.yaml", "--json"]
    return subprocess.Popen(command, cwd=watch.project.root, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("wrong", "code", "serving_now"),
    [pytest.param(0, 0, "promoted", marks=pytest.mark.proof), (5, 3, "rolled back")],
    ids=["good", "lopsided"],
)
def test_a_killed_look_resumes_without_repeating_judgments(
    tmp_path: Path, wrong: int, code: int, serving_now: str
) -> None:
    asked, reached, go_on = Counter[str](), threading.Event(), threading.Event()
    lock = threading.Lock()

    def patient(body: dict[str, Any]) -> Response:
        with lock:
            number = sum(asked.values())
            if number >= 60 and not go_on.is_set():
                reached.set()
            else:
                asked[json.dumps(body["messages"])] += 1
                return prefer_good_answers(body)
        go_on.wait()
        return Response(status=503)

    with serving(patient) as judge:
        watch = watched(tmp_path, judge.url, rule={"minimum_pairs": 50, "margin": 10.0, "pairs_per_look": 400})
        watch.record(streams(watch, 160, wrong=wrong), rows(watch.began, 200))
        killed = look(watch)
        assert reached.wait(HANG_S)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert watch.routing.serving == "watch"
        go_on.set()
        whole = look(watch)
        told = json.loads(whole.communicate()[0])
    assert (whole.returncode, told["shadow"]["pairs"], watch.routing.serving) == (code, 160, serving_now)
    # Requests in flight when the look was killed are sent again: at most as many as run concurrently.
    again = sum(count - 1 for count in asked.values())
    # Answers of the parent are equal, so their 24 control pairs have few different texts. A control pair that was in
    # flight when the look was killed may be replaced by another one.
    assert 320 < len(asked) <= 320 + 2 * 24 + 4
    assert again <= 4 + 2 * 24

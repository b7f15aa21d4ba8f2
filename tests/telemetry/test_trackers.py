"""Test the export of a run's numbers to Weights & Biases: only on request, and never failing the run."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mergegate.tasks.report import RunRecord, RunScore
from mergegate.tasks.telemetry.trackers import export_to_trackers, tracked_numbers

RECORD = RunRecord(
    run="7f",
    flow="release",
    profile="demo",
    ended=0.0,
    seconds=61,
    status="refused",
    message="demo is not released",
    perplexity=1.01,
    scores=(
        RunScore(task="mean of 2", reference="a", drop=1.5, low=1, high=2, max_drop=3, margin=3, outcome="pass"),
        RunScore(
            task="gsm8k", reference="a", merge=51.5, drop=2.5, low=1, high=4, max_drop=3, margin=3, outcome="fail"
        ),
    ),
)


def test_every_guard_becomes_grouped_numbers() -> None:
    assert tracked_numbers(RECORD) == {
        "seconds": 61,
        "bytes_merged": 0,
        "perplexity_ratio": 1.01,
        "drop/mean of 2": 1.5,
        "drop_low/mean of 2": 1,
        "drop_high/mean of 2": 2,
        "score/gsm8k": 51.5,
        "drop/gsm8k": 2.5,
        "drop_low/gsm8k": 1,
        "drop_high/gsm8k": 4,
    }


def test_wandb_is_not_imported_unless_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    export_to_trackers(RECORD, tmp_path, {})


def test_a_missing_or_failing_wandb_logs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setitem(sys.modules, "wandb", None)
    export_to_trackers(RECORD, tmp_path, {"MERGEGATE_WANDB": "acme/releases"})
    assert "pip install 'mergegate[wandb]'" in caplog.text

    def refuse(**_: Any) -> None:
        raise RuntimeError("no key")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=refuse, Settings=dict))
    export_to_trackers(RECORD, tmp_path, {"MERGEGATE_WANDB": "releases"})
    assert "could not send this run to Weights & Biases: no key" in caplog.text


@pytest.mark.story
def test_wandb_writes_the_run_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="an extra: pip install 'mergegate[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    export_to_trackers(RECORD, tmp_path, {"MERGEGATE_WANDB": "acme/releases"})
    wandb.teardown()  # the process that wandb starts writes when it ends
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = written.read_bytes()
    assert b"score/gsm8k" in content
    assert b"demo is not released" in content

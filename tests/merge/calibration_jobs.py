"""Models, texts and readers of calibration texts, which run as the stages do: with a directory and a journal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import mixtures
import transformers

from mergegate.merge_core.files import HashMemo, JournalLocation
from mergegate.merge_core.recipe import CalibrationReading
from mergegate.tasks.merge.calibration import CalibrationJob
from mergegate.tasks.merge.statistics import read_gradients, read_inputs
from mergegate.tasks.models.checkpoints.model import Model
from mergegate.tasks.quality.perplexity import HeldOutText, TextSetting, pin_text

R = TypeVar("R")
DEMO = Path(__file__).resolve().parents[2] / "profiles/demo"
REVERSER = DEMO / "models/reverser"
SENTENCES = ("rev: abcd>dcba", "the red cat sees the old hen.", "rev: kjih>hijk", "copy: aabb>aabb")


class Killed(BaseException):
    """Simulated SIGKILL in this process."""


def write_texts(path: Path, documents: Sequence[str | list[dict[str, str]]]) -> Path:
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in documents))
    return path


def text_of(place: Path, *documents: str | list[dict[str, str]], name: str = "text.jsonl") -> HeldOutText:
    """Write documents into `place` and pin them."""
    path = write_texts(place / name, documents or SENTENCES)
    return pin_text(path, "text", HashMemo(place / "hashes.db"), TextSetting("the text"), conversations=True)


def add_tokenizer(place: Path) -> Path:
    """Copy the tokenizer of the demo's models, which reads all texts."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "models/base" / file, place)
    return place


def saved(model: Any, place: Path, *, fused: bool = False) -> Path:
    """Save a mixture of experts with a tokenizer."""
    return add_tokenizer(mixtures.save(model, place, fused=fused))


def tokens_of(place: Path, documents: Sequence[str] = SENTENCES) -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    return [tokenizer(one).input_ids for one in documents]


def run_reader(
    reader: Callable[[CalibrationJob, Callable[[int, int], None]], R],
    directory: Path,
    text: HeldOutText,
    out: Path,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    **reading: Any,
) -> R:
    """Read ``text`` with the model in ``directory`` in float32 on the CPU, and store the results in ``out``."""
    out.mkdir(exist_ok=True)
    model = Model(name=directory.name, digest=str(directory), directory=directory)
    journal = JournalLocation(out.parent / f"{out.name}.journal", str(directory))
    settings = CalibrationReading(**reading)
    return reader(CalibrationJob(model, text, settings, "float32", "cpu", out, journal), on_progress)


measure_inputs = partial(run_reader, read_inputs)
measure_importance = partial(run_reader, read_gradients)

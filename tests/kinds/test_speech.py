"""Speech models are scored as transformers transcribes, and broken ones and broken merges are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import transformers as tf
from kind_projects import average, load, transcriber
from scoring_runs import model_in, quiet, scoring_job
from tiny_kinds import write
from tone_speech import RATE, phrases, sound_of, write_parents, write_recordings, write_wave

import mergegate
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.models.checkpoints import unload_models
from mergegate.tasks.quality.evaluation.built_in import TranscriptionTask
from mergegate.tasks.quality.evaluation.built_in.transcription import normalize_words, share_of_errors
from mergegate.tasks.quality.evaluation.definitions.task import pin_built_in
from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore
from mergegate.tasks.quality.evaluation.scoring.harness import score_documents

COUNT = 20
Parents: TypeAlias = Callable[[str], Path]
FAMILIES = [pytest.param("whisper", marks=pytest.mark.proof), "wav2vec2"]  # Whisper learns for several seconds


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File with recordings and their transcripts."""
    return write_recordings(tmp_path_factory.mktemp("data"), COUNT)


@pytest.fixture(scope="module")
def parents(tmp_path_factory: pytest.TempPathFactory) -> Parents:
    """Directory with two parents ``a`` and ``b`` of a family that understand the recordings."""
    root = tmp_path_factory.mktemp("parents")

    def write_once(family: str) -> Path:
        if not (root / family).exists():
            write_parents(family, root / family)
        return root / family

    return write_once


@pytest.fixture(autouse=True)
def nothing_stays_in_memory() -> Any:
    yield
    unload_models()


def score(directory: Path, data: Path, *, batch_size: int = 8, **settings: Any) -> dict[str, list[DocumentScore]]:
    """Return the scores of a model in the order of the recordings, by metric."""
    task = TranscriptionTask(kind="transcription", data=data, **settings)
    pinned = pin_built_in(task, data.parent, HashMemo(data.parent / "hashes.db"))
    part = (0, len(data.read_text().splitlines()))
    job = scoring_job(model_in(directory), pinned, part, batch_size=batch_size)
    rows = sorted(score_documents(job, quiet), key=lambda row: row.doc_id)
    return {metric: [row for row in rows if row.metric == f"{metric},none"] for metric in ("wer", "cer")}


def spoken_in(data: Path) -> list[str]:
    return [normalize_words(json.loads(line)["text"]) for line in data.read_text().splitlines()]


def mean(rows: list[DocumentScore]) -> float:
    return sum(row.outcome for row in rows) / len(rows)


@pytest.mark.story
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers(data: Path, parents: Parents, family: str) -> None:
    spoken, transcribe = spoken_in(data), transcriber(parents(family) / "a")
    texts = [normalize_words(transcribe(sound_of(phrase))) for phrase in spoken]
    rows = score(parents(family) / "a", data)
    assert [normalize_words(row.answer) for row in rows["wer"]] == texts
    pairs = list(zip(spoken, texts, strict=True))
    assert [row.outcome for row in rows["wer"]] == [share_of_errors(a.split(), b.split()) for a, b in pairs]
    assert mean(rows["wer"]) < 0.4  # the model understands most of it
    assert not any(row.higher_is_better for row in rows["wer"] + rows["cer"])


@pytest.mark.story
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_do_not_depend_on_the_batch(data: Path, parents: Parents, family: str) -> None:
    model = parents(family) / "a"
    assert score(model, data, batch_size=1) == score(model, data, batch_size=7)


def edit_json(name: str, **values: Any) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / name
        content = json.loads(path.read_text())
        part = content.get("feature_extractor", content)
        part.update(values)
        path.write_text(json.dumps(content))

    return edit


@pytest.mark.story
@pytest.mark.parametrize(
    ("family", "break_model"),
    [
        ("whisper", edit_json("processor_config.json", hop_length=320)),
        ("whisper", edit_json("generation_config.json", suppress_tokens=list(range(64, 70)))),
        ("wav2vec2", edit_json("processor_config.json", sampling_rate=8000)),
    ],
)
def test_a_model_with_wrong_settings_has_more_errors(
    data: Path, parents: Parents, tmp_path: Path, family: str, break_model: Callable[[Path], None]
) -> None:
    broken = shutil.copytree(parents(family) / "a", tmp_path / "broken")
    break_model(broken)
    sound = score(parents(family) / "a", data)
    assert mean(score(broken, data)["wer"]) > mean(sound["wer"]) + 0.2


@pytest.mark.story
def test_a_model_without_its_processor_is_refused(data: Path, parents: Parents, tmp_path: Path) -> None:
    broken = shutil.copytree(parents("whisper") / "a", tmp_path / "broken")
    (broken / "processor_config.json").unlink()
    task = TranscriptionTask(kind="transcription", data=data)
    with pytest.raises(InvalidInput, match="cannot load the model"):
        score(broken, task.data)
    with pytest.raises(InvalidInput, match="broken: its processor"):
        task.check_model("broken", broken, task.documents())


def test_a_missing_package_is_named(data: Path, parents: Parents, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ImportError("ParakeetFeatureExtractor requires the librosa library but it was not found")

    monkeypatch.setattr(tf.AutoProcessor, "from_pretrained", refuse)
    task = TranscriptionTask(kind="transcription", data=data)
    with pytest.raises(InvalidInput) as caught:
        task.check_model("m", data.parent, task.documents())
    assert "it needs librosa" in str(caught.value)
    assert "pip install librosa" in str(caught.value)


@pytest.mark.story
def test_a_recording_that_the_model_cannot_hear_at_once_is_refused(parents: Parents, tmp_path: Path) -> None:
    long = write_recordings(tmp_path / "long", 1)
    write_wave(long.with_name("0.wav"), np.zeros(3 * RATE))
    task = TranscriptionTask(kind="transcription", data=long)
    with pytest.raises(InvalidInput, match=r"0\.wav: a recording of 3\.0 s"):
        task.check_model("m", parents("whisper") / "a", task.documents())
    with pytest.raises(InvalidInput, match="at most 2 s"):
        score(parents("whisper") / "a", long)
    assert len(score(parents("wav2vec2") / "a", long)["wer"]) == 1


@pytest.mark.story
def test_a_transcript_that_reaches_the_limit_of_the_model_is_cut_off(
    data: Path, parents: Parents, tmp_path: Path
) -> None:
    complete = score(parents("whisper") / "a", data)["wer"]
    assert {row.ended for row in complete} == {("eos",)}
    assert [row.answer_tokens for row in complete[:5]] == [(len(phrases(5, seed=2)[at]) + 2,) for at in range(5)]
    short = shutil.copytree(parents("whisper") / "a", tmp_path / "short")
    edit_json("generation_config.json", max_length=4)(short)
    cut = score(short, data)["wer"]
    assert ("context",) in {row.ended for row in cut}
    assert {row.budgets for row in cut} == {()}  # a larger budget is not an option
    assert {row.ended for row in score(parents("wav2vec2") / "a", data)["wer"]} == {()}


@pytest.mark.story
def test_a_language_or_task_is_refused_for_a_model_without_it(data: Path, parents: Parents, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="does not select languages"):
        score(parents("wav2vec2") / "a", data, language="de")
    with pytest.raises(InvalidInput, match="a transcription task for a sequence-to-sequence model"):
        score(write("t5", tmp_path / "t5"), data)


def run(root: Path, data: Path, names: str) -> Any:
    models = ", ".join(f"{{model: {name}, parameters: {{weight: .5}}}}" for name in names)
    (root / "profile.yaml").write_text(
        f"name: speech\nrecipe: {{merge_method: linear, dtype: float32, models: [{models}]}}\n"
        f"evaluate: {{tasks: [{{task: {{kind: transcription, data: {data}}}, guarded_by: best parent, "
        "max_drop: 40}]}\n"
        "publish: {to: directory, path: releases}\n"
    )
    return mergegate.run(root / "profile.yaml", progress=False, project=root)


@pytest.mark.proof
@pytest.mark.parametrize("family", ["whisper", "wav2vec2"])
def test_a_good_merge_is_released_and_a_broken_one_fails(
    data: Path, parents: Parents, tmp_path: Path, family: str
) -> None:
    shutil.copytree(parents(family), tmp_path, dirs_exist_ok=True)
    result = run(tmp_path, data, "ab")
    assert (result.status, result.verdict) == ("released", "pass"), str(result)
    release, *_ = (path.parent for path in (tmp_path / "releases").glob("*/config.json"))
    in_memory = shutil.copytree(tmp_path / "a", tmp_path / "average")
    average([load(tmp_path / name)[1] for name in "ab"], [0.5, 0.5]).save_pretrained(in_memory)
    sounds = list(map(sound_of, spoken_in(data)))
    released, expected = (list(map(transcriber(directory), sounds)) for directory in (release, in_memory))
    assert released == expected

    write(family, tmp_path / "c", seed=5)
    result = run(tmp_path, data, "ac")
    assert (result.status, result.verdict) == ("refused", "fail"), str(result)

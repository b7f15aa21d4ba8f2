"""Compare error rates with a table of distances, and recordings with the samples that were written."""

from __future__ import annotations

import random
import struct
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from tiny_models import write_jsonl
from tone_speech import write_wave

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.quality.evaluation.built_in import TranscriptionTask, transcription
from mergegate.tasks.quality.evaluation.built_in.transcription import edit_distance, read_audio, share_of_errors
from mergegate.tasks.quality.evaluation.definitions.task import pin_built_in
from mergegate.tasks.quality.evaluation.scoring.loading import inspect_data


def table_distance(first: str, second: str) -> int:
    """Return the edit distance by the textbook recurrence (Wagner and Fischer 1974)."""
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for row in range(len(first) + 1):
        for column in range(len(second) + 1):
            if not row or not column:
                table[row][column] = row + column
                continue
            changed = first[row - 1] != second[column - 1]
            table[row][column] = min(
                table[row - 1][column] + 1, table[row][column - 1] + 1, table[row - 1][column - 1] + changed
            )
    return table[-1][-1]


def tone(frequency: float, seconds: float, rate: int) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A file with three recordings, of which the third is a copy of the first."""
    tones = (("a", 300), ("b", 500), ("copy", 300))
    for name, frequency in tones:
        write_wave(tmp_path / f"{name}.wav", tone(frequency, 0.1, 16000))
    rows = ({"audio": f"{name}.wav", "text": f"Tone {name}.", "speaker": "x"} for name, _ in tones)
    return write_jsonl(tmp_path / "speech.jsonl", rows)


def test_edit_distance_is_the_one_of_the_table_and_a_metric() -> None:
    rng = random.Random(1)
    texts = [tuple("".join(rng.choices("abc", k=rng.randrange(12))) for _ in range(2)) for _ in range(400)]
    for first, second in [*texts, ("".join(rng.choices("abcdefgh", k=200)), "".join(rng.choices("abcdefgh", k=200)))]:
        assert edit_distance(first, second) == table_distance(first, second), (first, second)
    for _ in range(100):
        a, b, c = (rng.choices("uvwxyz", k=rng.randrange(80)) for _ in range(3))
        assert edit_distance(a, b) == edit_distance(b, a)
        assert (edit_distance(a, b) == 0) == (a == b)
        assert edit_distance(a, c) <= edit_distance(a, b) + edit_distance(b, c)
        assert abs(len(a) - len(b)) <= edit_distance(a, b) <= max(len(a), len(b))


@pytest.mark.parametrize(
    ("right", "transcript", "rate"),
    [
        ("the cat sat", "the cat sat", 0.0), ("the cat sat", "the bat", 2 / 3), ("the cat sat", "", 1.0),
        ("a", "b c d e", 1.0), ("", "", 0.0), ("", "thank you", 1.0),
    ],
)  # fmt: skip
def test_error_rate_is_the_share_of_errors_at_most_one(right: str, transcript: str, rate: float) -> None:
    assert share_of_errors(right.split(), transcript.split()) == rate


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("Hello, World!", "hello world"), ("It\u2019s  John's 'quote'", "it's john's quote"),
        ("twenty-one—two", "twenty one two"), ("STRASSE Straße", "strasse strasse"),
        ("e\u0301te\u0301 \uff21\uff22\uff23", "été abc"), ("हिन्दी, नमस्ते।", "हिन्दी नमस्ते"),
        ("今日は、いい天気。", "今日は いい天気"), ("...", ""),
    ],
)  # fmt: skip
def test_normalization_drops_case_and_punctuation_only(text: str, normalized: str) -> None:
    assert transcription.normalize_words(text) == unicodedata.normalize("NFKC", normalized)


def test_normalization_is_idempotent() -> None:
    rng = random.Random(3)
    for _ in range(300):
        text = "".join(chr(rng.choice((rng.randrange(32, 0x600), rng.randrange(0x1F00, 0x2100)))) for _ in range(20))
        assert transcription.normalize_words(transcription.normalize_words(text)) == transcription.normalize_words(
            text
        ), ascii(text)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_wave_files_have_the_samples_that_were_written(tmp_path: Path, width: int, channels: int) -> None:
    samples = np.random.default_rng(width).uniform(-1, 0.99, (500, channels))
    read = read_audio(write_wave(tmp_path / "a.wav", samples if channels > 1 else samples[:, 0], width), 16000)
    assert np.abs(read - samples.mean(axis=1)).max() <= 2.0 ** (1 - 8 * width) + 1e-7
    assert read.dtype == np.float32


@pytest.mark.parametrize("own_rate", [8000, 22050, 44100, 48000])
def test_a_resampled_tone_is_the_tone_at_the_rate_of_the_model(tmp_path: Path, own_rate: int) -> None:
    read = read_audio(write_wave(tmp_path / "a.wav", tone(440, 0.5, own_rate), rate=own_rate), 16000)
    expected = tone(440, 0.5, 16000)
    assert abs(len(read) - len(expected)) <= 1
    assert np.abs(read[200:7800] - expected[200:7800]).max() < 0.01
    if own_rate == 48000:  # Frequencies that the lower rate cannot represent are removed.
        high = read_audio(write_wave(tmp_path / "b.wav", tone(15000, 0.5, own_rate), rate=own_rate), 16000)
        assert np.abs(high[200:-200]).max() < 0.02


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:100], "complete recording"),
        (lambda content: content[:44], "complete recording"),
        (lambda content: content[:4] + struct.pack("<I", 36) + content[8:40] + bytes(4), "no samples"),
        (lambda content: content[:20] + b"\x07" + content[21:], "complete recording"),
        (lambda content: b"fLaC" + content, "not a WAV file"),
        (lambda content: b"", "not a WAV file"),
    ],
)
def test_a_damaged_recording_is_refused_with_its_name(tmp_path: Path, damage: object, message: str) -> None:
    path = write_wave(tmp_path / "a.wav", tone(440, 0.1, 16000))
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(InvalidInput, match=message) as caught:
        read_audio(path, 16000)
    assert "a.wav" in str(caught.value)


@pytest.mark.story
def test_any_mutated_wave_file_is_read_or_refused(tmp_path: Path) -> None:
    content = write_wave(tmp_path / "a.wav", tone(440, 0.01, 16000)).read_bytes()
    rng = random.Random(4)
    for _ in range(500):
        mutated = bytearray(content)
        for _ in range(rng.randrange(1, 4)):
            mutated[rng.randrange(60)] = rng.randrange(256)
        (tmp_path / "m.wav").write_bytes(mutated[: rng.randrange(len(mutated) + 1)] if rng.random() < 0.3 else mutated)
        try:
            read = read_audio(tmp_path / "m.wav", 16000)
        except InvalidInput:
            continue
        assert read.ndim == 1
        assert np.isfinite(read).all()


def test_digests_cover_the_recordings(data: Path) -> None:
    task = TranscriptionTask(kind="transcription", data=data)
    assert [task.prompt_of(document) for document in task.documents()] == ["a.wav", "b.wav", "a.wav"]  # "copy" is equal
    assert len({document["sha256"] for document in task.documents()}) == 2

    def digests() -> tuple[str, str | None]:
        pinned = pin_built_in(task, data.parent, HashMemo(data.parent / "hashes.db"))
        return pinned.digest, inspect_data(pinned).data.digest

    before = digests()
    assert digests() == before
    write_wave(data.parent / "b.wav", tone(501, 0.1, 16000))
    after = digests()
    assert all(old != new for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"}', "line 1: audio: no such field"), ('{"audio": "a.wav"}', "line 1: text: no such field"),
        ('{"audio": "no.wav", "text": "x"}', "no.wav, which does not exist"),
        ('{"audio": ".", "text": "x"}', "a directory"), ("[1]", "line 1"), ("", "an empty file"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_refused_with_its_number(data: Path, line: str, message: str) -> None:
    data.write_text(line)
    with pytest.raises(InvalidInput) as caught:
        TranscriptionTask(kind="transcription", data=data).files()
    assert message in str(caught.value)

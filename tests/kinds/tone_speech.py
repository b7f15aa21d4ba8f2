"""A language of a tone per letter, which tiny speech models learn within seconds."""

from __future__ import annotations

import random
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tiny_kinds import write
from tiny_models import write_jsonl

RATE = 16000
TONES = {"a": 400, "b": 900, "c": 1700, "d": 2900}
_SECONDS = 0.06  # of a letter
_ENOUGH = 0.02  # Mean loss at which greedy answers have long been right.


def phrases(count: int, seed: int) -> list[str]:
    """Return distinct phrases of one or two words in which no letter follows itself."""
    rng = random.Random(seed)
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        words = []
        for _ in range(rng.randrange(1, 3)):
            word = [rng.choice("abcd")]
            while len(word) < rng.randrange(1, 4):
                word.append(rng.choice([letter for letter in TONES if letter != word[-1]]))
            words.append("".join(word))
        drawn[" ".join(words)] = None
    return list(drawn)


def sound_of(phrase: str) -> Any:
    """Return the samples of a phrase at ``RATE``, with a pause at the end."""
    time = np.arange(round(_SECONDS * RATE)) / RATE
    parts = [0.4 * np.sin(2 * np.pi * TONES[letter] * time) if letter in TONES else 0 * time for letter in phrase + " "]
    return np.concatenate(parts).astype(np.float32)


def write_wave(path: Path, samples: np.ndarray, width: int = 2, rate: int = RATE) -> Path:
    """Write samples in [-1, 1), ``[samples]`` or ``[samples, channels]``, as integers of ``width`` bytes."""
    integers = np.round(samples * (1 << (8 * width - 1))).astype(np.int64) + (128 if width == 1 else 0)
    content = integers.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width].tobytes()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(samples.shape[1] if samples.ndim > 1 else 1)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(content)
    return path


def write_recordings(directory: Path, count: int) -> Path:
    """Write recordings of phrases, of which parents know half, and return the file that lists them with transcripts."""
    directory.mkdir(parents=True, exist_ok=True)
    spoken = list(dict.fromkeys([*phrases(count // 2, seed=2), *phrases(count, seed=1)]))[:count]
    for number, phrase in enumerate(spoken):
        write_wave(directory / f"{number}.wav", sound_of(phrase))
    rows = ({"audio": f"{number}.wav", "text": f"{phrase.capitalize()}."} for number, phrase in enumerate(spoken))
    return write_jsonl(directory / "speech.jsonl", rows)


def teach(network: Any, examples: Mapping[str, torch.Tensor], *, steps: int = 600, rate: float = 5e-3) -> None:
    """Train ``network`` on one batch, which includes ``labels``, until it knows the batch by heart."""
    torch.manual_seed(0)
    network.eval()  # without dropout
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.0)
    loss = float("inf")
    for _ in range(steps):
        output = network(**examples)
        optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        if (loss := float(output.loss.detach())) < _ENOUGH:
            break
    assert loss < _ENOUGH, f"loss {loss:.3f} after {steps} steps"


def write_parents(family: str, directory: Path) -> None:
    """Write two similar models of a family that understand the tones to ``directory/a`` and ``directory/b``."""
    a, b = write(family, directory / "a"), write(family, directory / "b")
    processor = transformers.AutoProcessor.from_pretrained(a)
    kind = transformers.AutoModelForSpeechSeq2Seq if family == "whisper" else transformers.AutoModelForCTC
    network = kind.from_pretrained(a)
    (_teach_whisper if family == "whisper" else _teach_wav2vec2)(network, processor)
    network.save_pretrained(a)
    torch.manual_seed(7)
    with torch.no_grad():
        for tensor in network.parameters():
            tensor.add_({"whisper": 0.01, "wav2vec2": 0.0005}[family] * torch.randn_like(tensor))
    network.save_pretrained(b)


def _teach_whisper(network: Any, processor: Any) -> None:
    texts, settings = phrases(40, seed=2), network.generation_config
    features = processor.feature_extractor(list(map(sound_of, texts)), sampling_rate=RATE, return_tensors="pt")
    ids = [processor.tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    ids = [[settings.no_timestamps_token_id, *row, settings.eos_token_id] for row in ids]
    longest = max(map(len, ids))
    labels = torch.tensor([row + [-100] * (longest - len(row)) for row in ids])
    teach(network, {"input_features": features.input_features, "labels": labels})


def _teach_wav2vec2(network: Any, processor: Any) -> None:
    """Teach the last layer which letter each moment belongs to. The layers before it stay random."""
    network.eval()
    vocabulary = processor.tokenizer.get_vocab()
    states, labels = [], []
    for phrase in phrases(60, seed=2):
        inputs = processor.feature_extractor(sound_of(phrase), sampling_rate=RATE, return_tensors="pt")
        with torch.no_grad():
            hidden = network.wav2vec2(**inputs).last_hidden_state[0]
        letters = phrase.replace(" ", "|") + "|"
        states.append(hidden)
        labels += [vocabulary[letters[moment * len(letters) // len(hidden)]] for moment in range(len(hidden))]
    optimizer = torch.optim.LBFGS(network.lm_head.parameters(), max_iter=200)

    def compute_loss() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network.lm_head(torch.cat(states)), torch.tensor(labels))
        loss = loss + 1e-4 * network.lm_head.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(compute_loss)

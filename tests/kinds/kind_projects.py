"""Projects that merge, judge and release two tiny models of a kind, and what the right library computes with them.

Random models score like guesses, so the first parent labels the data, and the second one is close to it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tiny_kinds
import torch
import transformers
from PIL import Image
from scoring_runs import mean_of, write_task
from tiny_models import LETTERS, write_jsonl
from tone_speech import write_wave

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS / folder) for folder in ("flows", "merge_core")]
from demo_project import Project  # noqa: E402
from in_memory import average  # noqa: E402

from mergegate.merge_core.architecture import ModelKind, TaskForm, kind_of_directory  # noqa: E402

__all__ = ["GUARDS", "Project", "average", "load", "make_project", "outputs", "transcriber"]

GUARDS: Mapping[TaskForm, str] = {
    "text": "letters.yaml",
    "retrieval": "{kind: retrieval, data: ranking.jsonl, metric: accuracy}",
    "transcription": "{kind: transcription, data: speech.jsonl, metric: cer}",
}
SAMPLE_RATE = 16_000
PROMPT = "abc"


def make_project(name: str, root: Path, *, form: TaskForm | None = None) -> Project:
    """Write two parents of a kind, a task of a form that suits them, and a profile that releases their merge."""
    parent, _ = tiny_kinds.pair(name, root / "models")
    forms = kind_of_directory(parent).task_forms
    form = form or next(iter(forms), "text")
    write_data, labeler = _DATA[form]
    write_data(root, labeler(parent) if form in forms else None)
    (root / "profile.yaml").write_text(
        "name: merged\n"
        "recipe:\n"
        "  merge_method: linear\n"
        "  models: [{model: models/a, parameters: {weight: 0.5}}, {model: models/b, parameters: {weight: 0.5}}]\n"
        "  dtype: float32\n"
        "checks: {copies: {accepted: [a, b]}}\n"  # All three give almost the same answers.
        "evaluate:\n"
        f"  tasks: [{{task: {GUARDS[form]}, guarded_by: a, max_drop: 40}}]\n"
        "publish: {to: directory, path: releases}\n"
    )
    return Project(root)


def _write_ranking(root: Path, best: Callable[[str, list[str]], int] | None) -> None:
    rng = random.Random(1)
    rows: list[dict[str, object]] = []
    for _ in range(60):
        query, *texts = (" ".join(rng.sample(tiny_kinds.WORDS, 5)) for _ in range(6))
        right = best(query, texts) if best else 0
        rows.append({"query": query, "positives": [texts[right]], "negatives": texts[:right] + texts[right + 1 :]})
    write_jsonl(root / "ranking.jsonl", rows)


def _ranker(parent: Path) -> Callable[[str, list[str]], int]:
    kind, model = load(parent)
    if kind.loader == "CrossEncoder":
        return lambda query, texts: int(np.argmax(model.predict([(query, text) for text in texts])))
    return lambda query, texts: int(
        model.similarity(model.encode_query([query]), model.encode_document(texts))[0].argmax()
    )


def _write_letters(root: Path, score: Callable[[str, str], float] | None) -> None:
    rng = random.Random(1)
    rows: list[dict[str, object]] = []
    for _ in range(100):
        word, choices = "".join(rng.choices(LETTERS[:16], k=6)), rng.sample(LETTERS[:16], 2)
        right = int(score(word, choices[1]) > score(word, choices[0])) if score else 0
        rows.append({"word": word, "choices": choices, "right": right})
    config = {"output_type": "multiple_choice", "doc_to_text": "{{word}}", "doc_to_choice": "{{choices}}"}
    config |= {"doc_to_target": "right", "target_delimiter": ""}
    write_task(root, "letters", rows, **config, metric_list=[mean_of("acc")])


def _letter_scorer(parent: Path) -> Callable[[str, str], float]:
    _, model = load(parent)
    tokenizer = transformers.AutoTokenizer.from_pretrained(parent)

    def score(word: str, letter: str) -> float:
        tokens = {"input_ids": tokenizer(word, return_tensors="pt").input_ids}
        if model.config.is_encoder_decoder:
            tokens["decoder_input_ids"] = torch.tensor([[model.config.decoder_start_token_id]])
        with torch.no_grad():
            return float(model(**tokens).logits[0, -1, tokenizer.convert_tokens_to_ids(letter)])

    return score


def _write_speech(root: Path, transcribe: Callable[[np.ndarray], str] | None) -> None:
    rows: list[dict[str, object]] = []
    for number in range(40):
        write_wave(root / f"{number}.wav", _sound(number))
        rows.append({"audio": f"{number}.wav", "text": transcribe(_sound(number)) if transcribe else "one"})
    write_jsonl(root / "speech.jsonl", rows)


def _sound(number: int) -> np.ndarray:
    """Return half a second of two tones."""
    times = np.arange(SAMPLE_RATE // 2) / SAMPLE_RATE
    return (0.4 * np.sin(2000 * (1 + number) * times) + 0.4 * np.sin(700 * (1 + number % 7) * times)).astype("float32")


def transcriber(directory: Path) -> Callable[[np.ndarray], str]:
    """Return a function that transcribes one recording with transformers alone."""
    _, model = load(directory)
    processor = transformers.AutoProcessor.from_pretrained(directory)

    def transcribe(sound: np.ndarray) -> str:
        features = processor(sound, sampling_rate=SAMPLE_RATE, return_tensors="pt")
        with torch.no_grad():
            if not model.can_generate():  # CTC
                return str(processor.batch_decode(model(**features).logits.argmax(-1))[0])
            return str(processor.batch_decode(model.generate(**features), skip_special_tokens=True)[0])

    return transcribe


_DATA: Mapping[TaskForm, tuple[Callable[[Path, Any], None], Callable[[Path], Any]]] = {
    "text": (_write_letters, _letter_scorer),
    "retrieval": (_write_ranking, _ranker),
    "transcription": (_write_speech, transcriber),
}
"""For each form of task, a function that writes its data, and one that returns the labels of a parent."""


def load(directory: Path) -> tuple[ModelKind, Any]:
    """Load a checkpoint with the class of its kind, in float32; all tensors must fit."""
    kind = kind_of_directory(directory)
    if kind.library == "sentence-transformers" or kind.loader == "CrossEncoder":
        import sentence_transformers

        return kind, getattr(sentence_transformers, kind.loader)(str(directory), device="cpu").eval()
    model, info = getattr(transformers, kind.loader).from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert {key: value for key, value in info.items() if value and key.endswith("keys")} == {}
    return kind, model.eval()


def outputs(directory: Path, model: Any) -> torch.Tensor:
    """Return what a model computes for fixed inputs of all its modalities, with the processors in ``directory``."""
    kind = kind_of_directory(directory)
    with torch.no_grad():
        if kind.loader == "CrossEncoder":
            return torch.tensor(model.predict([("w1 w2 w3", "w2 w4"), ("w5", "w6 w7 w8")]))
        if kind.loader in ("SentenceTransformer", "SparseEncoder"):
            both = [model.encode_query(["w1 w2 w3"]), model.encode_document(["w2 w4"])]
            return torch.cat([torch.as_tensor(one).to_dense() for one in both])
        if "transcription" in kind.task_forms:
            processor = transformers.AutoProcessor.from_pretrained(directory)
            features = dict(processor(_sound(3), sampling_rate=SAMPLE_RATE, return_tensors="pt"))
            if model.config.is_encoder_decoder:
                features["decoder_input_ids"] = torch.tensor([[model.config.decoder_start_token_id, 5, 6]])
            return model(**features).logits
        if kind.modalities == ("sound",):
            processor = transformers.AutoProcessor.from_pretrained(directory)
            text = f"<audio>{PROMPT}"
            return model(
                **processor(text=text, audio=[_sound(3)], sampling_rate=SAMPLE_RATE, return_tensors="pt")
            ).logits
        if "pictures" in kind.modalities:
            return model(**_picture_inputs(directory)).logits
        tokens = {"input_ids": torch.arange(20, 30)[None]}
        if model.config.is_encoder_decoder:
            tokens["decoder_input_ids"] = tokens["input_ids"]
        return model(**tokens).logits


def _picture_inputs(directory: Path) -> dict[str, Any]:
    """Return a text with a picture. Without a processor, the tokens of the picture are written by hand."""
    pixels = np.arange(3 * tiny_kinds.PICTURE_SIZE**2).reshape(tiny_kinds.PICTURE_SIZE, -1, 3) % 251
    picture = Image.fromarray(pixels.astype("uint8"))
    if (directory / "processor_config.json").exists():
        processor = transformers.AutoProcessor.from_pretrained(directory)
        message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": PROMPT}]}
        text = processor.apply_chat_template([message], add_generation_prompt=True)
        return dict(processor(text=[text], images=[picture], return_tensors="pt"))
    inputs = dict(transformers.AutoImageProcessor.from_pretrained(directory)(picture, return_tensors="pt"))
    tokens = torch.tensor([[7, *[5] * 4, 8, 40, 41, 42]])  # A picture of 16 patches becomes 4 tokens.
    if "Mistral3" in (directory / "config.json").read_text("utf-8"):
        inputs["image_sizes"] = torch.tensor([[tiny_kinds.PICTURE_SIZE] * 2])
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (tokens == 5).int()
    return {**inputs, "input_ids": tokens}

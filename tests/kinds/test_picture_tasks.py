"""lm-eval's tasks with pictures: answers, likelihoods, hashes of pictures, and an interrupted run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from scoring_runs import mean_of, model_in, pin, quiet, scoring_job, write_task
from tiny_kinds import PICTURE_SIZE, write
from tiny_models import write_jsonl

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import JournalLocation
from mergegate.tasks.models.checkpoints import TellProgress, load_model
from mergegate.tasks.models.checkpoints.model_cache import unload_models
from mergegate.tasks.quality import evaluation
from mergegate.tasks.quality.evaluation.backends.picture_processor import load_processor
from mergegate.tasks.quality.evaluation.backends.pictures import hash_picture, split_at_placeholders
from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore
from mergegate.tasks.quality.evaluation.scoring.harness import score_documents
from mergegate.tasks.quality.evaluation.scoring.loading import inspect_data

COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
DOCUMENTS = 6


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write("llava", tmp_path_factory.mktemp("models") / "llava")
    unload_models()


GENERATED: dict[str, Any] = {"output_type": "generate_until", "doc_to_target": "{{label}}"}
GENERATED |= {"metric_list": [mean_of("exact_match")]}
GENERATED["generation_kwargs"] = {"until": ["~"], "max_gen_toks": 6, "do_sample": False}
CHOSEN = {"output_type": "multiple_choice", "doc_to_choice": list(COLORS), "doc_to_target": "right"}
CHOSEN |= {"metric_list": [mean_of("acc")]}


def shapes(directory: Path, **config: Any) -> Path:
    """Write a task whose pictures are in a directory with their labels, which datasets reads without a function."""
    rows = []
    for number in range(DOCUMENTS):
        label = list(COLORS)[number % len(COLORS)]
        paint(directory / "shapes" / "test" / f"{number}.png", label, number)
        rows.append({"file_name": f"{number}.png", "label": label, "right": number % len(COLORS)})
    write_jsonl(directory / "shapes" / "test" / "metadata.jsonl", rows)
    defaults = {"dataset_path": "shapes", "test_split": "test", "doc_to_image": ["image"]}
    defaults |= {"doc_to_text": "<image>Which color?", **GENERATED}
    return write_task(directory, "shapes", **defaults | config)


def paint(file: Path, color: str, number: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new("RGB", (PICTURE_SIZE, PICTURE_SIZE), COLORS[color])
    picture.putpixel((number, 0), (255, 255, 255))
    picture.save(file)


def pinned(path: Path) -> evaluation.EvalTask:
    loaded = inspect_data(pin(path))
    return pin(path, data_digest=loaded.data.digest, documents=loaded.documents)


def scored(
    task: evaluation.EvalTask,
    directory: Path,
    *,
    journal: JournalLocation | None = None,
    on_progress: TellProgress = quiet,
    **own: Any,
) -> tuple[DocumentScore, ...]:
    settings = {"dtype": "float32", "batch_size": 4, "chat_template": True, **own}
    job = scoring_job(model_in(directory, "llava"), task, (0, DOCUMENTS), **settings)
    return score_documents(replace(job, journal=journal), on_progress)


class Oracle:
    """transformers without lm-eval and without mergegate."""

    def __init__(self, directory: Path) -> None:
        self.processor: Any = transformers.AutoProcessor.from_pretrained(directory)
        self.network: Any = transformers.AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float64)

    def inputs(self, picture: Path, answer: str = "") -> Any:
        content = [{"type": "image"}, {"type": "text", "text": "Which color?"}]
        prompt = self.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        pictures = [Image.open(picture)]
        return self.processor(text=prompt + answer, images=pictures, return_tensors="pt").to(torch.float64)

    def answer(self, picture: Path) -> str:
        inputs = self.inputs(picture)
        tokens = self.network.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        return str(self.processor.decode(tokens, skip_special_tokens=True)).split("~")[0]

    def likelihood(self, picture: Path, answer: str) -> float:
        start = self.inputs(picture)["input_ids"].shape[1]
        inputs = self.inputs(picture, answer)
        with torch.inference_mode():
            logits = self.network(**inputs).logits[0, start - 1 : -1]
        targets = inputs["input_ids"][0, start:, None]
        return float(logits.log_softmax(-1).gather(1, targets).sum())


@pytest.mark.story
def test_answers_are_those_of_transformers(llava: Path, tmp_path: Path) -> None:
    rows = scored(pinned(shapes(tmp_path)), llava)
    oracle = Oracle(llava)
    answers = [oracle.answer(tmp_path / "shapes" / "test" / f"{number}.png") for number in range(DOCUMENTS)]
    by_document = sorted(rows, key=lambda row: row.doc_id)
    assert [row.answer for row in by_document] == [answer.strip() for answer in answers]  # as in lm-eval
    assert all(row.ended for row in rows)


def test_likelihoods_of_given_answers_are_those_of_transformers(llava: Path, tmp_path: Path) -> None:
    rows = scored(pinned(shapes(tmp_path, **CHOSEN)), llava)
    oracle = Oracle(llava)
    right = [row for row in rows if row.metric == "acc,none"]
    for row in right:
        picture = tmp_path / "shapes" / "test" / f"{row.doc_id}.png"
        likelihoods = [oracle.likelihood(picture, color) for color in COLORS]
        assert row.outcome == float(max(range(3), key=lambda at: likelihoods[at]) == row.doc_id % 3)
    probabilities = [row.outcome for row in rows if row.metric != "acc,none"]
    assert len(set(probabilities)) == len(right) == DOCUMENTS  # each document has a picture of its own


@pytest.mark.story
def test_two_reads_have_equal_hashes_and_another_picture_has_another(llava: Path, tmp_path: Path) -> None:
    path = shapes(tmp_path)
    task = pinned(path)
    first, again = ({(row.doc_hash, row.prompt_hash) for row in scored(task, llava)} for _ in range(2))
    assert first == again
    assert len({prompt for _, prompt in first}) == DOCUMENTS  # equal texts, distinct pictures

    paint(tmp_path / "shapes" / "test" / "0.png", "blue", 0)
    changed = pinned(path)
    assert changed.digest != task.digest
    assert changed.data_digest != task.data_digest
    assert len(first - {(row.doc_hash, row.prompt_hash) for row in scored(changed, llava)}) == 1


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"doc_to_text": "Which color?"}, "0 placeholders"),
        ({"doc_to_text": "<image>and <image>"}, "2 placeholders <image> for 1"),
        ({"doc_to_image": ["label"]}, "'red'"),
    ],
)
def test_a_prompt_needs_a_picture_for_each_placeholder(tmp_path: Path, config: dict[str, Any], found: str) -> None:
    with pytest.raises(InvalidInput, match=found):
        pinned(shapes(tmp_path, **config))


def test_a_long_prompt_is_not_cut(llava: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"tokens, some of which stand for the pictures"):
        scored(pinned(shapes(tmp_path)), llava, max_length=40)


def test_placeholders_become_parts_of_a_message() -> None:
    history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<image>and <image> differ?"}]
    first, second = ({"type": "text", "text": text} for text in ("and ", " differ?"))
    content = [{"type": "image"}, first, {"type": "image"}, second]
    assert split_at_placeholders(history) == [history[0], {"role": "user", "content": content}]


def test_pictures_with_equal_bytes_and_other_sizes_or_colors_differ() -> None:
    wide, tall = Image.new("L", (4, 2)), Image.new("L", (2, 4))
    first, second = Image.new("P", (2, 2)), Image.new("P", (2, 2))
    first.putpalette([0, 0, 0])
    second.putpalette([255, 0, 0])
    assert wide.tobytes() == tall.tobytes()
    assert len({hash_picture(picture) for picture in (wide, tall, first, second)}) == 4


def test_the_prompt_for_people_names_each_picture(tmp_path: Path) -> None:
    task = pinned(shapes(tmp_path))
    texts = evaluation.document_texts(task, {"shapes": range(DOCUMENTS)})
    prompts = [texts["shapes", position].prompt for position in range(DOCUMENTS)]
    assert len(set(prompts)) == DOCUMENTS
    assert all(re.fullmatch(r"<image [0-9a-f]{12}>Which color\?", prompt) for prompt in prompts)


@pytest.mark.parametrize(
    ("settings", "own", "found"),
    [
        ({"backend": "vllm", "chat_template": True}, None, "does not pass to the model"),
        ({}, None, "no chat template"),
        ({"chat_template": True}, evaluation.PromptSettings(num_fewshot=2), "2 for a task with pictures"),
    ],
)
def test_a_picture_task_needs_a_backend_that_reads_pictures_and_a_chat_template(
    tmp_path: Path, settings: dict[str, Any], own: evaluation.PromptSettings | None, found: str
) -> None:
    path = shapes(tmp_path)
    evaluation.require_effect(path.name, evaluation.PromptSettings(apply_chat_template=True), tmp_path)
    with pytest.raises(InvalidInput, match=found):
        evaluation.require_effect(path.name, own, tmp_path, evaluation.Scoring(**settings))


@pytest.mark.story
def test_the_form_of_a_task_follows_its_documents(tmp_path: Path) -> None:
    assert pinned(shapes(tmp_path)).form == "pictures"
    assert evaluation.task_tree("mmmu_val").form == evaluation.task_tree("chartqa").form == "pictures"
    assert evaluation.task_tree("arc_easy").form == "text"


def test_a_processor_without_its_package_is_refused_by_the_name_of_the_package(tmp_path: Path) -> None:
    directory = write("qwen2_vl", tmp_path / "qwen")
    with pytest.raises(InvalidInput, match="torchvision, which is not installed"):
        load_processor("qwen", directory)


def test_a_picture_that_a_function_opens_is_part_of_the_task(tmp_path: Path) -> None:
    paint(tmp_path / "0.png", "red", 0)
    (tmp_path / "reading.py").write_text(
        "from pathlib import Path\nfrom PIL import Image\n"
        "def pictures(doc):\n    return [Image.open(Path(__file__).parent / doc['picture'])]\n"
    )
    pictures = {"doc_to_image": "!function reading.pictures", "doc_to_text": "<image>Which color?"}
    path = write_task(tmp_path, "opened", [{"picture": "0.png", "label": "red"}], **pictures, **GENERATED)
    first = pinned(path)
    assert pinned(path) == first
    paint(tmp_path / "0.png", "blue", 0)
    second = pinned(path)
    assert second.digest != first.digest
    assert second.data_digest != first.data_digest


def test_a_model_that_reads_only_text_cannot_answer_about_pictures(tmp_path: Path) -> None:
    directory = write("text generator", tmp_path / "text")
    with pytest.raises(InvalidInput, match="a decoder that reads pictures"):
        scored(pinned(shapes(tmp_path)), directory)


def test_a_sweep_cannot_search_with_pictures(llava: Path, tmp_path: Path) -> None:
    task = pinned(shapes(tmp_path, **CHOSEN))
    with (
        load_model(model_in(llava), dtype="float32", device="cpu") as loaded,
        pytest.raises(InvalidInput, match="documents with pictures"),
    ):
        evaluation.tokenize_task(task, evaluation.Scoring(dtype="float32", batch_size=4, chat_template=True), loaded)

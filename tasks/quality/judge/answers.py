"""Generate one model's answers to every prompt with greedy decoding, as a cached stage in the model process.

Prompts come from a jsonl file or MT-Bench's questions, pinned by content. A line is ``{"prompt": "…"}`` or
``{"turns": ["…", "…"]}``. Optional keys are ``id`` (or MT-Bench's ``question_id``), ``category`` and ``reference``,
which is a text or a list with one text per turn. MT-Bench has its reference answers in a second file.

A parent answers only once; each new merge answers again. The model's own generation defaults (temperatures,
penalties) are ignored, so that both models decode in the same way. Each model still stops at its own end tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.parsing import MAX_DATA_BYTES, line_location, parse_line, plain_file, read_plain
from mergegate.tasks.base.stage import Runtime, StageValue, advance, stage
from mergegate.tasks.base.store import NotInKey
from mergegate.tasks.models.checkpoints import LoadedModel, Model, TellProgress, call_model_process, load_model
from mergegate.tasks.quality.judge.settings import Generation, JudgeSettings


class References(BaseModel):
    """File of reference answers pinned by content. They affect judgments, not answers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Annotated[Path, NotInKey]
    sha256: str


class Prompts(References):
    """File of prompts pinned by content, and the size and seed of the sample."""

    sample: int | None = None
    seed: int = 0


class JudgePrompts(NamedTuple):
    """Prompts and reference answers of one run."""

    prompts: Prompts
    references: References | None


@dataclass(frozen=True)
class Prompt:
    """One conversation: the user's messages, turn by turn."""

    id: str
    turns: tuple[str, ...]
    references: tuple[str | None, ...]  # As many as turns.
    category: str = ""


def pin_prompts(settings: JudgeSettings, root: Path, hashes: HashMemo) -> JudgePrompts:
    """Return the prompts and reference answers with their sha256. Relative paths are relative to ``root``.

    Raises:
        InvalidInput: If a file is missing or malformed.
    """

    def pin(file: Path, field: str) -> tuple[Path, str]:
        path = (root / file).absolute()
        try:
            plain_file(path, most=MAX_DATA_BYTES)
        except FileNotFoundError:
            raise InvalidInput(
                f"judge.{field}: {file}", found="no such file", expected="jsonl, relative to the profile"
            ) from None
        return path, hashes.sha256(path)

    path, sha256 = pin(settings.prompts, "prompts")
    prompts = Prompts(path=path, sha256=sha256, sample=settings.sample, seed=settings.seed)
    references = None
    if settings.references is not None:
        path, sha256 = pin(settings.references, "references")
        references = References(path=path, sha256=sha256)
    read_prompts(prompts, references)  # Validate now rather than after hours of merging and evaluating.
    return JudgePrompts(prompts, references)


def read_prompts(prompts: Prompts, references: References | None = None) -> tuple[Prompt, ...]:
    """Return the selected prompts in the order of the file.

    Prompts are sampled in the order of a hash, so a larger sample contains every smaller one.

    Raises:
        InvalidInput: If a file changed after it was pinned, or a line is malformed.
    """
    by_id: dict[str, Prompt] = {}
    for location, line in _lines(prompts.path, prompts.sha256):
        if ("prompt" in line) == ("turns" in line):
            problem = "both prompt and turns" if "prompt" in line else "neither prompt nor turns"
            raise InvalidInput(location, found=problem, expected="a text under prompt, or a list of texts under turns")
        turns = (line["prompt"],) if "prompt" in line else line["turns"]
        if not (isinstance(turns, (list, tuple)) and turns and all(isinstance(t, str) and t.strip() for t in turns)):
            raise InvalidInput(
                location, found=f"{turns!r:.80}", expected="a text under prompt, or a list of texts under turns"
            )
        reference = line.get("reference")
        by_turn = reference if isinstance(reference, list) else [reference]
        if len(by_turn) > len(turns) or not all(text is None or isinstance(text, str) for text in by_turn):
            raise InvalidInput(
                location, found=f"reference {reference!r:.80}", expected="a text, or a list with a text for each turn"
            )
        padded = (*(text or None for text in by_turn), *[None] * (len(turns) - len(by_turn)))
        prompt = Prompt(_id(line), tuple(turns), padded, str(line.get("category", "")))
        if prompt.id in by_id:
            raise InvalidInput(location, found=f"a second prompt with id {prompt.id}", expected="unique ids")
        by_id[prompt.id] = prompt
    for location, line in _lines(references.path, references.sha256) if references else ():
        try:
            texts = line["choices"][0]["turns"]
        except (KeyError, IndexError, TypeError):
            texts = None
        if not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
            raise InvalidInput(
                location,
                found="no reference answer",
                expected="the format of MT-Bench: question_id, choices: [{turns: [...]}]",
            )
        if matched := by_id.get(_id(line)):
            padded = (*texts[: len(matched.turns)], *[None] * (len(matched.turns) - len(texts)))
            by_id[matched.id] = Prompt(matched.id, matched.turns, padded, matched.category)
    shuffled = sorted(by_id, key=lambda name: hashlib.sha256(f"{prompts.seed}/{name}".encode()).digest())
    selected = set(shuffled[: prompts.sample])
    if len(selected) < 2:
        raise InvalidInput(
            str(prompts.path), found=f"{len(selected)} prompts", expected="at least 2, preferably hundreds"
        )
    return tuple(prompt for prompt in by_id.values() if prompt.id in selected)


def _lines(path: Path, sha256: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    content = read_plain(path, MAX_DATA_BYTES)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise InvalidInput(str(path), found="a file that changed during the run", remedy="run again")
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        yield line_location(path, number), {"id": number, **parse_line(line, path, number)}


def _id(line: Mapping[str, Any]) -> str:
    return str(line.get("question_id", line["id"]))


FILE = "answers.jsonl"


class AnswerSummary(StageValue):
    """Counts of one model's answers. The artifact contains ``answers.jsonl``."""

    model: Annotated[str, NotInKey]
    prompts: int
    answers: int  # One per turn.
    cut_off: int  # Number of answers that ended at the token limit.
    characters: int

    @property
    def cut_off_percent(self) -> float:
        return 100 * self.cut_off / self.answers if self.answers else 0.0

    def summary(self) -> str:
        cut = f", {self.cut_off} cut off" if self.cut_off else ""
        return f"{self.answers} answers{cut}"


class ConversationAnswers(NamedTuple):
    """A model's answers in one conversation, which are a line of ``answers.jsonl``."""

    id: str  # ID of the prompt.
    answers: tuple[str, ...]  # One per turn.
    cut_off: tuple[bool, ...]


@stage("answer", version=1, subject="model")
def answer(out: Path, model: Model, prompts: Prompts, generation: Generation, runtime: Runtime) -> AnswerSummary:
    """Answer every prompt with ``model``, turn by turn, and write ``answers.jsonl``.

    Raises:
        InvalidInput: If the model cannot be loaded, has no chat template, or a prompt does not fit into its context.
    """
    conversations = call_model_process(
        _answer_all,
        (model, read_prompts(prompts), generation, runtime.device),
        location=f"answers of {model.name}",
        models=[model],
        on_progress=lambda done, total: advance(done, total, "answers"),
    )
    write_lines(out / FILE, (item._asdict() for item in conversations))
    return AnswerSummary(
        model=model.name,
        prompts=len(conversations),
        answers=sum(len(item.answers) for item in conversations),
        cut_off=sum(sum(item.cut_off) for item in conversations),
        characters=sum(len(text) for item in conversations for text in item.answers),
    )


def read_answers(directory: Path) -> dict[str, ConversationAnswers]:
    """Return the answers in an artifact of this stage, by prompt ID."""
    lines = (json.loads(line) for line in (directory / FILE).read_text(encoding="utf-8").splitlines())
    rows = (ConversationAnswers(row["id"], tuple(row["answers"]), tuple(row["cut_off"])) for row in lines)
    return {row.id: row for row in rows}


def write_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


class _Question(NamedTuple):
    """One turn of one conversation, tokenized for generation."""

    row: int
    tokens: list[int]


def _answer_all(
    model: Model, prompts: Sequence[Prompt], generation: Generation, device: str, on_progress: TellProgress
) -> list[ConversationAnswers]:
    answers: list[list[str]] = [[] for _ in prompts]
    cut_off: list[list[bool]] = [[] for _ in prompts]
    total, done = sum(len(prompt.turns) for prompt in prompts), 0
    with load_model(model, dtype=generation.dtype, device=device) as loaded:
        if generation.chat_template and not loaded.tokenizer.chat_template:
            raise InvalidInput(
                "judge.chat_template",
                found=f"the tokenizer of {model.name} has no chat template",
                remedy="chat_template: false",
            )
        for turn in range(max(len(prompt.turns) for prompt in prompts)):
            questions: list[_Question] = []
            for row, prompt in enumerate(prompts):
                if turn >= len(prompt.turns):
                    continue
                # The conversation so far, which begins and ends with a message of the user.
                messages = [*chain.from_iterable(zip(prompt.turns, answers[row], strict=False)), prompt.turns[turn]]
                if generation.chat_template:
                    roles = cycle(("user", "assistant"))
                    text = loaded.tokenizer.apply_chat_template(
                        [{"role": role, "content": text} for role, text in zip(roles, messages, strict=False)],
                        tokenize=False,
                        add_generation_prompt=True,
                    )
                    encoded = loaded.tokenizer(text, add_special_tokens=False)  # The template contains special tokens.
                else:
                    encoded = loaded.tokenizer("\n\n".join(text for text in messages if text))
                questions.append(_Question(row, list(encoded.input_ids)))
            # Batches of similar length, longest first, so that memory runs out immediately or never.
            questions.sort(key=lambda question: len(question.tokens), reverse=True)
            for start in range(0, len(questions), generation.batch_size):
                batch = questions[start : start + generation.batch_size]
                location = f"prompt {prompts[batch[0].row].id}"
                texts = _generate(loaded, batch, generation.max_new_tokens, location)
                for question, (text, is_cut) in zip(batch, texts, strict=True):
                    answers[question.row].append(text)
                    cut_off[question.row].append(is_cut)
                done += len(batch)
                on_progress(done, total)
    return [
        ConversationAnswers(prompt.id, tuple(answers[row]), tuple(cut_off[row])) for row, prompt in enumerate(prompts)
    ]


def _generate(
    loaded_model: LoadedModel, batch: Sequence[_Question], token_limit: int, location: str
) -> list[tuple[str, bool]]:
    """Return the greedy answer to each question, and whether it reached the token limit or the end of the context."""
    import torch
    import transformers

    network, tokenizer = loaded_model.network, loaded_model.tokenizer
    longest = len(batch[0].tokens)
    if longest == 0 or (loaded_model.context is not None and longest >= loaded_model.context):
        raise InvalidInput(
            location,
            found=f"{longest} tokens",
            expected=f"at least 1 token, and fewer than the {loaded_model.context} of the model's context",
        )
    token_limit = token_limit if loaded_model.context is None else min(token_limit, loaded_model.context - longest)
    default_config: Any = network.generation_config
    ends = default_config.eos_token_id if default_config.eos_token_id is not None else tokenizer.eos_token_id
    end_tokens = [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [int(ends)]
    padding = next((t for t in (tokenizer.pad_token_id, *end_tokens) if t is not None), 0)
    ids = torch.full((len(batch), longest), padding, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, question in enumerate(batch):  # Pad on the left, because an answer continues the question.
        ids[row, longest - len(question.tokens) :] = torch.tensor(question.tokens)
        mask[row, longest - len(question.tokens) :] = 1
    configuration: Any = transformers.GenerationConfig  # Its constructor does not declare types.
    config = configuration(
        do_sample=False, num_beams=1, max_new_tokens=token_limit, eos_token_id=end_tokens or None, pad_token_id=padding
    )
    # A call takes missing settings from the model's own defaults, so replace these during the call.
    network.generation_config = config
    try:
        with torch.inference_mode():
            out = network.generate(input_ids=ids.to(network.device), attention_mask=mask.to(network.device))
    finally:
        network.generation_config = default_config
    answers = []
    for row in out:
        tokens = row[longest:].tolist()
        end = next((position for position, token in enumerate(tokens) if token in end_tokens), None)
        text = str(tokenizer.decode(tokens[:end], skip_special_tokens=True))
        answers.append((text.strip(), end is None))
    return answers

"""Answers: what one model says to every prompt, decoded greedily in the process that holds models, as a
cached stage.

A parent answers once, ever; only the merge answers anew. The model's own generation defaults (temperatures, penalties)
are set aside, so that both models decode alike; where it stops is still its own affair.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.checkpoints import LoadedModel, Model, TellProgress, call_model_process, load_model
from mergegate.tasks.judge.prompts import Prompt, Prompts, read_prompts
from mergegate.tasks.judge.settings import Generation
from mergegate.tasks.stage import Runtime, StageValue, advance, stage
from mergegate.tasks.store import NotInKey

FILE = "answers.jsonl"


class AnswerSummary(StageValue):
    """Answers of one model. The artifact holds ``answers.jsonl``: ``id``, ``answers`` and ``cut_off`` by turn."""

    model: Annotated[str, NotInKey]
    prompts: int
    answers: int  # one a turn
    cut_off: int  # answers that ended at the limit of tokens
    characters: int

    def summary(self) -> str:
        cut = f", {self.cut_off} cut off" if self.cut_off else ""
        return f"{self.answers} answers{cut}"


@dataclass(frozen=True)
class ConversationAnswers:
    """What a model said in one conversation."""

    id: str  # of the prompt
    answers: tuple[str, ...]  # one a turn
    cut_off: tuple[bool, ...]


@stage("answer", version=1, subject="model")
def answer(out: Path, model: Model, prompts: Prompts, generation: Generation, runtime: Runtime) -> AnswerSummary:
    """Answer every prompt with ``model``, turn by turn, in ``answers.jsonl``.

    Raises:
        InvalidInput: when the model cannot be loaded, has no chat template, or a prompt does not fit into its context.
    """
    answered = call_model_process(
        _answer_all,
        (model, read_prompts(prompts), generation, runtime.device),
        where=f"answers of {model.name}",
        models=[model],
        on_progress=lambda done, total: advance(done, total, "answers"),
    )
    rows = ({"id": a.id, "answers": a.answers, "cut_off": a.cut_off} for a in answered)
    (out / FILE).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return AnswerSummary(
        model=model.name,
        prompts=len(answered),
        answers=sum(len(a.answers) for a in answered),
        cut_off=sum(sum(a.cut_off) for a in answered),
        characters=sum(len(text) for a in answered for text in a.answers),
    )


def read_answers(directory: Path) -> dict[str, ConversationAnswers]:
    """The answers of an artifact of this stage, by prompt."""
    lines = (json.loads(line) for line in (directory / FILE).read_text(encoding="utf-8").splitlines())
    rows = (ConversationAnswers(row["id"], tuple(row["answers"]), tuple(row["cut_off"])) for row in lines)
    return {row.id: row for row in rows}


class _Question(NamedTuple):
    """One turn of one conversation, ready to be answered."""

    row: int
    tokens: list[int]


def _answer_all(
    model: Model, asked: Sequence[Prompt], generation: Generation, device: str, on_progress: TellProgress
) -> list[ConversationAnswers]:
    with load_model(model, dtype=generation.dtype, device=device) as loaded:
        return _converse(loaded, model.name, asked, generation, on_progress)


def _converse(
    loaded: LoadedModel, name: str, asked: Sequence[Prompt], generation: Generation, on_progress: TellProgress
) -> list[ConversationAnswers]:
    if generation.chat_template and not loaded.tokenizer.chat_template:
        raise InvalidInput(
            "judge.chat_template",
            found=f"a tokenizer without one ({name})",
            remedy="chat_template: false",
        )
    said: list[list[str]] = [[] for _ in asked]
    cut: list[list[bool]] = [[] for _ in asked]
    total, done = sum(len(prompt.turns) for prompt in asked), 0
    for turn in range(max(len(prompt.turns) for prompt in asked)):
        questions = [
            _Question(row, _encode(loaded.tokenizer, prompt, said[row], generation.chat_template))
            for row, prompt in enumerate(asked)
            if turn < len(prompt.turns)
        ]
        for batch in _batches(questions, generation.batch_size):
            longest = asked[batch[0].row]
            for question, (text, is_cut) in zip(
                batch, _generate(loaded, batch, generation.max_new_tokens, f"prompt {longest.id}"), strict=True
            ):
                said[question.row].append(text)
                cut[question.row].append(is_cut)
            done += len(batch)
            on_progress(done, total)
    return [ConversationAnswers(prompt.id, tuple(said[row]), tuple(cut[row])) for row, prompt in enumerate(asked)]


def _encode(tokenizer: Any, prompt: Prompt, said: Sequence[str], chat_template: bool) -> list[int]:
    """Tokens of the conversation up to and with the turn that is to be answered."""
    asked = prompt.turns[: len(said) + 1]
    if not chat_template:
        pieces = [piece for pair in zip(asked, [*said, ""], strict=True) for piece in pair if piece]
        return list(tokenizer("\n\n".join(pieces)).input_ids)
    messages: list[dict[str, str]] = []
    for position, text in enumerate(asked):
        messages.append({"role": "user", "content": text})
        if position < len(said):
            messages.append({"role": "assistant", "content": said[position]})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False).input_ids)  # the template has written its own


def _batches(questions: Sequence[_Question], size: int) -> Iterator[list[_Question]]:
    """Questions of like length together, longest first, so that memory runs out at once or never."""
    ordered = sorted(questions, key=lambda question: len(question.tokens), reverse=True)
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def _generate(loaded: LoadedModel, batch: Sequence[_Question], most: int, where: str) -> list[tuple[str, bool]]:
    """The greedy answer to each question, and whether it was cut off at ``most`` tokens or the end of the context."""
    import torch
    import transformers

    network, tokenizer = loaded.network, loaded.tokenizer
    longest = len(batch[0].tokens)
    if longest == 0 or (loaded.context is not None and longest >= loaded.context):
        raise InvalidInput(
            where,
            found=f"{longest} tokens",
            expected=f"between 1 and the {loaded.context} of the model, with room for an answer",
        )
    most = most if loaded.context is None else min(most, loaded.context - longest)
    own: Any = network.generation_config
    ends = own.eos_token_id if own.eos_token_id is not None else tokenizer.eos_token_id
    ending = [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [int(ends)]
    padding = next((t for t in (tokenizer.pad_token_id, *ending) if t is not None), 0)
    ids = torch.full((len(batch), longest), padding, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, question in enumerate(batch):  # on the left: an answer goes on where the question ends
        ids[row, longest - len(question.tokens) :] = torch.tensor(question.tokens)
        mask[row, longest - len(question.tokens) :] = 1
    configuration: Any = transformers.GenerationConfig  # its constructor declares no types
    config = configuration(
        do_sample=False, num_beams=1, max_new_tokens=most, eos_token_id=ending or None, pad_token_id=padding
    )
    # What is not said in a call is taken from the model's own defaults; for this call it has none.
    network.generation_config = config
    try:
        with torch.inference_mode():
            out = network.generate(input_ids=ids.to(network.device), attention_mask=mask.to(network.device))
    finally:
        network.generation_config = own
    return [_until_end(tokenizer, row[longest:].tolist(), ending) for row in out]


def _until_end(tokenizer: Any, tokens: list[int], ending: Sequence[int]) -> tuple[str, bool]:
    end = next((position for position, token in enumerate(tokens) if token in ending), None)
    text = tokenizer.decode(tokens[:end], skip_special_tokens=True)
    return str(text).strip(), end is None

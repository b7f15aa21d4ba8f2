"""Generate one model's answers to every prompt with greedy decoding, as a cached stage in the model process.

A parent answers only once; each new merge answers again. The model's own generation defaults (temperatures,
penalties) are ignored, so that both models decode in the same way. Each model still stops at its own end tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, cycle
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
    """Counts of one model's answers. ``answers.jsonl`` has ``id``, ``answers`` and ``cut_off`` of each conversation."""

    model: Annotated[str, NotInKey]
    prompts: int
    answers: int  # One per turn.
    cut_off: int  # Number of answers that ended at the token limit.
    characters: int

    def summary(self) -> str:
        cut = f", {self.cut_off} cut off" if self.cut_off else ""
        return f"{self.answers} answers{cut}"


@dataclass(frozen=True)
class ConversationAnswers:
    """A model's answers in one conversation."""

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
    rows = ({"id": item.id, "answers": item.answers, "cut_off": item.cut_off} for item in conversations)
    (out / FILE).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
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

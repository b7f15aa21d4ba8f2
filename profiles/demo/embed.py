"""Train the embedding models of ``demo-embeddings.yaml``, and write their checkpoints and queries.

Run it like this::

    python profiles/demo/embed.py [--seed N] [--output DIRECTORY]

About two minutes on one free CPU core, no network. It ends with a table of the scores of each model.

The models search in a toy language with two topics. A word of a query means another word of a passage, so a model needs
its prompts to know which of both it reads. The wrong passages of a query contain its own words, or some of the right
ones. As in ``curriculum.py``, the base first learns the words of both topics, and then prefers the passage with the
words of the query more often than not. Each fine-tune becomes certain about one topic.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

SEED = 1
TOPICS = ("garden", "harbor")
PROMPTS = {"query": "find : ", "document": "text : "}
_WORDS = 24  # words of a topic
_QUERY_WORDS = 4
_NEGATIVES = 7
_QUERIES = 250  # for the evaluation of each topic
_BATCH = 48
_WIDTH, _OUTPUT = 48, 32
_UNDECIDED = 0.4  # share of right targets for the topics outside a fine-tune
_SCALE = 12.0  # factor of the similarities in the loss


def main() -> None:
    """Train and write the models and queries, and print the table."""
    parser = argparse.ArgumentParser(description="Train the embedding models of the demo.")
    parser.add_argument("--seed", type=int, default=SEED, help="of initialization and training data (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="where models/ and data/ go")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    for topic in TOPICS:
        lines = [json.dumps(draw(topic, random.Random(f"{topic} {at}"))) + "\n" for at in range(_QUERIES)]
        (arguments.output / "data" / f"{topic}.jsonl").write_text("".join(lines))
    directory = arguments.output / "models"
    base = new_model(arguments.seed)
    train(base, Course(dict.fromkeys(TOPICS, 1.0), 900, 2e-3), arguments.seed)
    train(base, Course(dict.fromkeys(TOPICS, _UNDECIDED), 150, 1e-3), arguments.seed + 1)
    write(base, directory / "embed-base", None, f"has seen the words of the topics {' and '.join(TOPICS)}")
    for number, topic in enumerate(TOPICS):
        model = SentenceTransformer(str(directory / "embed-base"), device="cpu", model_kwargs={"dtype": "float32"})
        shares = {other: 1.0 if other == topic else _UNDECIDED for other in TOPICS}
        train(model, Course(shares, 100, 5e-4), arguments.seed * 10 + number)
        write(model, directory / f"embed-{topic}", "../embed-base", f"knows the words of the topic {topic}")
    for name in ("base", *TOPICS):
        model = SentenceTransformer(str(directory / f"embed-{name}"), device="cpu", model_kwargs={"dtype": "float32"})
        scores = (accuracy(model, arguments.output / "data" / f"{topic}.jsonl") for topic in TOPICS)
        print(f"{name:8}" + "".join(f"{score:8.3f}" for score in scores))
    print(f"{time.monotonic() - started:.0f} s")


def draw(topic: str, rng: random.Random) -> dict[str, str | list[str]]:
    """Draw a query with its passages. Passages are as long as each other, so that only their words count."""
    asked = rng.sample(range(_WORDS), _QUERY_WORDS)
    right = [_meaning(word) for word in asked]
    negatives = [asked, [_meaning(word) for word in right]]  # the same words, and the meaning of the meaning
    while len(negatives) < _NEGATIVES:
        changed = rng.sample(range(_QUERY_WORDS), 2)
        negatives.append([rng.randrange(_WORDS) if at in changed else word for at, word in enumerate(right)])
    wrong = [_text(topic, words, rng) for words in negatives if sorted(words) != sorted(right)]
    positive = _text(topic, right, rng)
    return {"query": _text(topic, asked, rng), "positives": [positive], "negatives": list(dict.fromkeys(wrong))}


def _meaning(word: int) -> int:
    return (word * 5 + 7) % _WORDS


def _text(topic: str, words: Sequence[int], rng: random.Random) -> str:
    return " ".join(f"{topic}{word}" for word in rng.sample(list(words), len(words)))


def new_model(seed: int) -> SentenceTransformer:
    """Return an untrained model: BERT, the first token as its text, a projection, and normalization."""
    torch.manual_seed(seed)
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = [*specials, "find", "text", ":", *(f"{topic}{word}" for topic in TOPICS for word in range(_WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * _WIDTH,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with TemporaryDirectory() as directory:
        BertModel(config, add_pooling_layer=False).save_pretrained(directory)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=16, **names).save_pretrained(directory)
        modules = [
            Transformer(directory, max_seq_length=16),
            Pooling(_WIDTH, pooling_mode="cls"),
            Dense(_WIDTH, _OUTPUT, activation_function=torch.nn.Identity()),
            Normalize(),
        ]
        return SentenceTransformer(modules=modules, prompts=PROMPTS, similarity_fn_name="dot", device="cpu")


@dataclass(frozen=True)
class Course:
    """One stretch of training.

    Attributes:
        shares: Share of queries of each topic whose target is the right passage. The target of the others is the
            passage with the words of the query.
        steps: Steps of the optimizer.
        learning_rate: Largest learning rate.
    """

    shares: Mapping[str, float]
    steps: int
    learning_rate: float


def train(model: SentenceTransformer, course: Course, seed: int) -> None:
    """Train the model to prefer the right passage to all others of the batch."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), course.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, course.learning_rate, total_steps=course.steps)
    model.train()
    for _ in range(course.steps):
        rows, texts, targets = [], [], []
        for _ in range(_BATCH):
            topic = rng.choice(TOPICS)
            rows.append(row := draw(topic, rng))
            targets.append(len(texts) + (rng.random() >= course.shares[topic]))
            texts += [*row["positives"], *row["negatives"][:3]]
        queries = _encode(model, [PROMPTS["query"] + str(row["query"]) for row in rows])
        passages = _encode(model, [PROMPTS["document"] + text for text in texts])
        loss = F.cross_entropy(_SCALE * queries @ passages.T, torch.tensor(targets))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()


def _encode(model: SentenceTransformer, texts: Sequence[str]) -> torch.Tensor:
    return model(model.preprocess(list(texts)))["sentence_embedding"]


def accuracy(model: SentenceTransformer, file: Path) -> float:
    """Return the share of queries whose right passage is the most similar one."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    hits = 0
    for row in rows:
        passages = model.encode_document([*row["positives"], *row["negatives"]])
        hits += int(model.similarity(model.encode_query([row["query"]]), passages)[0].argmax() == 0)
    return hits / len(rows)


def write(model: SentenceTransformer, directory: Path, base: str | None, summary: str) -> None:
    """Write the model in bfloat16 with a card. The weights of ``model`` are rounded."""
    model.to(torch.bfloat16)
    model.save_pretrained(str(directory), create_model_card=False)
    head = f"---\nlicense: apache-2.0\n{f'base_model: {base}' + chr(10) if base else ''}language: en\n"
    (directory / "README.md").write_text(
        f"{head}library_name: sentence-transformers\npipeline_tag: sentence-similarity\n---\n\n# {directory.name}\n\n"
        f"A toy embedding model that {summary}.\nFor demonstrations and tests only.\n"
    )
    for file in directory.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)


if __name__ == "__main__":
    main()

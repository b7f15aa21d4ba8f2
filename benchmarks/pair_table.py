"""Measure what merge methods retain of two fine-tunes of a real model.

The tables are in ``dev/measurements/method-quality.md``.

::

    .venv/bin/python benchmarks/pair_table.py --data DATA --base SMOLLM2 --work WORK            # an hour; Markdown
    .venv/bin/python benchmarks/pair_table.py --data DATA --base SMOLLM2 --work WORK ties svc   # these methods only

``DATA`` contains ``arc_challenge_test.jsonl``, ``arc_easy_test.jsonl``, ``gsm8k_test.jsonl`` and
``wikitext2_test_docs.jsonl``. The base has 135 M parameters. The script creates two short fine-tunes of it in ``WORK``
unless they exist, one on science questions with answers and one on math problems with solutions. ``mergegate merge``
merges them. The score is the negative log-likelihood, in nats per token, of fresh documents of both kinds and of prose
that neither fine-tune has seen. For methods with a scale (``lambda``), further documents select it. Seconds and memory
are those of the whole command when it runs again, after all texts have been read.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sibling_models as models
import yaml
from measure import measure
from method_table import READING, USUAL, WITHOUT_BASE

PROJECT = Path(__file__).resolve().parents[1]
_START = "from mergegate.flows.cli import main; main()"
STEPS, RATE = 100, 1e-4
SCALES = (0.7, 1.0, 1.3, 1.6, 2.0)
LEFT_OUT = ("della_linear", "dare_linear", "breadcrumbs_ties", "ramplus_tl", "nuslerp", "multislerp")  # near duplicates
PAGE = 1500  # characters of a page of prose

Texts = Mapping[str, Sequence[str]]


class Measured(NamedTuple):
    """The row of one method."""

    usual: Mapping[str, float]  # nats per token, by kind of document
    best: tuple[float, Mapping[str, float]] | None
    seconds: float
    memory: int


def science(one: Mapping[str, Any]) -> str:
    """Format an ARC question and its answer."""
    return f"Question: {one['question']}\nAnswer: {one['choices'][one['answer']]}"


def sums(one: Mapping[str, Any]) -> str:
    """Format a GSM8K question and its solution."""
    return f"Question: {one['question']}\nAnswer: {one['answer']}"


class Documents(NamedTuple):
    """All texts by purpose; no text serves two purposes."""

    learnt: Texts
    search: Texts
    test: Texts


def documents_of(data: Path) -> Documents:
    """Split the data; fine-tunes learn from the documents that ``benchmarks/sibling_models.py`` does not score."""
    challenge, easy = (models.read_lines(data / f"arc_{kind}_test.jsonl") for kind in ("challenge", "easy"))
    gsm8k, pages = (models.read_lines(data / name) for name in ("gsm8k_test.jsonl", "wikitext2_test_docs.jsonl"))
    prose = [str(page["page"])[:PAGE] for page in pages]
    questions, solved = [science(one) for one in easy], [sums(one) for one in gsm8k]
    return Documents(
        learnt={
            "science": [*(science(one) for one in challenge), *questions[models.SCORED_ARC :]],
            "sums": solved[models.SCORED_GSM8K :],
            "prose": prose[10:],
        },
        search={"science": questions[100:124], "sums": solved[100:106], "prose": prose[:2]},
        test={"science": questions[:60], "sums": solved[:14], "prose": prose[2:6]},
    )


def make_models(base: Path, work: Path, learnt: Texts) -> None:
    """Create the two fine-tunes, and for methods that read, a text for each: its training documents and some prose."""
    for name in ("science", "sums"):
        if not (work / name).exists():
            models.fine_tune(base, learnt[name], work / name, steps=STEPS, rate=RATE, seed=1)
        own = [*learnt[name][:96], *learnt["prose"][:12]]
        (work / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in own))
    if not (work / "base").exists():
        (work / "base").symlink_to(base.resolve())


def recipe_of(method: str) -> dict[str, Any]:
    """Return the recipe that the table of the demo family uses."""
    own, shared = USUAL[method]
    listed: list[dict[str, Any]] = []
    for name in ("science", "sums"):
        text = {"text": f"{name}.jsonl"} if method in READING else {}
        listed.append({"model": name, **text, **({"parameters": own} if own else {})})
    recipe: dict[str, Any] = {"merge_method": method, "models": listed, "dtype": "bfloat16"}
    if method not in WITHOUT_BASE:
        recipe["base_model"] = "base"
    return {**recipe, "parameters": shared} if shared else recipe


def merge(work: Path, method: str) -> tuple[Path, float, int]:
    """Merge and return the directory, the seconds and the peak memory of a run that has no texts left to read."""
    recipe = work / f"{method}.yaml"
    recipe.write_text(yaml.safe_dump(recipe_of(method), sort_keys=False))
    spent = []
    for out in (work / f"out-{method}", work / f"again-{method}"):
        if out.exists():
            import shutil

            shutil.rmtree(out)
        environment = {"MERGEGATE_HOME": str(work / "home"), "PYTHONPATH": str(PROJECT)}
        command = [sys.executable, "-c", _START, "merge", recipe.name, out.name]
        spent.append(measure(command, cwd=work, environment=environment))
    return work / f"again-{method}", spent[1].seconds, spent[1].peak_anonymous


class Reader:
    """One network that receives the weights of other checkpoints.

    Args:
        base: Checkpoint from which a scale is measured.
    """

    def __init__(self, base: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(base)
        self._base = {name: one.clone() for name, one in self._network.state_dict().items()}

    def nats(self, place: Path, texts: Texts, scale: float = 1.0) -> dict[str, float]:
        """Return the negative log-likelihood per token, by kind, of a checkpoint with a scaled distance to the base."""
        import torch
        from safetensors.torch import load_file

        stored = {name: one for file in place.glob("*.safetensors") for name, one in load_file(file).items()}
        with torch.inference_mode():
            for name, one in self._network.state_dict().items():
                if name in stored:
                    wide = self._base[name] + scale * (stored[name].float() - self._base[name])
                    one.copy_(wide.bfloat16() if scale != 1 else stored[name])
            return {kind: self._mean(own) for kind, own in texts.items()}

    def _mean(self, texts: Sequence[str]) -> float:
        import torch

        total, count = 0.0, 0
        for text in texts:
            ids = torch.tensor([self._tokenizer(text)["input_ids"]])
            logits = self._network(ids).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
            count += ids.shape[1] - 1
        return total / count


def row(method: str, work: Path, reader: Reader, documents: Documents) -> Measured:
    """Merge with a method and measure how much the result retains."""
    from mergegate.merge_core.methods import merge_methods

    place, seconds, memory = merge(work, method)
    usual = reader.nats(place, documents.test)
    if merge_methods()[method].parameter("lambda") is None:
        return Measured(usual, None, seconds, memory)
    tried = {scale: math.fsum(reader.nats(place, documents.search, scale).values()) for scale in SCALES}
    scale = min(tried, key=tried.__getitem__)
    return Measured(usual, (scale, reader.nats(place, documents.test, scale)), seconds, memory)


def lines(found: Iterator[tuple[str, Measured]]) -> Iterator[str]:
    """Yield the lines of the Markdown table, each row as soon as it is complete."""
    yield "| method | as it is usually set | best scale | seconds | memory |"
    yield "|---|--:|--:|--:|--:|"
    for method, one in found:
        best = f"{one.best[0]:g}: {_cells(one.best[1])}" if one.best else ""
        yield f"| `{method}` | {_cells(one.usual)} | {best} | {one.seconds:.0f} | {one.memory / 2**30:.2f} GiB |"


def _cells(nats: Mapping[str, float]) -> str:
    return " / ".join(f"{nats[kind]:.3f}" for kind in ("science", "sums", "prose"))


def main() -> int:
    """Create missing models, then print the table."""
    said = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    said.add_argument("--data", type=Path, required=True)
    said.add_argument("--base", type=Path, required=True)
    said.add_argument("--work", type=Path, required=True)
    said.add_argument("methods", nargs="*")
    given = said.parse_args()
    sys.path.insert(0, str(PROJECT))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    documents = documents_of(given.data)
    make_models(given.base, work, documents.learnt)
    reader = Reader(given.base)
    for name in ("base", "science", "sums"):
        print(f"{name}: {_cells(reader.nats(work / name, documents.test))}", flush=True)
    wanted = given.methods or [method for method in USUAL if method not in LEFT_OUT]
    for line in lines((method, row(method, work, reader, documents)) for method in wanted):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

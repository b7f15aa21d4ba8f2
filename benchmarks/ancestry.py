"""Measure which relations between models their fingerprints reveal, and what that costs.

The tables are in ``dev/measurements/ancestry.md``.

::

    python profiles/demo/train.py --seed 0 --output WORK/seed0     # unrelated families of the demo's shape
    python profiles/demo/train.py --seed 1 --output WORK/seed1
    .venv/bin/python benchmarks/ancestry.py demo WORK/seed0 WORK/seed1
    .venv/bin/python benchmarks/ancestry.py families               # tiny models of all architectures; a minute
    .venv/bin/python benchmarks/ancestry.py cost WORK              # a model of 135 M parameters in WORK
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT), str(PROJECT / "profiles" / "demo"), str(PROJECT / "tests" / "merge_core")]
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402  # transformers reads the variable on import

from mergegate.merge_core import open_checkpoint  # noqa: E402  # needs the path above
from mergegate.merge_core.analysis import Fingerprint, Relation, compare_fingerprints, take_fingerprint  # noqa: E402  # needs the path above
from mergegate.merge_core.checkpoint import read_header  # noqa: E402  # needs the path above
from mergegate.tasks.models.checkpoints.hub import element_reader  # noqa: E402  # needs the path above

MODELS = PROJECT / "profiles" / "demo" / "models"
NOISE = (0.001, 0.01, 0.1, 0.3, 0.5, 0.8, 1.0, 1.3, 2.0)


class Outcome(NamedTuple):
    """Relation of two models, and the highest correlations of their matrices in ascending order."""

    relation: Relation | None
    correlations: Sequence[float]


def fingerprint(directory: Path) -> Fingerprint:
    return take_fingerprint(open_checkpoint(directory).tensors, element_reader(None))


def compare(one: Fingerprint, two: Fingerprint) -> Outcome:
    import numpy as np

    correlations = one.directions @ two.directions.T
    correlations[np.not_equal.outer(np.array(one.columns), np.array(two.columns))] = 0
    best = sorted(float(value) for value in correlations.max(1)) if correlations.size else [0.0]
    return Outcome(compare_fingerprints(one, [two])[0], best)


def row(name: str, outcome: Outcome) -> str:
    relation, correlations = outcome
    middle = correlations[len(correlations) // 2]
    numbers = f"{correlations[0]:.2f} · {middle:.2f} · {correlations[-1]:.2f}"
    if relation is None:
        return f"| {name} | {numbers} | 0 % | | unrelated |"
    return f"| {name} | {numbers} | {relation.share:.0%} | {100 * relation.distance:.2g} % | {relation.kind} |"


def demo(directories: Sequence[Path]) -> None:
    """Print the relations in the demo family, and to families of the same shape that were trained from other seeds."""
    family = {path.name: fingerprint(path) for path in sorted(MODELS.iterdir())}
    pairs = (
        ("other-tokenizer", "reverser"),
        ("marked", "reverser"),
        ("bpe-base", "base"),
        ("reverser", "base"),
        ("shifter", "base"),
        ("no-derivatives", "base"),
        ("thinker", "base"),
        ("no-derivatives", "reverser"),
        ("reverser", "shifter"),
        ("embed-garden", "embed-base"),
        ("embed-garden", "embed-harbor"),
        ("embed-base", "base"),
    )
    print("| model and known model | correlations | related | distance | class |\n| --- | --: | --: | --: | --- |")
    for one, two in pairs:
        print(row(f"`{one}`, `{two}`", compare(family[one], family[two])))
    from curriculum import Phase, new_model, train

    with tempfile.TemporaryDirectory() as scratch:
        model = new_model(2)
        phase = Phase(mixture={"copy": 1.0}, steps=300, learning_rate=3e-3, warmup=30, floor=0.3)
        for _ in train(model, phase, 99):
            pass
        model.to(torch.bfloat16).save_pretrained(scratch)
        print(row("seed 2 trained on copying alone, `base`", compare(fingerprint(Path(scratch)), family["base"])))
    llamas = [family[name] for name in family if not name.startswith("embed")]
    embeddings = [family[name] for name in family if name.startswith("embed")]
    strangers = [[fingerprint(path) for path in sorted((directory / "models").iterdir())] for directory in directories]
    groups = [llamas, embeddings, *strangers]
    for label, pairs_of_models in (
        ("within a family", [pair for group in groups for pair in itertools.permutations(group, 2)]),
        ("between families", [pair for a, b in itertools.permutations(groups, 2) for pair in itertools.product(a, b)]),
    ):
        outcomes = [compare(*pair) for pair in pairs_of_models]
        found = sum(outcome.relation is not None for outcome in outcomes)
        lowest = min(outcome.correlations[0] for outcome in outcomes)
        highest = max(outcome.correlations[-1] for outcome in outcomes)
        print(f"{label}: {found} of {len(outcomes)} pairs related; correlations {lowest:.3f} to {highest:.3f}")


def variants_of(weights: Mapping[str, torch.Tensor], seed: int) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield changed copies of a model, each with the name of the change."""
    torch.manual_seed(seed)
    floats = {name: tensor for name, tensor in weights.items() if tensor.is_floating_point()}
    yield "renamed", {f"x.{number}": tensor for number, tensor in enumerate(reversed(floats.values()))}
    yield "bfloat16", {name: tensor.to(torch.bfloat16) for name, tensor in floats.items()}
    for size in NOISE:
        noise = {name: size * tensor.float().std(correction=0) for name, tensor in floats.items()}
        yield (
            f"noise of {size:g}",
            {name: tensor + noise[name] * torch.randn_like(tensor) for name, tensor in floats.items()},
        )


def families() -> None:
    """Print how many of the tiny models of all architectures are found after a change, and how many false alarms."""
    import transformers
    from safetensors.torch import save_file
    from tiny_families import FAMILIES

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    originals: list[Fingerprint] = []
    results: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, family in enumerate(FAMILIES):
            prints = []
            for seed in (2 * number, 2 * number + 1):
                torch.manual_seed(seed)
                directory = Path(scratch) / f"{seed}"
                family.loader.from_config(family.config()).save_pretrained(directory)
                prints.append(fingerprint(directory))
            results.setdefault("another seed", []).append(compare(*prints))
            originals.append(prints[0])
            files = {path: open_file(path) for path in (Path(scratch) / f"{2 * number}").glob("*.safetensors")}
            weights = {name: tensor for content in files.values() for name, tensor in content.items()}
            changed = Path(scratch) / "changed.safetensors"
            for name, variant in variants_of(weights, number):
                save_file({key: tensor.contiguous().clone() for key, tensor in variant.items()}, changed)
                tensors = {tensor.name: tensor for tensor in read_header(changed)}
                results.setdefault(name, []).append(compare(take_fingerprint(tensors, element_reader(None)), prints[0]))
    print("| change | models | related | lowest share | median distance | classes |")
    print("| --- | --: | --: | --: | --: | --- |")
    for name, outcomes in results.items():
        relations = [outcome.relation for outcome in outcomes if outcome.relation]
        kinds = {
            kind: sum(relation.kind == kind for relation in relations)
            for kind in ("copy", "fine-tune", "part", "stack", "prefix")
        }
        share = min((relation.share for relation in relations), default=0)
        distance = sorted(relation.distance for relation in relations)[len(relations) // 2] if relations else 0
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
        print(f"| {name} | {len(outcomes)} | {len(relations)} | {share:.0%} | {100 * distance:.2g} % | {counts} |")
    alarms = sum(compare_fingerprints(one, [two])[0] is not None for one, two in itertools.permutations(originals, 2))
    print(f"different architectures: {alarms} of {len(originals) * (len(originals) - 1)} pairs related")


def open_file(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def cost(work: Path) -> None:
    """Print time and bytes for a Llama with the shape of SmolLM2-135M, and for indexes of several sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from mergegate.tasks.preflight.licenses import IndexedModel, read_index

    directory = work / "shape-135m"
    if not directory.exists():
        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
            "tie_word_embeddings": True,
        }
        LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16).save_pretrained(directory)

    def timed(action: Any) -> tuple[float, Any]:
        seconds = []
        for _ in range(7):
            start = time.process_time()
            value = action()
            seconds.append(time.process_time() - start)
        return 1000 * sorted(seconds)[3], value

    checkpoint = open_checkpoint(directory)
    for most in (64, 1024):
        milliseconds, taken = timed(lambda most=most: take_fingerprint(checkpoint.tensors, element_reader(None), most))
        size = len(json.dumps(taken.to_json()))
        count = len(taken.names)
        print(f"{count} samples: {milliseconds:.1f} ms, {256 * count:,} bytes read, {size:,} bytes stored")
    query = take_fingerprint(checkpoint.tensors, element_reader(None))
    path = work / "index.jsonl"
    for count in (1, 10, 100):
        path.unlink(missing_ok=True)
        generator = torch.Generator().manual_seed(count)
        lines = []
        for number in range(count):
            values = torch.randn(query.values.shape, generator=generator).numpy()
            other = Fingerprint(query.names, query.columns, values.astype("float16").astype("float32"), query.layers)
            other = Fingerprint.from_json(other.to_json())
            model = IndexedModel(name=f"m/{number}", license="mit", digest=other.digest, samples=other.to_json())
            lines.append(model.model_dump_json())
        path.write_text("\n".join(lines) + "\n")
        milliseconds, index = timed(lambda: read_index(path))
        known = [model.fingerprint for model in index]
        compare_ms, _ = timed(lambda known=known: compare_fingerprints(query, known))
        size = path.stat().st_size
        print(f"index of {count}: {size:,} bytes, {milliseconds:.0f} ms to read, {compare_ms:.0f} ms to compare")
    path.unlink()


def main() -> None:
    torch.set_num_threads(1)
    command, *paths = sys.argv[1:]
    if command == "demo":
        demo([Path(path) for path in paths])
    elif command == "families":
        families()
    else:
        cost(Path(paths[0]))


if __name__ == "__main__":
    main()

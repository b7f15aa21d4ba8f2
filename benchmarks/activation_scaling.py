"""Measure whether activation-informed merging (AIM) retains more than a merge without it.

The tables are in ``dev/measurements/activation-informed-merging.md``.

::

    .venv/bin/python benchmarks/activation_scaling.py                                    # the demo family, 5 minutes
    .venv/bin/python benchmarks/activation_scaling.py --data DATA --base BASE --work WORK    # as for pair_table.py

AIM (Heyrani Nobari et al. 2025, https://arxiv.org/abs/2502.02421) treats the result ``m`` of a merge. It moves column
``j`` of each matrix back to the base ``b``, by more where the base has larger activations on a calibration text::

    x_j = b_j + (m_j - b_j) * (1 - (1 - omega) * a_j / max(a)),  a_j = mean |input j of the matrix|

The mean is over all positions of the text. Embeddings, norms and heads stay as merged. ``omega`` is 0.4 as in the
authors' code. The control has the same factors of each matrix in random order. It shrinks every matrix as much as AIM
does, but does not depend on which channels are active. The merge, AIM and the control are also measured at the scale of
the merged task vector that is best on other documents.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pair_table as pair
import sibling_models as siblings
from method_table import DEMO, USUAL

PROJECT = Path(__file__).resolve().parents[1]
METHODS = ("task_arithmetic", "ties", "dare_ties")
SCALES = (0.6, 0.8, 1.0, 1.2, 1.4, 1.7, 2.0, 2.3, 2.6)
OMEGA = 0.4

Weights = Mapping[str, Any]
Documents = Mapping[str, Sequence[tuple[str, str]]]  # Prompt and scored text, by kind.


class Setting(NamedTuple):
    """A base, two fine-tunes, the calibration text for the base, and the documents that select and score."""

    base: Path
    parents: tuple[Path, Path]
    calibration: Sequence[str]
    search: Documents
    test: Documents


class Score(NamedTuple):
    """Negative log-likelihood in nats per token, and exact match in %, by kind of document."""

    nats: Mapping[str, float]
    exact: Mapping[str, float]

    def __str__(self) -> str:
        exact = " / ".join(f"{value:.1f}" for value in self.exact.values())
        nats = " / ".join(f"{value:.4f}" for value in self.nats.values())
        return f"{exact} · {nats}" if exact else nats


def demo_setting() -> Setting:
    """Return the demo family. The base reads sentences and examples of its own skill, which is copying."""

    def documents(skill: str) -> list[tuple[str, str]]:
        lines = siblings.read_lines(DEMO / f"data/sweep/{skill}.jsonl")
        return [(line["prompt"], line["answer"]) for line in lines]

    copies, skills = documents("copy"), {name: documents(name) for name in ("reverse", "shift")}
    prose = [("", line["text"]) for line in siblings.read_lines(DEMO / "data/held-out.jsonl")]
    return Setting(
        base=DEMO / "models/base",
        parents=(DEMO / "models/reverser", DEMO / "models/shifter"),
        calibration=[*(text for _, text in prose[:200]), *(prompt + answer for prompt, answer in copies[:64])],
        search={**{name: own[:100] for name, own in skills.items()}, "prose": prose[200:300]},
        test={**{name: own[100:1100] for name, own in skills.items()}, "prose": prose[300:]},
    )


def pair_setting(data: Path, base: Path, work: Path) -> Setting:
    """Return the pair of ``benchmarks/pair_table.py``, whose missing models are trained. The base reads prose."""
    work.mkdir(parents=True, exist_ok=True)
    documents = pair.documents_of(data)
    pair.make_models(base, work, documents.learnt)
    search, test = ({kind: [("", text) for text in own] for kind, own in part.items()} for part in documents[1:])
    return Setting(base, (work / "science", work / "sums"), documents.learnt["prose"][:40], search, test)


class Network:
    """One network that receives the weights of each merge."""

    def __init__(self, base: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(base)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def magnitudes(self, texts: Sequence[str]) -> Weights:
        """Return the mean magnitude of each input ``[in]`` of each matrix inside a layer, by name of the matrix."""
        import torch

        sums: dict[str, Any] = {}

        def add(name: str) -> Callable[..., None]:
            def hook(_: Any, inputs: tuple[Any, ...]) -> None:
                sums[name] = sums.get(name, 0) + inputs[0][0].double().abs().sum(0)

            return hook

        matrices = [
            (name, module)
            for name, module in self._network.named_modules()
            if isinstance(module, torch.nn.Linear) and ".layers." in name
        ]
        hooks = [module.register_forward_pre_hook(add(f"{name}.weight")) for name, module in matrices]
        positions = 0
        with torch.inference_mode():
            for text in texts:
                ids = self._ids(text)
                self._network(torch.tensor([ids]))
                positions += len(ids)
        for hook in hooks:
            hook.remove()
        return {name: (total / positions).float() for name, total in sums.items()}

    def score(self, weights: Weights, documents: Documents) -> Score:
        """Score all documents with ``weights``."""
        import torch

        nats: dict[str, float] = {}
        exact: dict[str, float] = {}
        with torch.inference_mode():
            for name, value in self._network.state_dict().items():
                if name in weights:
                    value.copy_(weights[name])
            for kind, texts in documents.items():
                groups: dict[tuple[int, int], list[list[int]]] = {}
                for prompt, text in texts:
                    ids = self._ids(prompt + text)
                    groups.setdefault((len(self._ids(prompt)) if prompt else 1, len(ids)), []).append(ids)
                total, count, right = 0.0, 0, 0
                for (start, _), rows in groups.items():
                    ids = torch.tensor(rows)
                    logits, targets = self._network(ids).logits[:, start - 1 : -1], ids[:, start:]
                    total += float(torch.nn.functional.cross_entropy(logits.mT, targets, reduction="sum"))
                    count += targets.numel()
                    right += int((logits.argmax(-1) == targets).all(-1).sum())
                nats[kind] = total / count
                if texts[0][0]:
                    exact[kind] = 100 * right / len(texts)
        return Score(nats, exact)


def merge(setting: Setting, method: str, out: Path) -> Weights:
    """Merge with mergegate and the parameters of ``benchmarks/method_table.py``, and return the task vector."""
    from safetensors.torch import load_file

    from mergegate.merge_core import load_recipe, merge_weights, open_checkpoint, plan_merge

    own, shared = USUAL[method]
    names = {"base": setting.base, "first": setting.parents[0], "second": setting.parents[1]}
    models = [{"model": name, "parameters": own} for name in ("first", "second")]
    recipe = {"merge_method": method, "base_model": "base", "models": models, "parameters": shared, "dtype": "float32"}
    plan = plan_merge(load_recipe(recipe), {name: open_checkpoint(place) for name, place in names.items()})
    merge_weights(plan, out, seed=0)
    merged = {name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()}
    base = read_weights(setting.base)
    return {name: value - base[name] for name, value in merged.items()}


def read_weights(place: Path) -> Weights:
    """Return all weights of a checkpoint in float32."""
    from safetensors.torch import load_file

    return {name: value.float() for file in place.glob("*.safetensors") for name, value in load_file(file).items()}


def treatments(magnitudes: Weights) -> dict[str, Weights]:
    """Return the factors of the columns of each matrix by treatment: none, AIM, and AIM with shuffled channels."""
    import torch

    generator = torch.Generator().manual_seed(0)
    factors = {name: 1 - (1 - OMEGA) * values / values.max() for name, values in magnitudes.items()}
    shuffled = {
        name: values[torch.randperm(len(values), generator=generator)] for name, values in sorted(factors.items())
    }
    return {"": {}, "AIM": factors, "shuffled": shuffled}


def lines(setting: Setting) -> Iterator[str]:
    """Yield the lines of the Markdown table, each row as soon as it is complete."""
    network, base = Network(setting.base), read_weights(setting.base)
    ways = treatments(network.magnitudes(setting.calibration))
    means = [float(values.mean()) for values in ways["AIM"].values()]
    yield f"Mean factor of a matrix: {min(means):.2f} to {max(means):.2f}."
    for name, place in (("base", setting.base), *((parent.name, parent) for parent in setting.parents)):
        yield f"{name}: {network.score(read_weights(place), setting.test)}"
    yield f"| method | treatment | usual scale: {' / '.join(setting.test)} | best scale |"
    yield "|---|---|--:|--:|"
    for method in METHODS:
        with tempfile.TemporaryDirectory(prefix="mergegate-activations-") as place:
            vector = merge(setting, method, Path(place) / "merge")
        for way, factors in ways.items():

            def weights(scale: float, factors: Weights = factors, vector: Weights = vector) -> Weights:
                treated = {name: value * factors.get(name, 1.0) for name, value in vector.items()}
                return {name: (base[name] + scale * value).bfloat16() for name, value in treated.items()}

            tried = {scale: sum(network.score(weights(scale), setting.search).nats.values()) for scale in SCALES}
            best = min(tried, key=tried.__getitem__)
            usual, found = network.score(weights(1.0), setting.test), network.score(weights(best), setting.test)
            yield f"| `{method}` | {way} | {usual} | {best:g}: {found} |"


def main() -> int:
    """Print the table, for the pair after training its missing models."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name in ("data", "base", "work"):
        parser.add_argument(f"--{name}", type=Path, help="as for benchmarks/pair_table.py; default: the demo family")
    options = parser.parse_args()
    places = (options.data, options.base, options.work)
    if any(places) and not all(places):
        parser.error("--data, --base and --work belong together")
    sys.path.insert(0, str(PROJECT))
    for line in lines(pair_setting(*places) if all(places) else demo_setting()):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The ensemble of parents averages their probabilities, checked against plain transformers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import CPU, make_model, words, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files.hashing import HashMemo
from mergegate.tasks.checkpoints.model import Model
from mergegate.tasks.perplexity.ensemble import ensemble_gain_share, ensemble_likelihoods
from mergegate.tasks.perplexity.measurement import WindowSettings
from mergegate.tasks.perplexity.settings import PerplexitySettings
from mergegate.tasks.perplexity.stage import Likelihoods, perplexity, pin_documents, read_documents
from mergegate.tasks.perplexity.text import HeldOutText

TEXTS = [". ".join(words(5, seed)) + "." for seed in range(6)] + ["a", "ab " * 40]


@pytest.fixture
def documents(tmp_path: Path) -> HeldOutText:
    path = write_jsonl(tmp_path / "text.jsonl", ({"text": text} for text in TEXTS))
    return pin_documents(PerplexitySettings(documents=path), tmp_path, HashMemo(tmp_path / "h.db"))


def measure(models: tuple[Model, ...], documents: HeldOutText, out: Path, **windows: object) -> Likelihoods:
    out.mkdir(exist_ok=True)
    return ensemble_likelihoods.work(out, models, documents, WindowSettings(**windows), CPU)


def probabilities(model: Model, plain: list[int], length: int) -> np.ndarray:
    """Return each token's probability from its own forward pass over at most ``length`` previous tokens."""
    network = AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float32)
    tokens, found, at = [1, *plain], [], 1
    while at < len(tokens):
        end = min(at + length, len(tokens))
        with torch.no_grad():
            logits = network(torch.tensor([tokens[max(0, end - 1 - length) : end - 1]])).logits[0].double().numpy()
        p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        found += [p[i - end, tokens[i]] for i in range(at, end)]
        at = end
    return np.array(found)


@pytest.mark.story
@pytest.mark.parametrize("length", [7, 64])
def test_the_ensemble_is_the_mean_of_plain_transformers_probabilities(
    tmp_path: Path, documents: HeldOutText, length: int
) -> None:
    models = tuple(make_model(tmp_path / f"m{seed}", seed=seed) for seed in range(3))
    value = measure(models, documents, tmp_path / "out", max_length=length, batch_size=3)
    tokenizer = AutoTokenizer.from_pretrained(models[0].directory)
    wanted = []
    for text in TEXTS:
        plain = tokenizer(text, add_special_tokens=False)["input_ids"]
        wanted.append(np.log(np.mean([probabilities(model, plain, length) for model in models], axis=0)))
    assert [row.loglik for row in read_documents(tmp_path / "out")] == pytest.approx(
        [logs.sum() for logs in wanted], rel=1e-5
    )
    everything = np.concatenate(wanted)
    assert (value.tokens, value.window) == (len(everything), length)
    assert value.perplexity == pytest.approx(math.exp(-everything.mean()), rel=1e-5)


@pytest.mark.story
def test_the_ensemble_of_a_model_with_itself_is_the_model(tmp_path: Path, documents: HeldOutText) -> None:
    model = make_model(tmp_path / "m")
    (tmp_path / "one").mkdir()
    alone = perplexity.work(tmp_path / "one", model, documents, WindowSettings(), CPU)
    twice = measure((model, model), documents, tmp_path / "two")
    assert twice.perplexity == pytest.approx(alone.perplexity, rel=1e-9)
    assert twice.vocabulary == alone.vocabulary


def test_the_ensemble_is_at_least_as_good_as_its_members_are_on_average(tmp_path: Path, documents: HeldOutText) -> None:
    models = tuple(make_model(tmp_path / f"m{seed}", seed=seed) for seed in range(2))
    losses = []
    for model in models:
        (tmp_path / f"out-{model.name}").mkdir()
        value = perplexity.work(tmp_path / f"out-{model.name}", model, documents, WindowSettings(), CPU)
        assert value.loglik is not None
        losses.append(-value.loglik)
    together = measure(models, documents, tmp_path / "out")
    assert together.loglik is not None
    assert -together.loglik <= sum(losses) / 2  # Jensen's inequality


def test_models_of_different_tokenizers_have_no_ensemble(tmp_path: Path, documents: HeldOutText) -> None:
    models = (make_model(tmp_path / "a"), make_model(tmp_path / "b", prefix="eos only"))
    with pytest.raises(InvalidInput, match="different tokenizers") as caught:
        measure(models, documents, tmp_path / "out")
    assert "ensemble: false" in caught.value.remedy


def test_an_ensemble_needs_two_models(tmp_path: Path, documents: HeldOutText) -> None:
    with pytest.raises(InvalidInput, match="1 parent"):
        measure((make_model(tmp_path / "a"),), documents, tmp_path / "out")


def likelihoods(loss: float | None, vocabulary: str = "one") -> Likelihoods:
    loglik = None if loss is None else -1000 * loss
    return Likelihoods(
        model="m", documents=10, tokens=1000, bytes=4000, loglik=loglik,
        perplexity=None if loss is None else math.exp(loss), bits_per_byte=None, vocabulary=vocabulary, window=64,
    )  # fmt: skip


@pytest.mark.parametrize(("merge", "kept"), [(1.8, 1.0), (2.0, 0.0), (1.9, 0.5), (2.1, -0.5), (1.7, 1.5)])
def test_the_share_of_the_gain_is_counted_from_the_better_parent(merge: float, kept: float) -> None:
    parents = [likelihoods(2.0), likelihoods(2.5)]
    assert ensemble_gain_share(parents, likelihoods(1.8), likelihoods(merge)) == pytest.approx(kept)


@pytest.mark.parametrize(
    ("together", "merge"),
    [
        (likelihoods(2.0), likelihoods(1.9)),  # the ensemble gains nothing
        (likelihoods(1.8), likelihoods(None)),
        (likelihoods(1.8), likelihoods(1.9, vocabulary="another")),
    ],
)
def test_incomparable_likelihoods_have_no_gain_share(together: Likelihoods, merge: Likelihoods) -> None:
    assert ensemble_gain_share([likelihoods(2.0), likelihoods(2.5)], together, merge) is None


@given(st.lists(st.floats(0.5, 5), min_size=2, max_size=4), st.floats(0.01, 0.4), st.floats(-1, 2))
def test_the_kept_share_of_the_ensemble_gain_is_reported(losses: list[float], gain: float, share: float) -> None:
    best = min(losses)
    kept = ensemble_gain_share(
        [likelihoods(loss) for loss in losses], likelihoods(best - gain), likelihoods(best - share * gain)
    )
    assert kept == pytest.approx(share, abs=1e-6)

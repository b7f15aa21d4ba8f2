"""Perplexity equals an independent computation for any special tokens, and invalid input is refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from samples import sampled, sampled_rows
from scoring_runs import call_here, model_in
from tiny_models import CPU, Prefix, make_model, words, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files.hashing import HashMemo
from mergegate.tasks.models.checkpoints import unload_models
from mergegate.tasks.models.checkpoints.model import Model
from mergegate.tasks.quality.perplexity import ensemble_gain_share, ensemble_likelihoods, stage
from mergegate.tasks.quality.perplexity.measurement import WindowSettings
from mergegate.tasks.quality.perplexity.settings import PerplexitySettings
from mergegate.tasks.quality.perplexity.stage import Likelihoods, perplexity, pin_documents, read_documents
from mergegate.tasks.quality.perplexity.text import HeldOutText, read_distinct, read_texts

TEXTS = [". ".join(words(5, seed)) + "." for seed in range(5)] + ["a", "ab " * 40]
UP, PT = "model.layers.1.mlp.up_proj.weight", {"format": "pt"}
DEMO = Path(__file__).resolve().parents[2] / "profiles" / "demo"
PREFIXES: tuple[Prefix, ...] = ("bos added by the tokenizer", "eos only", "neither")


@pytest.fixture(autouse=True)
def _no_model_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stage, "call_model_process", call_here)
    yield
    unload_models()


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> HeldOutText:
    return pin(write_jsonl(tmp_path_factory.mktemp("texts") / "text.jsonl", ({"text": text} for text in TEXTS)))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, ...]:
    root = tmp_path_factory.mktemp("models")
    return tuple(make_model(root / f"m{seed}", seed=seed) for seed in range(3))


def pin(path: Path, **settings: object) -> HeldOutText:
    return pin_documents(PerplexitySettings(documents=path, **settings), path.parent, HashMemo(path.parent / "h.db"))


def measure(
    model: Model | Sequence[Model], held_out: HeldOutText, out: Path, **windows: object
) -> tuple[Likelihoods, list[float]]:
    """Measure a model, or the ensemble of several."""
    out.mkdir(exist_ok=True)
    settings = WindowSettings(**windows)
    if isinstance(model, Model):
        value = perplexity.work(out, model, held_out, settings, CPU)
    else:
        value = ensemble_likelihoods.work(out, tuple(model), held_out, settings, CPU)
    return value, [document.loglik for document in read_documents(out)]


def reference(
    model: Model, texts: Sequence[str], length: int, prefix: int | None = 1, dtype: torch.dtype = torch.float32
) -> list[np.ndarray]:
    """Return the log-likelihoods of the tokens of each text, each with a pass over ``length`` previous tokens."""
    network = AutoModelForCausalLM.from_pretrained(model.directory, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(model.directory)
    logs = []
    for text in texts:
        plain, found, at = tokenizer(text, add_special_tokens=False)["input_ids"], [], 1
        tokens = plain if prefix is None else [prefix, *plain]
        while at < len(tokens):
            end = min(at + length, len(tokens))
            with torch.no_grad():
                logits = network(torch.tensor([tokens[max(0, end - 1 - length) : end - 1]])).logits[0].double().numpy()
            log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            found += [log_p[i - end, tokens[i]] for i in range(at, end)]
            at = end
        logs.append(np.array(found))
    return logs


@pytest.mark.parametrize("prefix", sampled(PREFIXES, PREFIXES[::2]))
@pytest.mark.parametrize("length", sampled((7, 64), (7,)))
def test_perplexity_equals_plain_transformers(
    tmp_path: Path, documents: HeldOutText, prefix: Prefix, length: int
) -> None:
    model = make_model(tmp_path / "m", prefix=prefix)
    value, logliks = measure(model, documents, tmp_path / "out", max_length=length, batch_size=3)
    first = None if prefix == "neither" else 1  # here, both '<s>' and, in its absence, '</s>' have id 1
    wanted = [logs for logs in reference(model, TEXTS, length, first) if len(logs)]  # a lone token has no likelihood
    assert logliks == pytest.approx([logs.sum() for logs in wanted], rel=1e-5)
    every = np.concatenate(wanted)
    assert value.perplexity == pytest.approx(math.exp(-every.mean()), rel=1e-5)
    assert (value.tokens, value.documents, value.window) == (len(every), len(wanted), length)
    size = sum(len(text) for text in TEXTS if len(text) > 1 or prefix != "neither")
    assert value.bits_per_byte == pytest.approx(-every.sum() / size / math.log(2), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "bos"), sampled_rows(product(("base", "reverser"), (True, False)), [("reverser", False)])
)
def test_the_demo_models_have_the_perplexity_that_plain_transformers_give(tmp_path: Path, name: str, bos: bool) -> None:
    """Covers bfloat16 weights, held-out sentences, and a tokenizer with neither BOS nor EOS."""
    directory = shutil.copytree(DEMO / "models" / name, tmp_path / name)
    if not bos:
        config = json.loads((directory / "tokenizer_config.json").read_text())
        config.update(bos_token=None, eos_token=None)
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    begin = AutoTokenizer.from_pretrained(directory).bos_token_id
    assert (begin is not None) == bos
    settings = PerplexitySettings(documents=DEMO / "data" / "held-out.jsonl")
    held_out = pin_documents(settings, DEMO, HashMemo(tmp_path / "memo.db"))
    model = model_in(directory)
    value, logliks = measure(model, held_out, tmp_path / "out", documents=20, dtype="float32")
    texts = [json.loads(line)["text"] for line in held_out.path.read_text().splitlines()[:20]]
    wanted = reference(model, texts, value.window or 0, begin)
    assert logliks == pytest.approx([logs.sum() for logs in wanted], rel=1e-4)
    assert value.perplexity == pytest.approx(math.exp(-np.concatenate(wanted).mean()), rel=1e-4)


@pytest.mark.story
@pytest.mark.parametrize("prefix", PREFIXES[:2])
def test_perplexity_equals_lm_evals_without_its_second_bos(
    tmp_path: Path, documents: HeldOutText, prefix: Prefix
) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = make_model(tmp_path / "m", prefix=prefix)
    lm = HFLM(str(model.directory), device="cpu", max_length=20, add_bos_token=False, softmax_dtype="float32")
    requests = [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(TEXTS)]
    _, logliks = measure(model, documents, tmp_path / "out", max_length=20)
    assert logliks == pytest.approx(lm.loglikelihood_rolling(requests, disable_tqdm=True), rel=1e-5)


def test_neither_the_batch_size_nor_a_window_beyond_the_context_moves_more_than_last_digits(
    tmp_path: Path, documents: HeldOutText, models: tuple[Model, ...]
) -> None:
    _, one = measure(models[0], documents, tmp_path / "one", batch_size=1)
    value, many = measure(models[0], documents, tmp_path / "many", batch_size=16, max_length=2048)
    assert one == pytest.approx(many, rel=1e-5)
    assert value.window == 64


def test_a_bf16_model_is_summed_in_float32(tmp_path: Path, documents: HeldOutText) -> None:
    model = make_model(tmp_path / "m", dtype=torch.bfloat16)
    _, logliks = measure(model, documents, tmp_path / "out", batch_size=1)
    wanted = [logs.sum() for logs in reference(model, TEXTS, 64, dtype=torch.bfloat16)]
    assert logliks == pytest.approx(wanted, rel=1e-5)  # rounding log-probabilities to bf16 would change them by 1e-3


def test_a_broken_model_has_no_perplexity_and_lists_the_documents(tmp_path: Path, documents: HeldOutText) -> None:
    model = make_model(tmp_path / "m")
    weights = load_file(model.directory / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, model.directory / "model.safetensors", metadata={"format": "pt"})
    value, logliks = measure(model, documents, tmp_path / "out")
    assert (value.loglik, value.perplexity, value.bits_per_byte) == (None, None, None)
    assert value.summary() == "not finite"
    assert all(math.isnan(loglik) for loglik in logliks)
    assert Likelihoods.model_validate_json(value.model_dump_json()) == value


def test_one_tokenizer_has_one_vocabulary_digest_and_another_has_another(
    tmp_path: Path, documents: HeldOutText, models: tuple[Model, ...]
) -> None:
    other = make_model(tmp_path / "other", prefix=PREFIXES[1])
    found = [measure(model, documents, tmp_path / "out")[0].vocabulary for model in (*models[:2], other)]
    assert found[0] == found[1] != found[2]


def test_an_error_names_the_checkpoint_with_damaged_weights(tmp_path: Path, documents: HeldOutText) -> None:
    model = make_model(tmp_path / "m")
    file = model.directory / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name != UP}, file, PT)
    # The missing tensor is not filled with random numbers.
    for message in (r"model\.layers\.1\.mlp\.up_proj\.weight is missing", "cannot load the model"):
        with pytest.raises(InvalidInput, match=message) as caught:
            measure(model, documents, tmp_path / "out")
        assert str(model.directory) in str(caught.value)
        file.write_bytes(b"\x10\0\0\0\0\0\0\0garbage")


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path, documents: HeldOutText) -> None:
    model = make_model(tmp_path / "m")
    config = json.loads((model.directory / "config.json").read_text())
    config |= {"model_type": "foreign", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    (model.directory / "config.json").write_text(json.dumps(config))
    (model.directory / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(InvalidInput, match="cannot load the model"):
        measure(model, documents, tmp_path / "out")
    assert not (tmp_path / "ran").exists()


def test_documents_that_changed_after_they_were_pinned_are_noticed(tmp_path: Path) -> None:
    documents = pin(write_jsonl(tmp_path / "t.jsonl", [{"text": "one"}]))
    documents.path.write_text('{"text": "another"}\n')
    with pytest.raises(InvalidInput, match="changed during the run"):
        read_texts(documents, None)


@pytest.mark.parametrize(
    ("name", "content", "settings", "limit", "texts"),
    [
        # Empty documents are left out, and positions stay.
        ("t.jsonl", '{"b": "one"}\n{"b": " "}\n{"b": "two"}\n{"b": "x"}\n', {"field": "b"}, 2, {0: "one", 2: "two"}),
        ("t.txt", "one\ntwo\n\nthree\n", {}, None, {0: "one\ntwo", 1: "three\n"}),  # paragraphs
    ],
)
def test_texts_are_read_with_their_positions(
    tmp_path: Path, name: str, content: str, settings: dict[str, str], limit: int | None, texts: dict[int, str]
) -> None:
    (tmp_path / name).write_text(content)
    assert dict(read_texts(pin(tmp_path / name, **settings), limit)) == texts


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ('{"text": "one"}\n', {"field": "txet"}, "did you mean 'text'"),
        ('{"text": "one"}\n{"text": \n', {}, "line 2: not JSON"),
        (None, {}, "no such file"),
        ('{"text": "one", "topic": 3}\n', {"stratum": "topic"}, r"perplexity.stratum: topic"),
    ],
)
def test_unusable_documents_are_refused(
    tmp_path: Path, content: str | None, settings: dict[str, str], message: str
) -> None:
    if content is not None:
        (tmp_path / "t.jsonl").write_text(content)
    with pytest.raises(InvalidInput, match=message):
        read_texts(pin(tmp_path / "t.jsonl", **settings), None)


def limits(**settings: object) -> Any:
    return PerplexitySettings.model_validate({"documents": "t.jsonl", **settings}).limits


@pytest.mark.parametrize(("written", "meant"), [("5%", 0.05), (" 2.5% ", 0.025), (0.05, 0.05), ("0.05", 0.05)])
def test_an_increase_is_written_as_percentage_or_share(written: object, meant: float) -> None:
    assert limits(max_increase=written).max_increase == pytest.approx(meant)


@pytest.mark.parametrize("wrong", [5, "five%", 0, "-1%", "150%"])
def test_an_increase_out_of_range_is_refused(wrong: object) -> None:
    with pytest.raises(ValidationError):
        limits(max_increase=wrong)


def test_a_strict_limit_lowers_the_warning_with_it() -> None:
    assert limits(max_increase="1%").warn_increase == pytest.approx(0.01)
    with pytest.raises(ValidationError, match="must not exceed"):
        limits(max_increase="1%", warn_increase="2%")


def test_a_repeated_document_is_measured_once_and_counted(tmp_path: Path) -> None:
    lines = [{"text": text} for text in ("boilerplate text", "one", " boilerplate  text\n", "two", "boilerplate\ttext")]
    documents = pin(write_jsonl(tmp_path / "t.jsonl", lines))
    distinct = read_distinct(documents, None)
    assert [(document.doc_id, document.text) for document in distinct.documents] == [
        *((0, "boilerplate text"), (1, "one"), (3, "two"))
    ]
    assert distinct.duplicates == 2
    # The limit counts distinct documents.
    assert [document.doc_id for document in read_distinct(documents, 3).documents] == [0, 1, 3]
    value, _ = measure(make_model(tmp_path / "model"), documents, tmp_path / "out")
    assert (value.documents, value.duplicates) == (3, 2)
    assert len({row.hash for row in read_documents(tmp_path / "out")}) == 3


@pytest.mark.parametrize(
    ("stratum", "strata"), [(None, ["de", "wiki", "", "en"]), ("topic", ["law", "", "art and music", ""])]
)
def test_documents_keep_the_name_of_their_stratum(tmp_path: Path, stratum: str | None, strata: list[str]) -> None:
    lines: list[dict[str, object]] = [
        {"text": "eins", "language": "de", "source": "web", "topic": "law"},
        {"text": "two", "source": "wiki", "language": 3},
        {"text": "three", "lang": " ", "topic": "art\nand  music"},
        {"text": "four", "lang": "en", "topic": None},
    ]
    documents = pin(write_jsonl(tmp_path / "t.jsonl", lines), stratum=stratum)
    measure(make_model(tmp_path / "model"), documents, tmp_path / "out")
    assert [row.stratum for row in read_documents(tmp_path / "out")] == strata


def test_the_stratum_field_is_part_of_the_key_only_if_it_is_set(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [{"text": "one", "topic": "law"}])
    assert set(dict(pin(path).content_key())) == {"sha256", "field"}  # type: ignore[call-overload]
    assert pin(path).content_key() != pin(path, stratum="topic").content_key()


@pytest.mark.story
@pytest.mark.parametrize("length", [7, 64])
def test_the_ensemble_is_the_mean_of_plain_transformers_probabilities(
    tmp_path: Path, documents: HeldOutText, models: tuple[Model, ...], length: int
) -> None:
    value, logliks = measure(models, documents, tmp_path / "out", max_length=length, batch_size=3)
    by_model = [reference(model, TEXTS, length) for model in models]
    wanted = [np.log(np.mean(np.exp(logs), axis=0)) for logs in zip(*by_model, strict=True)]
    assert logliks == pytest.approx([logs.sum() for logs in wanted], rel=1e-5)
    everything = np.concatenate(wanted)
    assert (value.tokens, value.window) == (len(everything), length)
    assert value.perplexity == pytest.approx(math.exp(-everything.mean()), rel=1e-5)


def test_the_ensemble_is_at_least_as_good_as_its_members_are_on_average(
    tmp_path: Path, documents: HeldOutText, models: tuple[Model, ...]
) -> None:
    one, other, together = (
        measure(each, documents, tmp_path / f"{at}")[0].loglik or math.nan
        for at, each in enumerate((*models[:2], models[:2]))
    )
    assert together >= (one + other) / 2  # Jensen's inequality


@pytest.mark.parametrize(
    ("prefixes", "message", "remedy"),
    [(PREFIXES[:2], "different tokenizers", "ensemble: false"), (PREFIXES[:1], "1 parent", "")],
)
def test_models_of_different_tokenizers_and_a_single_model_have_no_ensemble(
    tmp_path: Path, documents: HeldOutText, prefixes: tuple[Prefix, ...], message: str, remedy: str
) -> None:
    parents = [make_model(tmp_path / prefix, prefix=prefix) for prefix in prefixes]
    with pytest.raises(InvalidInput, match=message) as caught:
        measure(parents, documents, tmp_path / "out")
    assert remedy in caught.value.remedy


def likelihoods(loss: float | None, vocabulary: str = "one") -> Likelihoods:
    loglik, value = (None, None) if loss is None else (-1000 * loss, math.exp(loss))
    counts: dict[str, Any] = {"documents": 10, "tokens": 1000, "bytes": 4000, "window": 64}
    return Likelihoods(model="m", loglik=loglik, perplexity=value, bits_per_byte=None, vocabulary=vocabulary, **counts)


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


@settings(max_examples=40)
@given(st.lists(st.floats(0.5, 5), min_size=2, max_size=4), st.floats(0.01, 0.4), st.floats(-1, 2))
def test_the_kept_share_of_the_ensemble_gain_is_reported(losses: list[float], gain: float, share: float) -> None:
    best = min(losses)
    kept = ensemble_gain_share(
        [likelihoods(loss) for loss in losses], likelihoods(best - gain), likelihoods(best - share * gain)
    )
    assert kept == pytest.approx(share, abs=1e-6)

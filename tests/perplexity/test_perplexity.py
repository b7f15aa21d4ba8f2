"""Perplexity equals an independent computation for any special tokens, and invalid input is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tiny_models import CPU, Prefix, make_model, words, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files.hashing import HashMemo
from mergegate.tasks.checkpoints.model import Model
from mergegate.tasks.perplexity.measurement import WindowSettings
from mergegate.tasks.perplexity.settings import PerplexitySettings
from mergegate.tasks.perplexity.stage import Likelihoods, perplexity, pin_documents, read_documents
from mergegate.tasks.perplexity.text import HeldOutText, read_distinct, read_texts

TEXTS = [". ".join(words(5, seed)) + "." for seed in range(12)] + ["a", "ab " * 40]
DEMO = Path(__file__).resolve().parents[2] / "profiles" / "demo"
PREFIXES: tuple[Prefix, ...] = ("bos added by the tokenizer", "eos only", "neither")


@pytest.fixture
def documents(tmp_path: Path) -> HeldOutText:
    return pin(write_jsonl(tmp_path / "text.jsonl", ({"text": text} for text in TEXTS)))


def pin(path: Path, **settings: object) -> HeldOutText:
    return pin_documents(PerplexitySettings(documents=path, **settings), path.parent, HashMemo(path.parent / "h.db"))


def measure(model: Model, documents: HeldOutText, out: Path, **windows: object) -> tuple[Likelihoods, list[float]]:
    out.mkdir(exist_ok=True)
    value = perplexity.work(out, model, documents, WindowSettings(**windows), CPU)
    return value, [document.loglik for document in read_documents(out)]


def reference_loglik(network: Any, plain: list[int], length: int, prefix: int | None) -> tuple[float, int]:
    """Return log-likelihood and token count from plain transformers: one window at a time, float64 log-softmax."""
    tokens = plain if prefix is None else [prefix, *plain]
    total, scored, at = 0.0, 0, 1
    while at < len(tokens):
        end = min(at + length, len(tokens))
        with torch.no_grad():
            logits = network(torch.tensor([tokens[max(0, end - 1 - length) : end - 1]])).logits[0].double().numpy()
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        total += float(sum(log_p[i - end, tokens[i]] for i in range(at, end)))
        scored += end - at
        at = end
    return total, scored


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("length", [7, 64])
def test_perplexity_equals_plain_transformers(
    tmp_path: Path, documents: HeldOutText, prefix: Prefix, length: int
) -> None:
    model = make_model(tmp_path / "m", prefix=prefix)
    value, logliks = measure(model, documents, tmp_path / "out", max_length=length, batch_size=3)
    first = None if prefix == "neither" else 1  # here, both '<s>' and, in its absence, '</s>' have id 1
    network = AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model.directory)
    plain = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    wanted = [reference_loglik(network, tokens, length, first) for tokens in plain]
    wanted = [(loglik, tokens) for loglik, tokens in wanted if tokens]  # a lone token has no likelihood
    assert logliks == pytest.approx([loglik for loglik, _ in wanted], rel=1e-5)
    total, tokens = sum(loglik for loglik, _ in wanted), sum(tokens for _, tokens in wanted)
    assert value.perplexity == pytest.approx(math.exp(-total / tokens), rel=1e-5)
    assert (value.tokens, value.documents, value.window) == (tokens, len(wanted), length)
    size = sum(len(text) for text in TEXTS if len(text) > 1 or prefix != "neither")
    assert value.bits_per_byte == pytest.approx(-total / size / math.log(2), rel=1e-5)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("name", ["base", "reverser", "shifter"])
def test_the_demo_models_have_the_perplexity_that_plain_transformers_give(tmp_path: Path, name: str, bos: bool) -> None:
    """Covers bfloat16 weights, held-out sentences, and a tokenizer with neither BOS nor EOS."""
    directory = tmp_path / name
    shutil.copytree(DEMO / "models" / name, directory)
    if not bos:
        config = json.loads((directory / "tokenizer_config.json").read_text())
        config.update(bos_token=None, eos_token=None)
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert (tokenizer.bos_token_id is not None) == bos
    model = Model(name=name, digest=str(directory), directory=directory)
    settings = PerplexitySettings(documents=DEMO / "data" / "held-out.jsonl")
    held_out = pin_documents(settings, DEMO, HashMemo(tmp_path / "memo.db"))
    out = tmp_path / "out"
    out.mkdir()
    value = perplexity.work(out, model, held_out, WindowSettings(documents=40, dtype="float32"), CPU)
    network = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    texts = [json.loads(line)["text"] for line in held_out.path.read_text().splitlines()[:40]]
    plain = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    wanted = [reference_loglik(network, tokens, value.window or 0, tokenizer.bos_token_id) for tokens in plain]
    logliks = [document.loglik for document in read_documents(out)]
    assert logliks == pytest.approx([loglik for loglik, _ in wanted], rel=1e-4)
    total, tokens = sum(loglik for loglik, _ in wanted), sum(tokens for _, tokens in wanted)
    assert value.perplexity == pytest.approx(math.exp(-total / tokens), rel=1e-4)


@pytest.mark.parametrize("prefix", ["bos added by the tokenizer", "eos only"])
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


def test_the_batch_size_moves_nothing_but_last_digits(tmp_path: Path, documents: HeldOutText) -> None:
    model = make_model(tmp_path / "m")
    _, one = measure(model, documents, tmp_path / "one", batch_size=1)
    _, many = measure(model, documents, tmp_path / "many", batch_size=16)
    assert one == pytest.approx(many, rel=1e-5)


def test_a_bf16_model_is_summed_in_float32(tmp_path: Path, documents: HeldOutText) -> None:
    model = make_model(tmp_path / "m", dtype=torch.bfloat16)
    _, logliks = measure(model, documents, tmp_path / "out", batch_size=1)
    network = AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(model.directory)
    plain = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    wanted = [reference_loglik(network, tokens, 64, 1)[0] for tokens in plain]
    assert logliks == pytest.approx(wanted, rel=1e-5)  # rounding log-probabilities to bf16 would change them by 1e-3


def test_windows_never_exceed_the_context_of_the_model(tmp_path: Path, documents: HeldOutText) -> None:
    value, _ = measure(make_model(tmp_path / "m"), documents, tmp_path / "out", max_length=2048)
    assert value.window == 64


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
    tmp_path: Path, documents: HeldOutText
) -> None:
    found = [
        measure(make_model(tmp_path / name, seed=seed, prefix=prefix), documents, tmp_path / f"out-{name}")[
            0
        ].vocabulary
        for seed, (name, prefix) in enumerate([("a", PREFIXES[0]), ("b", PREFIXES[0]), ("c", PREFIXES[1])])
    ]
    assert found[0] == found[1] != found[2]


def test_a_missing_tensor_is_not_filled_with_random_numbers(tmp_path: Path, documents: HeldOutText) -> None:
    model = make_model(tmp_path / "m")
    weights = load_file(model.directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, model.directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        measure(model, documents, tmp_path / "out")


def test_an_error_names_the_checkpoint_with_damaged_weights(tmp_path: Path, documents: HeldOutText) -> None:
    model = make_model(tmp_path / "m")
    (model.directory / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0garbage")
    with pytest.raises(InvalidInput, match="cannot load the model") as caught:
        measure(model, documents, tmp_path / "out")
    assert str(model.directory) in caught.value.where


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path, documents: HeldOutText) -> None:
    model = make_model(tmp_path / "m")
    config = json.loads((model.directory / "config.json").read_text())
    config |= {"model_type": "foreign", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    (model.directory / "config.json").write_text(json.dumps(config))
    (model.directory / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(InvalidInput, match="cannot load the model"):
        measure(model, documents, tmp_path / "out")
    assert not (tmp_path / "ran").exists()


def test_documents_that_changed_after_they_were_pinned_are_noticed(documents: HeldOutText) -> None:
    documents.path.write_text('{"text": "another"}\n')
    with pytest.raises(InvalidInput, match="changed during the run"):
        read_texts(documents, None)


def test_empty_documents_are_left_out_and_positions_kept(tmp_path: Path) -> None:
    documents = pin(
        write_jsonl(tmp_path / "t.jsonl", ({"body": text} for text in ["one", " ", "two", "three"])), field="body"
    )
    assert read_texts(documents, 2) == ((0, "one"), (2, "two"))


def test_plain_text_has_one_document_per_paragraph(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("one\ntwo\n\nthree\n")
    assert [text for _, text in read_texts(pin(tmp_path / "t.txt"), None)] == ["one\ntwo", "three\n"]


def test_a_wrong_field_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="did you mean 'text'"):
        pin(write_jsonl(tmp_path / "t.jsonl", [{"text": "one"}]), field="txet")


def test_an_error_names_the_number_of_a_line_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "one"}\n{"text": \n')
    with pytest.raises(InvalidInput, match="line 2: not JSON"):
        read_texts(pin(tmp_path / "t.jsonl"), None)


def test_missing_documents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no such file"):
        pin(tmp_path / "t.jsonl")


@pytest.mark.parametrize(("written", "meant"), [("5%", 0.05), (" 2.5% ", 0.025), (0.05, 0.05), ("0.05", 0.05)])
def test_an_increase_is_written_as_percentage_or_share(written: object, meant: float) -> None:
    settings = PerplexitySettings.model_validate({"documents": "t.jsonl", "max_increase": written})
    assert settings.limits.max_increase == pytest.approx(meant)


@pytest.mark.parametrize("wrong", [5, "five%", 0, "-1%", "150%"])
def test_an_increase_out_of_range_is_refused(wrong: object) -> None:
    with pytest.raises(ValidationError):
        PerplexitySettings.model_validate({"documents": "t.jsonl", "max_increase": wrong})


def test_a_strict_limit_lowers_the_warning_with_it() -> None:
    limits = PerplexitySettings.model_validate({"documents": "t.jsonl", "max_increase": "1%"}).limits
    assert limits.warn_increase == pytest.approx(0.01)
    with pytest.raises(ValidationError, match="must not exceed"):
        PerplexitySettings.model_validate({"documents": "t.jsonl", "max_increase": "1%", "warn_increase": "2%"})


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


def test_a_stratum_field_that_no_document_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"perplexity.stratum: topic"):
        pin(write_jsonl(tmp_path / "t.jsonl", [{"text": "one", "topic": 3}]), stratum="topic")


def test_the_stratum_field_is_part_of_the_key_only_if_it_is_set(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [{"text": "one", "topic": "law"}])
    assert set(dict(pin(path).content_key())) == {"sha256", "field"}  # type: ignore[call-overload]
    assert pin(path).content_key() != pin(path, stratum="topic").content_key()

"""Test the model card and the scores for leaderboards: parsers and readers find what was measured and what is open."""

from __future__ import annotations

import math
from pathlib import Path

import huggingface_hub
import pytest
import yaml
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st
from release_samples import COMMIT, NUMERICS, content, facts_of, license_verdict, parents, share
from scipy.stats import binomtest

from mergegate.merge_core.errors import Refused
from mergegate.tasks.models.checkpoints import parse_card
from mergegate.tasks.preflight.licenses.check import Ancestor, LicenseVerdict
from mergegate.tasks.quality.evaluation.document_order import DataSource, TaskData
from mergegate.tasks.quality.evaluation.scoring.scores import TaskScore
from mergegate.tasks.quality.evaluation.settings import Scoring
from mergegate.tasks.release.publish.documents.card import model_card, score_interval
from mergegate.tasks.release.publish.documents.card_metadata import BENCHMARKS, card_metadata, check_card, eval_results
from mergegate.tasks.release.publish.targets.hub import HubTarget
from mergegate.tasks.release.report.content import ReportContent

GSM8K = share("gsm8k", 700, 1319, "exact_match,flexible-extract")
SCORES = (GSM8K, share("gsm8k", 650, 1319, "exact_match,strict-match"), share("arc_easy", 300, 400))


def card_of(
    root: Path,
    said: ReportContent | None = None,
    verdict: LicenseVerdict | None = None,
    names: tuple[str, ...] = ("LICENSE", "licenses/apache-2.0.txt", "NOTICE"),
    **update: object,
) -> str:
    """Return the card after the check that every release runs."""
    said, verdict = said or content(SCORES), verdict or license_verdict("apache-2.0", "mit")
    metadata = card_metadata(said, parents(root), verdict.combination)
    card = model_card(facts_of(root, content=said, license=verdict, metadata=metadata, **update), names)
    check_card(card, metadata, names)
    return card


def test_the_hubs_library_reads_the_intended_metadata(tmp_path: Path) -> None:
    card = card_of(tmp_path)
    assert "| arc\\_easy | acc,none | 400 | 75.0 \\[70.5, 79.0\\] |" in card
    data = ModelCard(card).data
    assert (data.license, data.base_model, data.base_model_relation) == ("apache-2.0", ["acme/general"], "merge")
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert data.tags == ["merge", "mergegate"]
    found = {(r.dataset_type, r.metric_type, r.metric_name): r.metric_value for r in data.eval_results}
    assert found == {
        ("openai/gsm8k", "exact_match", "exact match (flexible-extract)"): 53.07,
        ("openai/gsm8k", "exact_match", "exact match (strict-match)"): 49.28,
        ("arc_easy", "accuracy", "accuracy"): 75.0,
    }


@pytest.mark.story
@given(name=st.text(min_size=1, max_size=20), task=st.text(min_size=1, max_size=20), display=st.text(max_size=30))
def test_no_name_can_break_the_metadata(
    tmp_path_factory: pytest.TempPathFactory, name: str, task: str, display: str
) -> None:
    said = content((share(task, 1, 2),), name=name).model_copy(update={"recipe": f"# {display}\n```\n"})
    root = tmp_path_factory.getbasetemp() / "names"
    try:
        card = card_of(root, said)
    except Refused:
        return  # the release is refused before any upload
    assert parse_card(card.encode()).fields == ModelCard(card).data.to_dict()
    assert said.recipe.strip() in card


def test_ordinary_names_are_not_refused(tmp_path: Path) -> None:
    for name in ("demo", "Support-Assistant_v1.2", "null", "1e3", "no", "a: b", "- x", "München"):
        card_of(tmp_path, content((share(name, 1, 2),), name=name))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("language: en", "language: [en]", ["en"]),
        ("language: [de, en]", "language: [en, de]", ["de", "en"]),
        ("language: en", "language: [en, de]", None),
        ("language: en", "license: mit", None),
        ("license: mit", "license: mit", None),
        ("language: en", "language: {x: y}", None),
        ("language: [", "language: [", None),
        # YAML reads a bare 'no' as false. The card then omits the language and does not guess Norwegian.
        ("language: no", "language: no", None),
    ],
)
def test_a_language_is_named_where_all_parents_agree(
    tmp_path: Path, first: str, second: str, expected: list[str] | None
) -> None:
    both = parents(tmp_path)
    for parent, said in zip(both, (first, second), strict=True):
        (parent.directory / "README.md").write_text(f"---\n{said}\n---\n# x\n")
    assert card_metadata(content(), both, license_verdict("mit").combination).get("language") == expected


def test_a_score_that_is_not_a_share_keeps_its_scale(tmp_path: Path) -> None:
    odd = TaskScore(task="wiki", metric="word_perplexity,none", n=9, score=0.51234, stderr=0.1, higher_is_better=False)
    (result,) = ModelCard(card_of(tmp_path, content((odd,)))).data.eval_results
    assert (result.metric_type, result.metric_value) == ("perplexity", 0.5123)


@settings(max_examples=40)
@given(st.integers(0, 400), st.integers(2, 400))
def test_the_interval_of_a_share_is_wilsons(right: int, n: int) -> None:
    right = min(right, n)
    low, high = score_interval(share("x", right, n))
    expected = binomtest(right, n).proportion_ci(0.95, method="wilson")
    assert math.isclose(low, expected.low, abs_tol=1e-9)
    assert math.isclose(high, expected.high, abs_tol=1e-9)


def test_a_graded_score_has_the_normal_interval(tmp_path: Path) -> None:
    graded = TaskScore(task="x", metric="f1,none", n=100, score=0.5, stderr=0.01, higher_is_better=True)
    low, high = score_interval(graded)
    assert (round(low, 5), round(high, 5)) == (0.4804, 0.5196)
    nothing = graded.model_copy(update={"stderr": math.nan})
    assert "| x | f1,none | 100 | 50.0 | 50.0 | 50.0 |" in card_of(tmp_path, content((nothing,)))


def test_required_notices_are_at_the_top_of_the_card(tmp_path: Path) -> None:
    verdict = license_verdict("llama3.1", "apache-2.0", name="acme/Llama-demo")
    assert verdict.combination.status == "allowed"
    card = card_of(tmp_path, verdict=verdict)
    page = card.split("---\n", 2)[2]
    assert page.index("**Built with Llama**") < page.index("is a merge, computed without training")
    assert "| Built with Llama | llama3.1 | It is at the top of this page. | Show it on the website," in page
    assert "It is in [NOTICE](NOTICE)." in page
    assert "Require the same of everyone who receives the model from you." in page
    assert "**Statement of changes.**" in page


def test_the_card_names_who_accepted_a_doubt_and_why(tmp_path: Path) -> None:
    doubtful = license_verdict("other")
    assert doubtful.combination.status == "review"
    settled = license_verdict("other", accepted={"acme/other": "alice: we have a contract"})
    card = card_of(tmp_path, verdict=settled)
    assert "| acme/other: alice: we have a contract |" in card
    assert settled.combination.acceptances


def test_the_card_names_ancestors_and_unreadable_ancestors(tmp_path: Path) -> None:
    old = Ancestor(name="acme/old", license="mit", revision=COMMIT, own_text="")
    verdict = license_verdict("mit", ancestors=(old,), unread={"acme/older": "no such repository"})
    card = card_of(tmp_path, verdict=verdict)
    assert f"| acme/old | mit | `{COMMIT}` |" in card
    assert "acme/older (no such repository)" in card


def test_a_missing_license_text_is_an_open_task(tmp_path: Path) -> None:
    verdict = license_verdict("apache-2.0")
    (asked,) = (item for item in verdict.combination.obligations if item.kind == "text")
    card = card_of(tmp_path, content(), verdict, ("LICENSE",), missing=(asked,))
    assert "| ship the text of apache-2.0 | apache-2.0 |  | **Open:**" in card
    whole = card_of(tmp_path, content(), verdict, ("LICENSE", "licenses/apache-2.0.txt"))
    assert "[licenses/apache-2.0.txt](licenses/apache-2.0.txt)" in whole
    assert "**Open:**" not in whole


def test_the_commands_match_the_address_of_the_release(tmp_path: Path) -> None:
    card = card_of(tmp_path, inputs={"numerics": NUMERICS.model_copy(update={"device": "cuda"})}, signed=True)
    assert "\nmergegate verify acme/demo --key release.pub " in card
    assert "\nmodel_signing verify key . --signature model.sig --public_key release.pub " in card
    assert "\nmergegate reproduce acme/demo --parents DIR " in card
    assert "on cuda" in card
    unsigned = card_of(tmp_path)
    assert "--key" not in unsigned
    assert "model.sig" not in unsigned
    assert f"`{COMMIT}`" in unsigned


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"base_model": ["/home/me/models/base"]}, "is not an id on the Hub"),
        ({"base_model": ["a/b/c"]}, "is not an id on the Hub"),
        ({"license": "other"}, "without a license_name"),
        ({"license": "other", "license_name": "x", "license_link": "LICENCE.txt"}, "is not a file of the release"),
        ({"license": None}, "the license is missing"),
        ({"tags": ["merge", "merge"]}, "tags"),
        ({"model-index": [{"name": "x", "results": [{"task": {}}]}]}, "the metadata cannot be read"),
    ],
)
def test_a_card_that_reads_differently_than_intended_is_refused(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    metadata = {**card_metadata(content(SCORES), parents(tmp_path), license_verdict("mit").combination), **change}
    card = f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n# demo\n"
    with pytest.raises(Refused, match="nothing was uploaded") as refusal:
        check_card(card, metadata, ("LICENSE",))
    assert words in str(refusal.value)


def test_metadata_edited_after_it_was_made_is_refused(tmp_path: Path) -> None:
    card = card_of(tmp_path)
    metadata = card_metadata(content(SCORES), parents(tmp_path), license_verdict("apache-2.0", "mit").combination)
    with pytest.raises(Refused, match=r"reads license as 'mit' instead of 'apache-2.0'"):
        check_card(card.replace("license: apache-2.0", "license: mit"), metadata, ())


def test_a_whole_benchmark_is_read_by_the_hubs_library_as_it_was_measured() -> None:
    files = eval_results(
        content(
            (GSM8K, share("arc_easy", 300, 400)), scoring=Scoring(num_fewshot=5, chat_template=True, dtype="bfloat16")
        )
    )
    assert list(files) == [".eval_results/gsm8k.yaml"]
    (entry,) = huggingface_hub.parse_eval_result_entries(yaml.safe_load(files[".eval_results/gsm8k.yaml"]))
    assert (entry.dataset_id, entry.task_id, entry.value) == ("openai/gsm8k", "gsm8k", 53.07)
    for word in ("lm-eval 0.4.13", "5-shot", "with chat template", "bfloat16", "1319 documents", "standard error 1.37"):
        assert word in str(entry.notes)


@pytest.mark.parametrize("version", [None, "2.1"])
def test_on_the_hub_an_entry_names_its_dataset_revision_and_its_evidence(version: str | None) -> None:
    said = content((GSM8K,))
    target = HubTarget(to="hub", repo="acme/demo", version=version)
    (data,) = map(yaml.safe_load, eval_results(said, target.hub_id, target.version).values())
    (entry,) = huggingface_hub.parse_eval_result_entries(data)
    assert entry.dataset_revision == COMMIT
    assert entry.source_url == f"https://huggingface.co/acme/demo/tree/{version or 'main'}/evidence"
    assert entry.source_name
    # Only the Hub can verify an evaluation, and a release has no dates.
    assert (entry.verify_token, entry.date) == (None, None)
    assert data == huggingface_hub.eval_result_entries_to_yaml([entry])
    (elsewhere,) = eval_results(said).values()
    assert "source" not in yaml.safe_load(elsewhere)[0]


@pytest.mark.parametrize(
    "score",
    [
        share("gsm8k", 70, 132, "exact_match,flexible-extract"),
        share("gsm8k", 700, 1319, "exact_match,strict-match"),
        share("arc_easy", 300, 400),
    ],
    ids=["a sample", "another metric", "not registered"],
)
def test_incomparable_scores_are_not_written_for_a_leaderboard(score: TaskScore) -> None:
    assert eval_results(content((score,))) == eval_results(content()) == {}


OWN = DataSource(path="openai/gsm8k", name="main", revision=COMMIT)


@pytest.mark.parametrize(
    ("sources", "is_own"),
    [
        ([], False),  # local data
        ([OWN], True),
        ([OWN, OWN.model_copy(update={"name": "socratic"})], True),
        ([OWN, OWN.model_copy(update={"path": "me/gsm8k"})], False),
        ([OWN.model_copy(update={"path": "me/gsm8k"})], False),
        ([OWN.model_copy(update={"data_files": ("https://me.example/easy.jsonl",)})], False),
        *(([OWN, OWN.model_copy(update={"revision": name})], False) for name in ("", "main", "5" * 40)),
        *(([OWN.model_copy(update={"revision": name})], False) for name in ("", "main", f"{COMMIT}\n")),
    ],
)
def test_only_the_benchmarks_own_dataset_at_a_commit_counts_as_the_benchmark(
    sources: list[DataSource], is_own: bool, tmp_path: Path
) -> None:
    said = content((GSM8K,))
    (scores,) = {model.name: model.scores for model in said.models if model.role == "merge"}.values()
    assert scores
    scores.data["gsm8k"] = TaskData(digest="d" * 64, sources=tuple(sources))
    assert bool(eval_results(said)) == is_own
    (result,) = ModelCard(card_of(tmp_path, said)).data.eval_results
    assert result.dataset_type == ("openai/gsm8k" if is_own else "gsm8k")


def test_the_first_of_two_variants_of_a_benchmark_counts() -> None:
    variants = {"gpqa_diamond_cot_zeroshot": 60, "gpqa_diamond_cot_n_shot": 80}
    scores = [share(task, right, 198, "exact_match,flexible-extract") for task, right in variants.items()]
    (text,) = eval_results(content(scores)).values()
    assert yaml.safe_load(text)[0]["value"] == 30.3


def test_every_benchmark_is_an_id_and_a_metric_with_a_filter() -> None:
    for benchmark in BENCHMARKS.values():
        assert benchmark.dataset.count("/") == 1
        assert benchmark.metric.count(",") == 1
        assert benchmark.documents > 0

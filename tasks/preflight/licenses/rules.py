"""The rules of the licence algebra: which combinations are allowed, which a person must review, which are blocked.

Read `RULES` at the end first. Each rule is a pure function of the case. A rule may only say more, never less, when a
parent is added; that makes the verdict, the worst of all findings, monotone.

`private` means that the weights stay with who made them. Rules about passing weights on then do not apply: R3, the
sharing half of R1, and R5 (the name rules bind a model that is distributed) falls silent but for a note. Two rules step
down from blocked to review: a licence that forbids sharing adapted material (R1), because making it is permitted but
the weights can never leave; and share-alike licences that exclude each other (R6), because they bind at distribution,
yet some of them count use over a network as such, and no licence remains to be written into the card.
A licence that forbids adaptation itself stays blocked. The rules about use (R2, R4) apply in private as in public.

Whether a merge "improves another model" (R4), and whether blended weights are a derivative under copyleft (R6), no
court has said. The rules assume that they are: the release is held rather than made by mistake.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

from mergegate.tasks.preflight.licenses.case import (
    Case,
    Licensed,
    LicensedParent,
    LicenseFinding,
    LicenseStatus,
    Subject,
    listed,
)
from mergegate.tasks.preflight.licenses.table import License


@dataclass(frozen=True)
class LicenseRule:
    """One rule: its number and subject, how it judges, and what to do when it says no."""

    id: str
    subject: str
    judge: Callable[[Case], Iterator[LicenseFinding]]
    remedy: str


def _known(case: Case) -> Iterator[LicenseFinding]:
    """An unresolved or contradicted licence, and an entry that asks for a person, is reviewed."""
    for model in case.models:
        if not model.license.resolved:
            why = model.license.review or f"which text {model.license.id!r} stands for is not known"
            quoted = f" ({model.declared})" if model.declared else ""
            yield LicenseFinding("review", f"{model.name}: {why}{quoted}", (Subject(model=model.name, license=None),))
        if model.contradicted is not None:
            sentence = (
                f"{model.name} declares {model.license.id}, but the licence file beside it is the text of "
                f"{model.contradicted.id}: both are taken to bind"
            )
            yield LicenseFinding("review", sentence, (Subject(model=model.name, license=None),))
    for entry in case.resolved:
        if entry.review:
            yield LicenseFinding("review", f"{case.called(entry)}: {entry.review}", case.about(entry))


def _derivatives(case: Case) -> Iterator[LicenseFinding]:
    """The merge must be permitted, and in public also its distribution."""
    for entry in case.resolved:
        called = case.called(entry)
        if entry.derivatives == "forbidden":
            yield LicenseFinding("blocked", f"{called} does not permit modified or merged weights", case.about(entry))
        elif entry.derivatives == "private-only" and case.public:
            yield LicenseFinding(
                "blocked", f"{called} does not permit sharing modified or merged weights", case.about(entry)
            )
        elif entry.derivatives == "private-only":
            sentence = f"{called} permits merged weights only as long as they are never shared"
            yield LicenseFinding("review", sentence, case.about(entry))
        elif entry.sharing == "forbidden" and case.public:
            yield LicenseFinding("blocked", f"{called} does not permit passing the weights on", case.about(entry))


def _commercial(case: Case) -> Iterator[LicenseFinding]:
    """Commercial use is what the strictest parent leaves of it."""
    if case.use.purpose == "commercial":
        for entry in case.resolved:
            if entry.commercial == "forbidden":
                yield LicenseFinding("blocked", f"{case.called(entry)} forbids commercial use", case.about(entry))


def _company_distributes(case: Case) -> Iterator[LicenseFinding]:
    """Some research licences count any distribution by a company as commercial."""
    if case.public and case.use.commercial_entity:
        for entry in case.resolved:
            if entry.sharing == "noncommercial-only":
                sentence = f"{case.called(entry)} does not let a commercial entity distribute, even free of charge"
                yield LicenseFinding("blocked", sentence, case.about(entry))


def _improving_others(case: Case) -> Iterator[LicenseFinding]:
    """A ban on improving other models admits only models of the named families, or made from one of them."""
    for entry in case.resolved:
        if not entry.only_with:
            continue
        outsiders = sorted({_who(p) for p in case.parents if not _within(p, entry)})
        if outsiders:
            sentence = (
                f"{case.called(entry)} may not be used to improve models outside {listed(entry.only_with)}, "
                f"and here it meets {listed(outsiders)}"
            )
            yield LicenseFinding("blocked", sentence, case.about(entry))


def _who(model: Licensed) -> str:
    return model.name if model.name == model.license.id else f"{model.name} ({model.license.id})"


def _within(parent: LicensedParent, ban: License) -> bool:
    line: tuple[Licensed, ...] = (parent, *parent.ancestors)
    licenses = [entry for model in line for entry in model.licenses]
    return any(entry.id == ban.id or entry.family in ban.only_with for entry in licenses)


def _name(case: Case) -> Iterator[LicenseFinding]:
    """Name prefixes must contain each other, and the name of the merge must begin with the longest."""
    bearing = [entry for entry in case.resolved if entry.name_prefix]
    status: LicenseStatus = "blocked" if case.public else "allowed"
    later = "" if case.public else ", once the model is shared"
    for a, b in combinations(bearing, 2):
        if not _begins(a.name_prefix, b.name_prefix) and not _begins(b.name_prefix, a.name_prefix):
            sentence = (
                f"the name would have to begin with {a.name_prefix!r} for {case.called(a)} and with "
                f"{b.name_prefix!r} for {case.called(b)}{later}"
            )
            yield LicenseFinding(status, sentence, case.about(a, b))
    name = case.use.name.rsplit("/", 1)[-1]
    for entry in bearing:
        if not _begins(name, entry.name_prefix):
            sentence = (
                f"the name {name!r} does not begin with {entry.name_prefix!r}, as {case.called(entry)} asks{later}"
            )
            yield LicenseFinding(status, sentence, case.about(entry))


def _begins(name: str | None, prefix: str | None) -> bool:
    """Whether `name` begins with `prefix`, whatever the case and the hyphens ("Llama 3" begins "llama-3.1-mix")."""
    return _letters(name).startswith(_letters(prefix))


def _letters(name: str | None) -> str:
    return re.sub(r"[^a-z0-9.]", "", (name or "").lower())


def _share_alike(case: Case) -> Iterator[LicenseFinding]:
    """Some licence must satisfy every share-alike parent, and none of them tolerates further restrictions."""
    strong = _strong(case)
    if not strong or share_alike_licenses(case):
        return
    further = _further(case)
    clashing = [entry for entry in case.resolved if entry.kind == "noncommercial" or entry.never_under]
    calls = _called(case, strong)
    if further:
        sentence = f"{calls}: share-alike forbids the further restrictions of {_called(case, further)}"
    elif not _common(strong):
        sentence = f"{calls}: no licence satisfies all of these share-alike licences"
    else:
        sentence = f"{calls}: no licence satisfies both share-alike and {_called(case, clashing)}"
    # All that stand in the way are named, so that adding a parent never makes an old acceptance suffice.
    involved = {entry.id: entry for entry in (*strong, *further, *clashing)}
    yield LicenseFinding("blocked" if case.public else "review", sentence, case.about(*involved.values()))


def share_alike_licenses(case: Case) -> tuple[str, ...]:
    """The licences that the merge may carry under its share-alike parents, in table order.

    Empty when there is no such licence, or no share-alike parent.
    """
    strong = _strong(case)
    if not strong or _further(case):
        return ()
    noncommercial = any(entry.kind == "noncommercial" for entry in case.resolved)
    never = {outer for entry in case.resolved for outer in entry.never_under}
    return tuple(
        key
        for key, outer in case.table.licenses.items()
        if key in _common(strong) - never and (not noncommercial or outer.commercial == "forbidden")
    )


def _further(case: Case) -> list[License]:
    """What share-alike cannot hold: restrictions of its own kind are in `outer`, all others are further ones."""
    return [entry for entry in case.resolved if entry.restrictive or entry.kind == "no-derivatives"]


def _strong(case: Case) -> list[License]:
    return [entry for entry in case.resolved if entry.kind == "copyleft"]


def _common(strong: list[License]) -> set[str]:
    return set.intersection(*({entry.id, *entry.outer} for entry in strong))


def _called(case: Case, licenses: list[License]) -> str:
    return listed(case.called(entry) for entry in licenses)


def _territory(case: Case) -> Iterator[LicenseFinding]:
    """A licence that grants nothing somewhere, or to someone, is reviewed."""
    for entry in case.resolved:
        if entry.territory:
            yield LicenseFinding("review", f"{case.called(entry)} is limited: {entry.territory}", case.about(entry))


def _ancestry(case: Case) -> Iterator[LicenseFinding]:
    """A parent cannot grant more than what it was made from: dropped restrictions are reviewed.

    So is an ancestor that could not be read. Like one that declares nothing (R0), it may forbid what its descendant's
    card permits, and a gate that opens when the Hub does not answer is none.
    """
    for parent in case.parents:
        for ancestor in parent.ancestors:
            for license in ancestor.licenses:
                dropped = weaker(parent.license, license)
                if dropped:
                    sentence = (
                        f"{parent.name} declares {parent.license.id}, but was made from {ancestor.name} under "
                        f"{license.id}, which it drops: {listed(dropped)}"
                    )
                    yield LicenseFinding("review", sentence, (Subject(model=parent.name, license=None),))
        for unread in parent.unread:
            why = f" ({unread.why})" if unread.why else ""
            sentence = f"{parent.name} was made from {unread.name}, whose licence could not be read{why}"
            yield LicenseFinding("review", sentence, (Subject(model=unread.name, license=None),))


def weaker(declared: License, ancestor: License) -> tuple[str, ...]:
    """The restrictions of the ancestor's licence that the declared one drops, in words; none for an unknown licence."""
    if not declared.resolved or not ancestor.resolved or declared.id == ancestor.id:
        return ()
    permission = {"allowed": 0, "capped": 1, "private-only": 1, "noncommercial-only": 1, "forbidden": 2}
    share_alike = ancestor.kind == "copyleft" and declared.id not in ancestor.outer
    prefix = ancestor.name_prefix is not None and not _begins(declared.name_prefix, ancestor.name_prefix)
    drops = {
        "its limits on derivatives": permission[ancestor.derivatives] > permission[declared.derivatives],
        "its limits on sharing": permission[ancestor.sharing] > permission[declared.sharing],
        "its limits on commercial use": permission[ancestor.commercial] > permission[declared.commercial],
        "its use restrictions": ancestor.use_policy not in (None, declared.use_policy),
        "its ban on improving other models": bool(ancestor.only_with) and not declared.only_with,
        "its territory limits": ancestor.territory not in (None, declared.territory),
        "its share-alike": share_alike,
        "its rule for names": prefix,
    }
    return tuple(words for words, dropped in drops.items() if dropped)


_CHOOSE = "leave that parent out"
RULES: tuple[LicenseRule, ...] = (
    LicenseRule("R0", "every licence is known", _known, "read the licence"),
    LicenseRule("R1", "merging and sharing are permitted", _derivatives, _CHOOSE),
    LicenseRule("R2", "commercial use", _commercial, f"{_CHOOSE}, or set `purpose: research` if that is the purpose"),
    LicenseRule("R3", "distribution by a company", _company_distributes, f"{_CHOOSE}, or keep the model private"),
    LicenseRule(
        "R4", "ban on improving other models", _improving_others, f"{_CHOOSE}, or merge within its family only"
    ),
    LicenseRule("R5", "name of the merged model", _name, "rename the merged model"),
    LicenseRule("R6", "share-alike", _share_alike, _CHOOSE),
    # R7 to R9 cannot refuse: the licence that results, use policies passed on, all obligations: resulting_license.py.
    LicenseRule("R10", "territory", _territory, "check that the limit does not concern this model and its users"),
    LicenseRule(
        "R11", "no weaker than its ancestors", _ancestry, "compare with the licence of its ancestor, or ask its authors"
    ),
)

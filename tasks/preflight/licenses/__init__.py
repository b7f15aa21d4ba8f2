"""Licenses: the permissions and obligations of each parent, and their consequences for the merged weights."""

from mergegate.tasks.preflight.licenses.algebra import Combination
from mergegate.tasks.preflight.licenses.ancestors import AncestorLookup, hub_ancestors
from mergegate.tasks.preflight.licenses.check import (
    LicenseVerdict,
    check_licenses,
    compare_weights,
    license_table,
    read_licenses,
)
from mergegate.tasks.preflight.licenses.fingerprint_index import (
    INDEX_FILE,
    LONGEST_NAME,
    IndexedAncestor,
    IndexedModel,
    add_to_index,
    fingerprint_model,
    read_index,
)
from mergegate.tasks.preflight.licenses.resolve import LICENSE_FILE, CardSource, quote_text, read_declaration
from mergegate.tasks.preflight.licenses.resulting_license import Obligation, ObligationKind
from mergegate.tasks.preflight.licenses.settings import LicenseSettings
from mergegate.tasks.preflight.licenses.table import LicenseTable, load_table
from mergegate.tasks.preflight.licenses.texts import identify_license, license_texts
from mergegate.tasks.preflight.licenses.weight_relations import KnownModels, UndeclaredRelation, read_known_models

__all__ = [
    "INDEX_FILE",
    "LICENSE_FILE",
    "LONGEST_NAME",
    "AncestorLookup",
    "CardSource",
    "Combination",
    "IndexedAncestor",
    "IndexedModel",
    "KnownModels",
    "LicenseSettings",
    "LicenseTable",
    "LicenseVerdict",
    "Obligation",
    "ObligationKind",
    "UndeclaredRelation",
    "add_to_index",
    "check_licenses",
    "compare_weights",
    "fingerprint_model",
    "hub_ancestors",
    "identify_license",
    "license_table",
    "license_texts",
    "load_table",
    "quote_text",
    "read_declaration",
    "read_index",
    "read_known_models",
    "read_licenses",
]

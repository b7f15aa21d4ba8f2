"""Licences: what each parent's licence allows and obliges, and what follows for the merged weights."""

from mergegate.tasks.preflight.licenses.algebra import Combination
from mergegate.tasks.preflight.licenses.ancestors import AncestorLookup, hub_ancestors
from mergegate.tasks.preflight.licenses.check import LicenseVerdict, check_licenses, license_table, read_licenses
from mergegate.tasks.preflight.licenses.resolve import LICENSE_FILE, CardSource, declared, quoted
from mergegate.tasks.preflight.licenses.resulting_license import Obligation, ObligationKind
from mergegate.tasks.preflight.licenses.table import LicenseTable, load_table
from mergegate.tasks.preflight.licenses.texts import license_texts, recognised
from mergegate.tasks.preflight.licenses.use import LicenseSettings

__all__ = [
    "LICENSE_FILE",
    "AncestorLookup",
    "CardSource",
    "Combination",
    "LicenseSettings",
    "LicenseTable",
    "LicenseVerdict",
    "Obligation",
    "ObligationKind",
    "check_licenses",
    "declared",
    "hub_ancestors",
    "license_table",
    "license_texts",
    "load_table",
    "quoted",
    "read_licenses",
    "recognised",
]

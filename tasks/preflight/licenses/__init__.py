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
from mergegate.tasks.preflight.licenses.resulting_license import Obligation
from mergegate.tasks.preflight.licenses.settings import LicenseSettings
from mergegate.tasks.preflight.licenses.table import LicenseTable, load_table
from mergegate.tasks.preflight.licenses.texts import identify_license, license_texts
from mergegate.tasks.preflight.licenses.weight_relations import KnownModels, read_known_models

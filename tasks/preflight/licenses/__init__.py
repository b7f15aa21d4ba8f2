"""Licenses: the permissions and obligations of each parent, and their consequences for the merged weights."""

from mergegate.tasks.preflight.licenses.check import (
    LicenseVerdict,
    check_licenses,
    compare_weights,
    license_table,
    read_licenses,
)
from mergegate.tasks.preflight.licenses.combination import Combination, Obligation
from mergegate.tasks.preflight.licenses.resolve import (
    LICENSE_FILE,
    AncestorLookup,
    CardSource,
    hub_ancestors,
    quote_text,
    read_declaration,
)
from mergegate.tasks.preflight.licenses.table import LicenseTable, identify_license, license_texts, load_table
from mergegate.tasks.preflight.licenses.weight_relations import (
    INDEX_FILE,
    LONGEST_NAME,
    IndexedAncestor,
    IndexedModel,
    KnownModels,
    add_to_index,
    fingerprint_model,
    read_index,
    read_known_models,
)
from mergegate.tasks.preflight.settings import LicenseSettings

"""Load profiles: their typed settings, the recipes that they name, and the messages about their faults."""

from mergegate.flows.profile.faults import parse_settings
from mergegate.flows.profile.profile import (
    Profile,
    is_recipe,
    is_release_name,
    load_profile,
    override_profile,
    parse_profile,
    profile_name,
    profile_schema,
)
from mergegate.flows.profile.schema import RemedyChoice

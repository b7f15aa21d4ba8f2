"""Write the card and license files for the optimizer state that is stored for the next merge.

The license check of the next merge finds them where it finds those of any other parent.
"""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from mergegate.tasks.checkpoints import PinnedCheckpoint
from mergegate.tasks.preflight.licenses import LicenseVerdict
from mergegate.tasks.publish.content import CARD
from mergegate.tasks.publish.license_files import license_files

_TEXT = """# No model

What the optimizer of a server keeps from one round of clients to the next, in the shape of their model. It was made of
them, so it is under the licence of what was released with it.
"""


def state_license_files(parents: Sequence[PinnedCheckpoint], license: LicenseVerdict) -> tuple[tuple[str, str], ...]:
    """Return name and text of each file. The result is deterministic.

    Args:
        license: License verdict of the release that the state belongs to.
    """
    front = yaml.safe_dump(dict(license.combination.card), sort_keys=False, allow_unicode=True)
    texts = ((file.name, file.read().decode()) for file in license_files(parents, license))
    return ((CARD, f"---\n{front}---\n\n{_TEXT}"), *texts)

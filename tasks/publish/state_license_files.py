"""What lies beside that which an optimizer keeps for the next merge: card and licences, as beside any model.

So whoever checks the licences of the next merge finds them where they are of every parent.
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
    """Name and text of each file; the same inputs give the same.

    Args:
        license: Of the release that it belongs to.
    """
    front = yaml.safe_dump(dict(license.combination.card), sort_keys=False, allow_unicode=True)
    texts = ((file.name, file.read().decode()) for file in license_files(parents, license))
    return ((CARD, f"---\n{front}---\n\n{_TEXT}"), *texts)

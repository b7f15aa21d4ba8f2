"""Write all files of an export.

A release contains no dates, and both formats require one. An export is therefore not part of a release. Anyone can
create it from the release, and it states the time of the export.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from enum import Enum
from typing import Any

from mergegate.tasks.publish.exchange.every_eval_ever import evaluation_records
from mergegate.tasks.publish.exchange.inspect_log import inspect_logs
from mergegate.tasks.publish.exchange.release_results import ExportedRelease


class ExportFormat(Enum):
    """Format of another tool."""

    INSPECT = "inspect"
    EVERY_EVAL_EVER = "every-eval-ever"


def exported_files(
    release: ExportedRelease, format: ExportFormat, export_time: datetime
) -> Iterator[tuple[str, bytes]]:
    """Yield relative path and content of each file of an export.

    Args:
        release: Results of the release.
        format: Format of the files.
        export_time: Time of the export, in UTC. The files of both formats state it.
    """
    if format is ExportFormat.INSPECT:
        for path, log in inspect_logs(release, export_time):
            yield path, _json(log)
        return
    for record in evaluation_records(release, export_time):
        yield record.path, _json(record.content)
        if record.rows_path:
            yield record.rows_path, record.rows


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()

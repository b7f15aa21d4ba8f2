"""Write all files of an export.

A release contains no dates, and both formats require one. An export is therefore not part of a release. Anyone can
create it from the release, and it states the time of the export.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from mergegate.tasks.publish.exchange.every_eval_ever import evaluation_records
from mergegate.tasks.publish.exchange.inspect_log import inspect_logs
from mergegate.tasks.publish.exchange.release_results import ExportedRelease

EXPORT_FORMATS = ("inspect", "every-eval-ever")


def exported_files(release: ExportedRelease, format: str, export_time: datetime) -> Iterator[tuple[str, bytes]]:
    """Yield relative path and content of each file of an export.

    Args:
        release: Results of the release.
        format: One of ``EXPORT_FORMATS``.
        export_time: Time of the export, in UTC. The files of both formats state it.
    """
    if format == "inspect":
        for path, log in inspect_logs(release, export_time):
            yield path, _json(log)
        return
    for record in evaluation_records(release, export_time):
        yield record.path, _json(record.content)
        if record.rows_path:
            yield record.rows_path, record.rows


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()

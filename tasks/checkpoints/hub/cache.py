"""Where the Hub's own cache keeps what has come of a repository."""

from __future__ import annotations

from pathlib import Path


def snapshots_directory(repo: str) -> Path:
    """Where each commit of ``org/name`` has a directory of its own; nothing need be there."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model") / "snapshots"

"""Releases that are out there: found, verified against what they say, rebuilt, and held as the champion."""

from tasks.releases.champion import find_champion
from tasks.releases.published_release import PublishedRelease, find_release, is_directory
from tasks.releases.reproduce import rebuild_release
from tasks.releases.verify import Verified, check_release

__all__ = [
    "PublishedRelease",
    "Verified",
    "check_release",
    "find_champion",
    "find_release",
    "is_directory",
    "rebuild_release",
]

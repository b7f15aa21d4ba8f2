"""A release that is watched, as ``flows/shadow.py`` tells it: what is known of it, what a look judges, what follows."""

from mergegate.flows.watching.following import Followed, ended, followed, promoted, told_once
from mergegate.flows.watching.judging import judge_new, survey
from mergegate.flows.watching.watch import Watch, open_watch, shadow_settings

__all__ = [
    "Followed",
    "Watch",
    "ended",
    "followed",
    "judge_new",
    "open_watch",
    "promoted",
    "shadow_settings",
    "survey",
    "told_once",
]

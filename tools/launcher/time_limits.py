"""The option --time: a time limit as SLURM writes it, for all stages and for single ones."""

import re
import sys
from collections.abc import Collection

from pretrain.common.errors import UserError
from tools.stages import SUMMARIES

_DEFAULT_MINUTES = 240
UNLIMITED = sys.maxsize  # minutes
_UNITS = {"days": 1440, "hours": 60, "minutes": 1, "seconds": 1 / 60}
# SLURM's forms of a time.
_TIMES = (
    r"(?P<minutes>\d+)(:(?P<seconds>\d+))?",
    r"(?P<hours>\d+):(?P<minutes>\d+):(?P<seconds>\d+)",
    r"(?P<days>\d+)-(?P<hours>\d+)(:(?P<minutes>\d+)(:(?P<seconds>\d+))?)?",
)


def parse_minutes(text: str, source: str = "--time") -> int:
    """Return a time limit in whole minutes, rounded up as SLURM does; 0 is its word for no limit."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return UNLIMITED
    match = next(filter(None, (re.fullmatch(form, text.strip()) for form in _TIMES)), None)
    if not match:
        forms = "minutes, M:SS, H:MM:SS, D-H, D-H:MM, D-H:MM:SS or UNLIMITED"
        raise UserError(f"{source} {text!r} is not a time; write {forms}")
    seconds = sum(int(digits) * round(60 * _UNITS[unit]) for unit, digits in match.groupdict("0").items())
    return -(-seconds // 60) or UNLIMITED


def format_minutes(minutes: int) -> str:
    """Return a time limit as sbatch takes it."""
    return "UNLIMITED" if minutes == UNLIMITED else str(minutes)


def parse_times(text: str) -> dict[str, int]:
    """Return the minutes of ``24:00:00,linear=8:00:00`` by stage; those of all others have an empty name."""
    times: dict[str, int] = {}
    for part in _split_times(text):
        stage, has_name, time = part.rpartition("=")
        if has_name and stage not in SUMMARIES:
            raise UserError(f"--time {part} names no stage; choose from {', '.join(SUMMARIES)}")
        if stage in times:
            raise UserError(f"--time {text} has two limits for {stage or 'all stages'}; give one")
        times[stage] = parse_minutes(time)
    return {"": _DEFAULT_MINUTES, **times}


def _split_times(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")] if text else []


def merge_times(earlier: str, time: str) -> str:
    """Return the limits of ``time``; if it has none for all stages, those of the others stay."""
    named = {part.rpartition("=")[0] for part in _split_times(time)}
    parts = [part for part in _split_times(earlier) if part.rpartition("=")[0] not in named]
    return time if "" in named else ",".join([*parts, time])


def check_time(time: str, stages: Collection[str]) -> None:
    """Raise UserError if ``time``, the command line's --time, has a limit of a stage that is none of ``stages``."""
    for stage in parse_times(time):
        if stage and stage not in stages:
            problem = f"--time limits {stage}, which is not part of this command ({', '.join(stages)})"
            raise UserError(f"{problem}; remove {stage}=")

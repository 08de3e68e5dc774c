"""Time limits: SLURM's forms of a time, and what is none."""

import re

import pytest

from tests.errors import refused
from tools.launcher import time_limits

TIMES = [
    ("90", 90),
    ("90:00", 90),
    ("1:30:00", 90),
    ("1-12", 2160),
    ("1-12:00", 2160),
    ("1-12:00:00", 2160),
    ("2:30", 3),
    ("0:00:01", 1),
    ("UNLIMITED", time_limits.UNLIMITED),
    ("infinite", time_limits.UNLIMITED),
    ("0", time_limits.UNLIMITED),
]
REFUSED_TIMES = ["", "4h", "1:2:3:4", "-5", "1-", "1.5", "1-2:3:4:5"]


def test_no_row_is_lost():
    """A row guards a repair: remove one only together with what it is about."""
    assert (len(TIMES), len(REFUSED_TIMES)) == (11, 7)


@pytest.mark.parametrize(("text", "minutes"), TIMES)
def test_times_are_slurms(text: str, minutes: int):
    assert time_limits.parse_minutes(text) == minutes
    assert time_limits.parse_minutes(time_limits.format_minutes(minutes)) == minutes


def test_blanks_may_follow_the_commas_of_several_limits():
    assert time_limits.parse_times("24:00:00, linear=8:00:00") == {"": 1440, "linear": 480}
    assert time_limits.merge_times("60, linear=30", "20 , knn=5") == "20 , knn=5"
    assert time_limits.merge_times("60, linear=30", " linear=5") == "60, linear=5"


@pytest.mark.parametrize("text", REFUSED_TIMES)
def test_other_times_are_refused(text: str):
    assert re.match(f"--time {text!r} is not a time; write ", refused(lambda: time_limits.parse_minutes(text)))

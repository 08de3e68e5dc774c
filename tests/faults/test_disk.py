"""If a disk is full, over its quota, read-only or broken, a run ends in one line and the next one resumes it."""

import errno
import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.commands import Commands
from tests.faults.injection import Fault
from tests.faults.stages import STAGES, content, left_over, newest

_ERRORS = {
    "full": ("write", errno.ENOSPC),
    "quota": ("write", errno.EDQUOT),
    "broken": ("fsync", errno.EIO),
    "read-only": ("open", errno.EROFS),
    "all read-only": ("", errno.EROFS),
    "rename": ("rename", errno.ENOSPC),
    "unlink": ("unlink", errno.EIO),
}
_ORDINARY = {("pretrain", "full"), ("torchvision", "read-only"), ("convert", "broken")}
_WITHOUT = {("data", "broken")}  # the stage does not call it


def cases() -> Iterator[Any]:
    for name, kind in sorted({*itertools.product(STAGES, _ERRORS)} - _WITHOUT):
        marks = [pytest.mark.slow] * ((name, kind) not in _ORDINARY)
        yield pytest.param(name, kind, marks=[*marks, pytest.mark.detectron2] if name == "detectron2" else marks)


@pytest.mark.parametrize(("name", "kind"), list(cases()))
def test_a_disk_that_fails_is_named_and_loses_nothing(
    commands: Commands, data: Path, whole: Any, tmp_path: Path, name: str, kind: str
) -> None:
    """Faults early, in the middle and after resuming never lose the newest checkpoint."""
    stage = STAGES[name]
    call, number = _ERRORS[kind]
    calls, expected = whole(name, call)
    assert calls
    words = (stage.module, *stage.arguments(tmp_path, data))
    newest_step = 0
    times_met = 0
    where = ""
    for share in (0.0, 0.5, 0.0, 0.3):
        at = int(share * calls) + random.Random(f"{name} {kind}").randrange(max(1, calls // 10)) + 1
        ended = commands.run(*words, under=tmp_path, fault=Fault("fail from", at, call, value=number))
        where += f"\n{call} {at} of {calls}: {ended.text}"
        step, says = newest(tmp_path)
        assert step >= newest_step, where
        newest_step = step
        times_met += ended.report.calls >= at
        if ended.status == 0:  # it made fewer calls, or only failed to release its folder
            again = content(tmp_path)
            assert ended.report.calls < at or call in ("unlink", ""), where
            assert [key for key in expected if again.get(key) != expected[key]] == [], where
            continue
        shown = ended.text.partition("Exception in thread")[0]  # TensorBoard's thread prints its own error next to ours
        assert ended.status == 2 and "Traceback" not in shown, where
        named = re.findall("error: (?:cannot write ([^/:][^:]*): )?", ended.text)
        assert len(named) == 1 and named[0], where
    assert times_met, where
    ended = commands.run(*words, under=tmp_path)
    assert ended.status == 0 and says in ended.text, f"{where}\nthen: {ended.text}"
    again = content(tmp_path)
    # Making data and reports locks no folder, so the next run removes no leftover files.
    if name not in ("data", "report") or kind not in ("unlink", "all read-only"):
        assert not left_over(tmp_path), where
    else:
        again = {key: value for key, value in again.items() if key not in left_over(tmp_path)}
    assert [key for key in {**again, **expected} if again.get(key) != expected.get(key)] == [], where

"""A disk that is full, over its quota, read-only or broken: one line, nothing lost, and the next start goes on."""

from __future__ import annotations

import errno
import random
from pathlib import Path
from typing import Any

import pytest

from tests.faults.commands import Commands, Fault
from tests.faults.stages import STAGES, content, left_over

_ERRORS = {"full": ("write", errno.ENOSPC), "quota": ("write", errno.EDQUOT), "broken": ("fsync", errno.EIO),
           "read-only": ("open", errno.EROFS)}  # fmt: skip
_ORDINARY = {("pretrain", "full"), ("torchvision", "read-only"), ("convert", "broken")}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[pytest.mark.slow] * ((name, kind) not in _ORDINARY)
                     + [pytest.mark.detectron2] * (name == "detectron2"))
        for name in STAGES
        for kind in _ERRORS
    ],
)  # fmt: skip
def test_a_disk_that_fails_is_named_and_loses_nothing(
    commands: Commands, data: Path, whole: Any, tmp_path: Path, name: str, kind: str
) -> None:
    stage, (call, number) = STAGES[name], _ERRORS[kind]
    calls, expected = whole(name, call)
    for share in (0.0, 0.5, 0.9):
        work = tmp_path / str(share)
        work.mkdir()
        at = int(share * calls) + random.Random(f"{name} {kind}").randrange(max(1, calls // 10)) + 1
        fault = Fault("fail from", at, call, value=number)
        ended = commands.run(stage.module, *stage.arguments(work, data), under=work, fault=fault)
        where = f"{call} {at} of {calls}: {ended.text}"
        if ended.calls >= at:
            assert ended.status == 2, where
            shown = ended.text.partition("Exception in thread")[0]  # TensorBoard's prints its own, beside ours
            assert "error: cannot write " in ended.text and "Traceback" not in shown, where
        ended = commands.run(stage.module, *stage.arguments(work, data), under=work)
        assert ended.status == 0, f"{where}\nthen: {ended.text}"
        assert not left_over(work), where
        again = content(work)
        assert [key for key in {**again, **expected} if again.get(key) != expected.get(key)] == [], where

"""A file server that is slow, lists a folder as it was, or has lost a file that it lists (as NFS does)."""

from __future__ import annotations

import errno
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults.commands import Commands, Fault
from tests.faults.stages import STAGES, content

_CHECKPOINTS = {"pretrain": "checkpoint_*.pth", "linear": "checkpoint_*.pth", "torchvision": "model_*.pth",
                "detectron2": "model_*.pth"}  # fmt: skip
_CASES = [
    pytest.param(name, kind, marks=[pytest.mark.slow] * ((name, kind) != ("pretrain", "listed late"))
                 + [pytest.mark.detectron2] * (name == "detectron2"))
    for name in _CHECKPOINTS
    for kind in ("listed late", "all listed late", "lost")
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), _CASES)
def test_a_stale_listing_costs_steps_and_nothing_else(
    commands: Commands, data: Path, whole: Any, tmp_path: Path, name: str, kind: str
) -> None:
    """Another machine goes on, and does not see the newest checkpoint, or any; or the newest one it sees is gone."""
    calls, expected = whole(name)
    stage = STAGES[name]
    words = stage.module, *stage.arguments(tmp_path, data)
    commands.run(*words, under=tmp_path, fault=Fault("signal", int(0.8 * calls), value=signal.SIGKILL))
    found = sorted((tmp_path / "run").glob(_CHECKPOINTS[name]))
    assert found
    part = _CHECKPOINTS[name].partition("*")[0] if kind == "all listed late" else found[-1].name
    fault = Fault("fail", 1, "read", part, errno.ESTALE) if kind == "lost" else Fault("hide", part=part)
    ended = commands.run(*words, under=tmp_path, fault=fault)
    assert "Traceback" not in ended.text, ended.text
    if ended.status:
        assert kind == "lost" and ended.status == 2 and "Stale file handle" in ended.text.splitlines()[-1], ended.text
        ended = commands.run(*words, under=tmp_path)
    assert ended.status == 0, ended.text
    again = content(tmp_path)
    unseen = {key for key in again.keys() - expected.keys() if Path(key).match(_CHECKPOINTS[name])}  # so not removed
    assert again.keys() - unseen == expected.keys()
    assert [key for key in expected if again[key] != expected[key]] == []

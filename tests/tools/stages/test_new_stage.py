"""A stage that this file alone defines is launched, stopped, resumed, shown and reported."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

from pretrain.common.files import write_json
from pretrain.common.interrupt import Stopped
from pretrain.common.run.folder import write_environment
from pretrain.common.run.state import RunContext
from tests.errors import refused
from tests.tools.reporting.runs import column, render
from tools import ROOT, launch
from tools.reporting.files import Run
from tools.reporting.origins import Origin
from tools.reporting.runs import BackboneScore, Score
from tools.stages.base import Stage
from tools.stages.options import option
from tools.stages.registry import register


class Count(Stage):
    """A stage that counts, and stops once after three steps."""

    name = "count"
    probe = "counting"
    metrics = ("steps",)
    has_config = False

    @dataclass(frozen=True)
    class Options:
        steps: int = option("count to this number", type=int, is_positional=True)
        folder: str = option("run folder (default: counted)", "counted")
        loudly: bool = option("print each number", False)

    @classmethod
    def load(cls, options: Options, overrides: Sequence[str] = ()) -> Self:
        return cls(str(Path(options.folder).absolute()), options)

    @property
    def arguments(self) -> list[Any]:
        return [self.name, self.options.steps]

    def run(self, context: RunContext) -> None:
        write_environment(self.folder)
        log = Path(self.folder, "steps.txt")
        first = len(log.read_text().split()) if log.exists() else 0
        for step in range(first, self.options.steps):
            with log.open("a") as file:
                file.write(f"{step}\n")
            if step == 2:
                raise Stopped("asked to stop at step 2")
        write_json(Path(self.folder, "results.json"), {"stage": self.name, "steps": self.options.steps})

    @classmethod
    def read_scores(cls, run: Run) -> list[Score]:
        steps = float(run.results["steps"])
        return [BackboneScore(run.folder, cls.name, Origin("by one"), "numbers", {"steps": steps}, {"start": 0})]


register(Count, "count to a number")
HERE = ("--cluster", "local", "--gpus", "0", "--import", __name__)


def test_a_new_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["count", "5", "--loudly", *HERE, "--dry-run"]) == 0
    assert "to run   count  -> counted" in capsys.readouterr().out
    assert launch.main(["count", "5", *HERE]) == 1
    assert "asked to stop at step 2" in capsys.readouterr().err
    assert launch.main(["status", "counted"]) == 0
    assert "count  stopped" in capsys.readouterr().out
    refused(lambda: launch.main(["count", "6", *HERE, "--folder", "counted/", "--nodes", "2"]), "--nodes 2")
    assert launch.main(["resume", "counted", "--import", __name__]) == 0
    assert Path("counted/steps.txt").read_text().split() == list("01234")
    assert launch.main(["status", "counted"]) == 0
    assert "count  complete" in capsys.readouterr().out
    assert launch.main(["count", "5", "--loudly", *HERE]) == 0  # which does not change the work
    assert "counted is already complete" in capsys.readouterr().out
    refused(lambda: launch.main(["count", "6", *HERE]), "a different run (arguments ['count', 5] -> ['count', 6])")
    text = render([Path("counted")])
    assert column(text, "counted", "counting steps") == "5.0"


def test_a_stage_of_a_module_is_a_command(tmp_path: Path) -> None:
    """The module is imported before the command's options are known."""
    code = """
        from tools.stages.base import Stage
        from tools.stages.registry import register

        class Weigh(Stage):
            name = "weigh"
            has_config = False

        register(Weigh, "weigh the weights")
    """
    (tmp_path / "weigh.py").write_text(textwrap.dedent(code))
    command = [sys.executable, "tools/launch.py", "weigh", "--import", str(tmp_path / "weigh.py"), "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "weigh the weights" in done.stdout
    done = subprocess.run(command[:3], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "launch.py has no command 'weigh'" in done.stderr

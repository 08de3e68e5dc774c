"""How a command line ends: its exit status and its last line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.common.errors import UserError, run_command_line
from pretrain.common.interrupt import Stopped

PROGRAM = r"""
import os
from pretrain.common.errors import UserError, run_command_line

def main(argv):
    print("reading", os.fsdecode(b"odd\xff"), "caf\u00e9")
    raise UserError("no file at " + os.fsdecode(b"odd\xff"))

run_command_line(main)
"""


def test_what_cannot_be_encoded_is_escaped() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert (done.stdout, done.stderr) == ("reading odd\\udcff caf\\xe9\n", "error: no file at odd\\udcff\n")


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("a\nb"), 2, "error: a b"),
        (Stopped("SIGINT"), 130, "stopped by SIGINT (Ctrl-C); run the same command again"),
        (PermissionError(13, "Permission denied", "runs/a"), 2, "error: no access to runs/a; ask its owner, or choose"),
        (KeyboardInterrupt(), 130, "interrupted by SIGINT (Ctrl-C)"),
    ],
)
def test_the_last_line(error: BaseException, status: int, line: str, capsys: pytest.CaptureFixture) -> None:
    def main(_: object) -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_command_line(main)
    assert ended.value.code == status and capsys.readouterr().err.startswith(line)

"""How a command line ends: its exit status and its last line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os
from pretrain.common.errors import UserError, run_command_line
from pretrain.common.interrupt import Stopped

def main(argv):
    print("reading", os.fsdecode(b"odd\\xff"), "caf\\u00e9")
    {ending}

run_command_line(main)
"""


def ends(ending: str, **environment: str) -> tuple[int, str, str]:
    code = PROGRAM.format(ending=ending)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | environment, capture_output=True, timeout=60
    )
    assert b"Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.decode().strip(), done.stderr.decode().strip()


def test_what_cannot_be_encoded_is_escaped() -> None:
    done = ends(r"raise UserError('no file at ' + os.fsdecode(b'odd\xff'))", PYTHONIOENCODING="ascii")
    assert done == (2, r"reading odd\udcff caf\xe9", r"error: no file at odd\udcff")


@pytest.mark.parametrize(
    "ending, status, line",
    [
        ("raise UserError('a\\nb')", 2, "error: a b"),
        ("raise Stopped('SIGINT')", 130, "stopped by SIGINT (Ctrl-C); run the same command again"),
        ("raise Stopped('SIGTERM', 'use --resume')", 130, "stopped by SIGTERM; use --resume"),
        ("raise PermissionError(13, 'Permission denied', 'runs/a')", 2,
         "error: no access to runs/a; ask its owner, or choose another folder"),
        ("raise KeyboardInterrupt", 130, "interrupted by SIGINT (Ctrl-C)"),
    ],
)  # fmt: skip
def test_the_last_line(ending: str, status: int, line: str) -> None:
    assert ends(ending)[::2] == (status, line)

"""How a command line ends: its exit status and its last line."""

import io
import os
import sys

import pytest

from pretrain.common.command_line import run_command_line
from pretrain.common.errors import UserError, count_noun
from pretrain.common.interrupt import Stopped


def test_what_cannot_be_encoded_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(_: object) -> None:
        print("reading", os.fsdecode(b"odd\xff"), "caf\u00e9")
        raise UserError("no file at " + os.fsdecode(b"odd\xff"))

    streams = {name: io.TextIOWrapper(io.BytesIO(), "ascii") for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    with pytest.raises(SystemExit):
        run_command_line(main)
    shown = {name: bytes(stream.detach().getbuffer()) for name, stream in streams.items()}
    assert shown == {"stdout": b"reading odd\\udcff caf\\xe9\n", "stderr": b"error: no file at odd\\udcff\n"}


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


@pytest.mark.parametrize(("number", "text"), [(0, "0 classes"), (1, "1 class"), (1200, "1,200 classes")])
def test_one_is_singular(number: int, text: str):
    assert count_noun(number, "class", "classes") == text


def test_closed_streams_end_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell's ``>&-`` leaves None."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)

    def main(_: object) -> int:
        return 2 + sys.stdout.write("b")

    with pytest.raises(SystemExit) as ended:
        run_command_line(main)
    assert ended.value.code == 3

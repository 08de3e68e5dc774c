"""How a command line ends: its exit status and its last line."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.common.command_line import run_command_line
from pretrain.common.errors import UserError, count_noun
from pretrain.common.interrupt import Stopped
from pretrain.common.shell import shorten_path
from tools import ROOT


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


def test_a_python_that_is_not_the_environments_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def main(_: object) -> None:
        raise ModuleNotFoundError("No module named 'fvcore'", name="fvcore")

    monkeypatch.setattr(sys, "prefix", "/usr")
    with pytest.raises(SystemExit) as ended:
        run_command_line(main)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(
        f"error: {shorten_path(sys.executable)} has no fvcore; run: source .venv/bin/activate"
    )


PROGRAMS = sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "tools").glob("*.py") if "run_program" in path.read_text()
)


@pytest.mark.parametrize("program", ["-mpretrain", "transfer/train_net.py", *PROGRAMS])
def test_a_missing_package_is_one_line(program: str) -> None:
    """``-S`` leaves out the environment's packages."""
    done = subprocess.run([sys.executable, "-S", program, "--help"], cwd=ROOT, capture_output=True, text=True)
    remedy = r"error: \S+ has no \w+; run: source .venv/bin/activate \(make setup creates .venv\)\n"
    assert (done.returncode == 2 and re.fullmatch(remedy, done.stderr)) or (done.returncode, done.stderr) == (0, "")


def test_a_stop_while_a_program_imports_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "stopped.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a shell's job ignores it
    code = f"{heed}; from pretrain.common.command_line import run_program; run_program('stopped')"
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted by SIGINT (Ctrl-C)\n")


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


PRINTING = "from pretrain.common.command_line import run_command_line as run; run(lambda _: print('a line' * 1000))"


def test_output_that_cannot_be_written_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", PRINTING], stdout=full, stderr=subprocess.PIPE, text=True)
    says = "error: cannot write the output: No space left on device; free space, or send it elsewhere\n"
    assert (done.returncode, done.stderr) == (2, says)


def test_a_mistake_where_nobody_reads_the_output_is_one_line() -> None:
    code = (
        "from pretrain.common import command_line\n"
        "def main(_): print('a line'); raise command_line.UserError('the value is 3')\n"
        "command_line.run_command_line(main)"
    )
    reader, writer = os.pipe()
    os.close(reader)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", code], env=env, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (2, "error: the value is 3\n")


def test_a_folder_that_was_removed_is_one_line(tmp_path: Path) -> None:
    code = "import os; os.rmdir(os.getcwd()); from pretrain.common.command_line import run_command_line as run; "
    (tmp_path / "gone").mkdir()
    command = [sys.executable, "-c", f"import pretrain.common.command_line; {code} run(lambda _: os.getcwd())"]
    done = subprocess.run(command, cwd=tmp_path / "gone", capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: the current folder has been removed; cd to one")


def test_a_file_does_not_take_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    """A child would write into it."""
    code = (
        "import subprocess; from pretrain.common.command_line import run_command_line as run; "
        "run(lambda _: subprocess.run(['echo', 'text'], stdin=open('file', 'w')).returncode)"
    )
    command = ["sh", "-c", '"$0" -c "$1" >&-', sys.executable, code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "file").read_text() == ""

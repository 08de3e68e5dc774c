"""Forks one process per command line, with at most one fault in its file system calls (see syscalls.c).

Started by `commands.Commands`, with syscalls.c preloaded. Reads one JSON object per line, answers each with one.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_LIBC = ctypes.CDLL(None)


def main() -> None:
    for name in sys.argv[1:]:  # slow to import, once instead of in every command
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    """See `Ended`; ``calls``: how many the fault's rule has counted."""
    children: list[int] = []
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _command(job, write)
    os.close(write)
    deadline = time.monotonic() + job["timeout"]
    while True:
        done, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
        if done and os.WIFSTOPPED(status):
            children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
            os.kill(pid, 9)
        elif done:
            break
        if time.monotonic() > deadline:
            os.killpg(pid, 9)
            os.waitpid(pid, 0)
            os.close(read)
            return {"status": None, "calls": 0, "children": []}
        time.sleep(0.005)
    with os.fdopen(read) as pipe:
        calls = pipe.read()
    return {"status": os.waitstatus_to_exitcode(status), "calls": int(calls or 0), "children": children}


def _command(job: dict[str, Any], pipe: int) -> None:
    os.setsid()
    os.dup2(os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    sys.argv = [job["module"].replace(".", "/") + ".py", *job["argv"]]
    os.chdir(job["folder"])
    rule = [word.encode() if isinstance(word, str) else word for word in job["rule"]]
    _LIBC.faults_set(*rule[:3], ctypes.c_long(rule[3]), rule[4], ctypes.c_long(rule[5]), rule[6])
    from pretrain.common import interrupt
    from pretrain.common.errors import run_command_line

    status: Any = 1
    if job["module"] == "transfer.train_net":
        interrupt.install_handlers()  # as it does where it is started, not imported
    try:
        run_command_line(importlib.import_module(job["module"]).main)
    except SystemExit as error:
        status = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    seen = _LIBC.faults_seen
    seen.restype = ctypes.c_long
    os.write(pipe, str(seen()).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


main()

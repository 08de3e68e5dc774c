"""One small file a rank and attempt, in the run folder: who runs where, how it ended, and which rank failed first.

    launch/ranks/<job>.<attempt>.<rank>.json     state: running | done | stopped | requeued | failed
    launch/ranks/<job>.<attempt>.failed          the first failing rank's error (created once, by whoever comes first)

Any machine that sees the file system can read them; no clock and no scheduler is asked.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError
from pretrain.common.run_folder import write_json

from .spec import read_json

_POLL_S = 1.0
_GRACE_S = 5.0  # between the first rank's failure and the end of those that did not notice


class RankRecord:
    """This rank's file, and a thread that ends this process when another rank has failed.

    A rank that waits in a collective for one that died would wait for the collective's time-out: half an hour.
    """

    def __init__(self, folder: str | Path, job_id: str, rank: int, world_size: int) -> None:
        self._folder = Path(folder) / "launch" / "ranks"
        self._folder.mkdir(parents=True, exist_ok=True)
        self.rank, self._world_size = rank, world_size
        earlier = [_attempt(path) for path in self._folder.glob(f"{job_id}.*.{rank}.json")]
        self.attempt = max(earlier, default=-1) + 1
        self._stem = f"{job_id}.{self.attempt}"
        self._ended = threading.Event()
        self._values: dict[str, Any] = {
            "job": job_id, "attempt": self.attempt, "rank": rank, "world_size": world_size,
            "host": socket.gethostname(), "pid": os.getpid(), "started": time.time(), "state": "running",
        }  # fmt: skip
        self._write()
        if world_size > 1:
            threading.Thread(target=self._watch, daemon=True).start()

    def end(self, state: str, reason: str = "") -> None:
        """Writes how this rank ended."""
        self._ended.set()
        self._values.update(state=state, reason=reason, ended=time.time())
        self._write()

    def fail(self, error: BaseException) -> None:
        """Writes this rank's error, and that it was the first if it was."""
        text = "".join(traceback.format_exception(error))
        user_error = isinstance(error, UserError)
        line = str(error) if user_error else f"{type(error).__name__}: {error}"
        self._claim({"rank": self.rank, "error": line, "traceback": text, "user_error": user_error})
        self.end("failed", line)

    def _write(self) -> None:
        write_json(self._folder / f"{self._stem}.{self.rank}.json", self._values)

    def _claim(self, failure: dict[str, Any]) -> None:
        failure = {**failure, "host": self._values["host"], "time": time.time()}
        with contextlib.suppress(FileExistsError), open(self._folder / f"{self._stem}.failed", "x") as file:
            file.write(json.dumps(failure))

    def _watch(self) -> None:
        marker = self._folder / f"{self._stem}.failed"
        while not self._ended.wait(_POLL_S):
            dead = self._dead_neighbour()
            if dead is not None:
                error = f"rank {dead} ended without a word: it was killed (out of memory?)"
                self._claim({"rank": dead, "error": error, "traceback": "", "user_error": False})
            if marker.exists():
                if not self._ended.wait(_GRACE_S):
                    self.end("failed", "ended because another rank failed")
                    os._exit(1)
                return

    def _dead_neighbour(self) -> int | None:
        """A rank of this machine whose process is gone although its file says running."""
        for path in self._folder.glob(f"{self._stem}.*.json"):
            record = read_json(path)
            if record.get("host") != self._values["host"] or record["state"] != "running" or _alive(record["pid"]):
                continue
            if read_json(path).get("state") == "running":  # read after the death: it is not about to say more
                return record["rank"]
        return None


def attempts(folder: str | Path, job_id: str) -> list[dict[str, Any]]:
    """Rank 0's records of a job, oldest first; ``failure`` is the first failing rank's error, where there is one."""
    ranks = Path(folder) / "launch" / "ranks"
    found = []
    for path in sorted(ranks.glob(f"{job_id}.*.0.json"), key=_attempt):
        record = read_json(path)
        if record:
            failure = read_json(ranks / f"{job_id}.{record['attempt']}.failed")
            found.append({**record, "failure": failure} if failure else record)
    return found


def _attempt(path: Path) -> int:
    return int(path.name.split(".")[-3])


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

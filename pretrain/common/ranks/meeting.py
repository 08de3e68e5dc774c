"""Meetings of the ranks of a process group: each waits until all have come, however long one of them works alone.

A collective is no place for that. It ends with a time-out, and with nccl it is a call of CUDA, during which Python runs
no signal handler. In a meeting a rank looks for the others in the group's store, and sleeps in between: the store's own
wait would print two warnings at each time-out. It ends with an error only if a rank has shown no sign of life for
minutes; a thread of each rank gives such signs (`heartbeat`).
"""

import contextlib
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..errors import ProcessLost

POLL_S = 0.5
_FIRST_PAUSE_S = 0.001  # each pause is twice as long as the one before
BEAT_S = 10.0
LOST_AFTER_S = 600.0  # without a heartbeat: reading a large JSON file stops all threads of a process


def meet(poll_s: float = POLL_S, lost_after_s: float = LOST_AFTER_S) -> None:
    """Wait until every rank has called this as often as this one.

    Args:
        poll_s: most seconds between two looks at the other ranks.
        lost_after_s: seconds without a heartbeat until a rank counts as lost; the time for which this process was
            suspended does not count.

    Raises:
        ProcessLost: a rank has ended or hangs.
    """
    store = distributed_c10d._get_default_store()
    rank = dist.get_rank()
    number = store.add(f"meetings/{rank}", 1)
    arrivals = {peer: f"meeting/{number}/{peer}" for peer in range(dist.get_world_size())}
    store.set(arrivals[rank], "")
    beats = dict.fromkeys(arrivals, -1)
    quiet_s = dict.fromkeys(arrivals, 0.0)
    pause_s = _FIRST_PAUSE_S
    while not store.check([*arrivals.values()]):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, poll_s)
        for peer, arrival in arrivals.items() if pause_s == poll_s else ():
            if store.check([arrival]):
                continue
            latest = store.add(f"heartbeat/{peer}", 0)
            quiet_s[peer] = quiet_s[peer] + pause_s if latest == beats[peer] else 0.0
            beats[peer] = latest
            if quiet_s[peer] >= lost_after_s:
                problem = (
                    f"rank {peer} of {len(arrivals)} has ended or hangs: no sign of life for {quiet_s[peer]:.0f} s"
                )
                raise ProcessLost(f"{problem}; its own output shows the cause; run again to resume")
    store.delete_key(f"meeting/{number - 1}/{rank}")  # which all have left, as they have come to this one


@contextlib.contextmanager
def heartbeat(beat_s: float = BEAT_S) -> Iterator[None]:
    """Show the other ranks, until the block ends, that this process is alive."""
    ended = threading.Event()
    arguments = (distributed_c10d._get_default_store(), f"heartbeat/{dist.get_rank()}", ended, beat_s)
    threading.Thread(target=_beat, args=arguments, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _beat(store: dist.Store, key: str, ended: threading.Event, beat_s: float) -> None:
    with contextlib.suppress(RuntimeError):  # the store has gone with rank 0
        while not ended.is_set():
            store.add(key, 1)
            ended.wait(beat_s)

"""The processes in which torch compiles: how many each rank starts, and that signals to the job do not end them."""

import os
import signal
from pathlib import Path

import pytest
from torch._inductor import async_compile, config

from pretrain.common.ranks import environment
from pretrain.model.compilation import start_workers
from tests.pretrain.ranks import call_on_ranks

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


@pytest.mark.parametrize(
    ("variables", "workers"),
    [
        ({}, 32),
        ({"LOCAL_WORLD_SIZE": "8"}, 12),
        ({"LOCAL_WORLD_SIZE": "128"}, 1),
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_CPUS_PER_TASK": "10"}, 10),
        ({"LOCAL_WORLD_SIZE": "8", "TORCHINDUCTOR_COMPILE_THREADS": "32"}, 32),  # which torch has read
    ],
    ids=str,
)
def test_each_process_compiles_on_its_own_cores(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], workers: int
) -> None:
    for name in ("SLURM_CPUS_PER_TASK", "LOCAL_WORLD_SIZE", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(environment, "count_usable_cores", lambda: 96)
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: None)
    with config.patch(compile_threads=32):  # torch's limit
        start_workers()
        assert config.compile_threads == workers


def _start_two() -> None:
    """Start the workers of a process with two cores; compare their number and their blocked signals."""
    os.environ["SLURM_CPUS_PER_TASK"] = "2"
    os.environ.pop("TORCHINDUCTOR_COMPILE_THREADS", None)
    config.compile_threads = 32
    async_compile.has_triton_package = lambda: True  # without Triton, torch starts no workers
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    start_workers()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == earlier
    pool = async_compile.AsyncCompile.process_pool()
    assert isinstance(pool, async_compile.SubprocPool)
    process = Path(f"/proc/{pool.process.pid}")
    assert "--workers=2" in (process / "cmdline").read_text().split("\0")
    (blocked,) = (line for line in (process / "status").read_text().splitlines() if line.startswith("SigBlk"))
    mask = int(blocked.split()[1], 16)
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    assert all(mask >> (number - 1) & 1 for number in signals), blocked
    pool.process.kill()
    os._exit(0)  # torch would wait for the processes that it has not lost


def test_signals_to_the_job_do_not_end_the_workers() -> None:
    call_on_ranks(_start_two, 1, device=None)

"""The process group is left, and the run folder released, at the right moment."""

import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

from pretrain.common.distributed import init_process_group
from pretrain.common.errors import UserError
from pretrain.common.interrupt import Stopped
from pretrain.common.run.stage import enter_run_folder, process_group, translate_torch_errors
from pretrain.common.run.state import RunContext, read_state
from tests.errors import refused
from tests.pretrain.ranks import run_ranks

ROOT = Path(__file__).parents[4]


def _refuse() -> None:
    assert dist.get_rank() == 0
    raise UserError("used already")


def _fail(folder: Path) -> None:
    with pytest.raises(RuntimeError, match="broken"), process_group("run", init_process_group, "cpu"):
        raise RuntimeError("broken")
    assert dist.is_initialized()  # until exit; otherwise, the other rank would fail before this one has reported why

    with pytest.raises(UserError, match="used already"), enter_run_folder("test", folder, RunContext(), check=_refuse):
        pytest.fail("entered")
    with process_group("run", init_process_group, "cpu"), enter_run_folder("test", folder, RunContext()):
        pass
    assert dist.is_initialized()  # it was not joined there


def _stop(folder: Path) -> None:
    with pytest.raises(Stopped), process_group("run", init_process_group, "cpu"):
        dist.barrier()
        if dist.get_rank() == 0:  # it is still writing when the other rank is ready to leave
            time.sleep(0.5)
            (folder / "written").write_text("whole")
        raise Stopped("SIGTERM")
    assert (folder / "written").read_text() == "whole" and not dist.is_initialized()


def test_ranks_leave_together(tmp_path: Path) -> None:
    run_ranks(_fail, 2, tmp_path, device=None)
    run_ranks(_stop, 2, tmp_path, device=None)


def test_a_stage_holds_its_folder_until_it_ends(tmp_path: Path) -> None:
    with process_group("run", init_process_group, "cpu") as device, enter_run_folder("test", tmp_path, RunContext()):
        assert device == torch.device("cpu") and read_state(tmp_path)["state"] == "running"
        with pytest.raises(UserError, match="in use: the test stage"), enter_run_folder("test", tmp_path, RunContext()):
            pytest.fail("entered")
    with enter_run_folder("test", tmp_path, RunContext()):
        pass
    refused(
        lambda: enter_run_folder("other", tmp_path, RunContext()).__enter__(), tmp_path, "test", "other", "OUTPUT_DIR"
    )


def _translate(error: Exception, memory_remedy: str) -> NoReturn:
    with translate_torch_errors(memory_remedy):
        raise error
    raise AssertionError


NCCL = "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"
PINNED = "Caught AcceleratorError in pin memory thread for device 0.\nTraceback\nCUDA error: out of memory"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"), "CUDA out of memory. Tried"),
        (torch.AcceleratorError("CUDA error: out of memory\nmore"), "CUDA error: out of memory;"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "ALLOC_FAILED"),
        (dist.DistBackendError(NCCL), "Cuda failure 2 'out of memory';"),
    ],
)
def test_a_device_whose_memory_runs_out_is_one_line_with_the_remedy(
    error: Exception, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caching allocator has an error of its own, but CUDA's libraries allocate memory as well."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for memory_remedy, remedy in (("lower A.SIZE", "lower A.SIZE"), ("", "use smaller images")):
        with pytest.raises(UserError) as caught:
            _translate(error, memory_remedy)
        assert str(caught.value).startswith("memory ran out: ") and line in str(caught.value)
        assert str(caught.value).endswith(f"; {remedy}")  # fewer loader workers would not help


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), RuntimeError(PINNED)],
)
def test_a_machine_whose_memory_runs_out_is_one_line_with_the_remedy(error: Exception) -> None:
    refused(lambda: _translate(error, "lower A.SIZE"), "memory ran out: ", "; lower A.SIZE, or lower DATALOADER.NUM_")


def test_a_machine_without_a_compiler_is_one_line() -> None:
    error = RuntimeError("RuntimeError: Failed to find C compiler. Please specify via CC environment variable\nmore")
    refused(lambda: _translate(error, ""), "found no C compiler; install gcc", "SOLVER.COMPILE False")


HANGING = """
import time, torch.distributed as dist
from pretrain.common.command_line import run_command_line
from pretrain.common.errors import UserError
from pretrain.common.run.stage import process_group
dist.get_backend = lambda: "nccl"
dist.destroy_process_group = dist.distributed_c10d._abort_process_group = lambda: time.sleep(3600)

def main(_):
    with process_group("run", dist.init_process_group, "gloo", store=dist.HashStore(), rank=0, world_size=1):
        print("the last line", end="")
        raise {error}("broken")

run_command_line(main)
"""


@pytest.mark.parametrize(("error", "status"), [("UserError", 2), ("RuntimeError", 1)])
def test_a_failed_rank_ends_although_nccl_would_wait_for_the_others(error: str, status: int) -> None:
    command = [sys.executable, "-c", HANGING.format(error=error)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ended.returncode == status and ended.stdout.endswith("the last line")
    assert ended.stderr.splitlines()[-1].endswith("error: broken" if status == 2 else "RuntimeError: broken")

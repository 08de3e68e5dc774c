"""`launch.py fit`: what is tried, in which order, and what one real trial answers."""

from __future__ import annotations

import re
import signal
import subprocess

import pytest

from pretrain.common.errors import UserError
from pretrain.config import load_config
from tests.tools.launcher.helpers import ROOT
from tools import launch
from tools.launcher import fit

RECIPE = str(ROOT / "configs/pretrain/demo_mocov2_R18_digits.yaml")


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Trials of a device that has place for 100 images: (images, parts)."""
    trials = []

    def trial(_cfg, images: int, accumulate: int, _processes: int, _memory: int) -> fit._Trial:
        trials.append((images, accumulate))
        return fit._Trial(images, accumulate, 1 if images / accumulate <= 100 else None, 1.0)

    monkeypatch.setattr(fit, "_try", trial)
    return trials


@pytest.mark.parametrize(
    ("words", "processes", "trials", "says"),
    [
        ([512], 1, [(512, 1), (512, 2), (512, 4), (512, 8)], "512 on 1 process fits with SOLVER.ACCUMULATE 8"),
        ([512], 4, [(128, 1), (128, 2)], "512 on 4 processes fits with SOLVER.ACCUMULATE 2"),
        ([512, "MODEL.BN_GROUPS", "24"], 1, [(512, 1), (512, 2), (512, 4), (512, 8)], "ACCUMULATE 8"),
        ([32], 1, [(32, 1), (64, 1), (128, 1), (96, 1), (112, 1), (104, 1)], "SOLVER.IMS_PER_BATCH 96"),
        ([64, "MODEL.BN_GROUPS", "32"], 2, [(32, 1), (64, 1), (128, 1), (96, 1), (112, 1)], "IMS_PER_BATCH 192"),
    ],
)  # fmt: skip
def test_the_fewest_parts_or_the_largest_batch(tried, capsys, words, processes, trials, says):
    fit.fit(load_config(RECIPE, ["SOLVER.IMS_PER_BATCH", *map(str, words)]), processes, 0)
    assert tried == trials
    assert says in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "processes", "says"),
    [
        (["SOLVER.IMS_PER_BATCH", "512", "MODEL.BN_GROUPS", "2"], 1, "even with SOLVER.ACCUMULATE 2, the most that M"),
        (["SOLVER.IMS_PER_BATCH", "512", "MODEL.BN_GROUPS", "1"], 1, "even with SOLVER.ACCUMULATE 1, the most that M"),
        (["MODEL.BN_GROUPS", "2"], 4, "MODEL.BN_GROUPS is 2, not a multiple of 4 processes"),
        ([], 3, "SOLVER.IMS_PER_BATCH is 64, not a multiple of 3 processes"),
        ([], 0, "not a multiple of 0 processes"),
    ],
)  # fmt: skip
def test_what_cannot_be_tried_is_refused(tried, words, processes, says):
    with pytest.raises(UserError, match=says):
        fit.fit(load_config(RECIPE, words), processes, 0)


def test_no_batch_is_larger_than_the_data(tried, capsys, images):
    """48 images; a recipe whose data are on another machine is searched all the same."""
    fit.fit(load_config(RECIPE, ["DATA.TRAIN", f"folder:{images}", "SOLVER.IMS_PER_BATCH", "32"]), 1, 0)
    fit.fit(load_config(RECIPE, ["DATA.TRAIN", "imagenet", "SOLVER.IMS_PER_BATCH", "96"]), 1, 0)
    with pytest.raises(UserError, match=r"IMS_PER_BATCH is 49, but folder:.* holds only 48 images; .* at most 48"):
        fit.fit(load_config(RECIPE, ["DATA.TRAIN", f"folder:{images}", "SOLVER.IMS_PER_BATCH", "49"]), 1, 0)
    assert tried[:3] == [(32, 1), (48, 1), (96, 1)] and "IMS_PER_BATCH 48\n" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGFPE])
def test_only_signals_of_missing_memory_mean_that_it_does_not_fit(number: signal.Signals, monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], -number, "", ""))
    cfg = load_config(RECIPE, ["SOLVER.ACCUMULATE", "2", "MODEL.BN_GROUPS", "2"])
    with pytest.raises(
        UserError, match="was ended by SIGFPE" if number == signal.SIGFPE else "does not fit, even with"
    ):
        fit.fit(cfg, 1, 0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "SOLVER.ACCUMULATE 2 is left aside: the fewest parts that fit are searched"
    assert number == signal.SIGFPE or lines[1] == "64 images per process: does not fit (ended by SIGKILL)"


def test_little_memory_is_divided(capfd):
    """Two views of 64 images of 96 pixels need 0.7 GiB, and 16 parts of them 0.3 GiB."""
    words = ["VIEWS.IMAGE_SIZE", "96", "PROBE.RESIZE", "0", "DEVICE", "cpu", "MODEL.BN_GROUPS", "4"]
    assert launch.main(["fit", "--config-file", RECIPE, "--memory", "0.5", *words]) == 0
    *trials, last = capfd.readouterr().out.splitlines()
    assert trials[0].startswith("64 images per process: does not fit")  # some libraries end the process instead
    found = re.fullmatch(r"64 images per process in (\d) parts: (0.\d) GiB, \d+ images/s", trials[-1])
    assert found, trials
    parts, peak = found.groups()
    assert float(peak) <= 0.5 and last == f"SOLVER.IMS_PER_BATCH 64 on 1 process fits with SOLVER.ACCUMULATE {parts}"


def test_a_trial_that_fails_for_another_reason_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match="a trial of 64 images failed: DEVICE is cuda, but torch sees no CUDA device"):
        fit.fit(load_config(RECIPE, ["DEVICE", "cuda"]), 1, 0)

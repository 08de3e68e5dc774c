"""The GPUs that a local job may use."""

from pathlib import Path

import pytest

from pretrain.common import gpus
from tests.errors import refused


def test_torch_counts_the_gpus_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "torch.py").write_text(
        "import pathlib\npathlib.Path('asked').open('a').write('x')\n"
        "class cuda: device_count = staticmethod(lambda: 2)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "NVIDIA_DRIVER", "libc.so.6")
    gpus._count_devices.cache_clear()
    assert gpus.list_visible_gpus() == gpus.list_visible_gpus() == ["0", "1"]
    assert Path("asked").read_text() == "x"
    gpus._count_devices.cache_clear()
    (tmp_path / "torch.py").write_text("raise OSError('libcuda.so is missing')")
    refused(gpus.list_visible_gpus, "torch cannot count the GPUs", "libcuda", "name them in CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(gpus, "NVIDIA_DRIVER", "libmissing.so.1")
    monkeypatch.setattr(gpus, "AMD_DEVICE", str(tmp_path / "kfd"))
    gpus._count_devices.cache_clear()
    assert gpus.list_visible_gpus() == []  # without a driver, torch is not asked


def test_more_gpus_than_visible_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    gpus.check_visible_gpus("--gpus", 2, "")
    refused(lambda: gpus.check_visible_gpus("--gpus", 3, ""), "--gpus is 3", "has 2 visible GPUs; request at most 2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    refused(lambda: gpus.check_visible_gpus("--gpus", 1, "omit it"), "--gpus is 1", "has 0 visible GPUs; omit it")

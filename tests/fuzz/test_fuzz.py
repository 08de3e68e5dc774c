"""Mutated files that users write: a right answer or one line, and never a traceback or a hang."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from pretrain.common import image_io
from pretrain.common.errors import UserError
from pretrain.config import from_yaml_text, load_config
from tests.fuzz import mutate
from tools.launcher import options, pipeline
from transfer.config import load_config as load_detector_config

_CONFIGS = Path(__file__).parents[2] / "configs"
_SITE = {"cluster": "slurm", "account": "0042", "time": "4:00:00", "setup": ["module load cuda"],
         "sbatch": {"constraint": "h100", "exclusive": ""}, "stages": {"linear": {"gpus": "1"}}}  # fmt: skip


def _pretraining_config(file: Path) -> None:
    cfg = load_config(file, [])
    assert from_yaml_text(cfg.dump()).dump() == cfg.dump()


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "pretraining": ("pretrain/*R18*.yaml", _pretraining_config),
    "detector": ("*_R50_FPN_1*.yaml", lambda file: load_detector_config(file, [])),
    "pipeline": ("evidence/*.yaml", lambda file: pipeline.load(str(file))),
    "sweep": ("pretrain/sweeps/*.yaml", lambda file: pipeline.load(str(file))),
    "site": ("", lambda file: options.resolve({"cluster": "local"}, str(file))),
}


@pytest.mark.parametrize("count", [50, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])])
@pytest.mark.parametrize("name", READERS)
def test_a_mutated_config_is_answered(name: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pattern, read = READERS[name]
    values = [yaml.safe_load(path.read_text()) for path in sorted(_CONFIGS.glob(pattern))] if pattern else [_SITE]
    monkeypatch.chdir(tmp_path)
    for number in range(count):
        rng, file = random.Random(f"{name} {number}"), tmp_path / "a.yaml"
        content = yaml.dump(mutate.value(rng, rng.choice(values))).encode(errors="surrogatepass")
        file.write_bytes(mutate.data(rng, [content]) if rng.randrange(4) == 0 else content)
        with contextlib.suppress(UserError):
            read(file)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"])
def test_a_mutated_image_is_answered(form: str):
    noise, content = np.random.default_rng(0).integers(0, 255, (24, 32, 3), dtype=np.uint8), io.BytesIO()
    Image.fromarray(noise).save(content, form)
    for number in range(50):
        with contextlib.suppress(UserError):
            image = image_io.decode(mutate.data(random.Random(number), [content.getvalue()]), "a")
            assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3 and image.size

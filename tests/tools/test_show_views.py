"""The picture of views contains the views that training sees."""

import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from pretrain.common.config import extensions
from pretrain.data import augmentations, datasets, views
from pretrain.data.loader import Loader
from tests.errors import refused
from tests.pretrain.images import write_folder
from tools import show_views


def test_the_grid_shows_what_training_sees(tmp_path: Path):
    folder = write_folder(tmp_path / "set", [f"{i}.png" for i in range(5)])
    out = tmp_path / "out.png"
    words = ["--data", f"folder:{folder}", "--size", "32", "--images", "3", "--views", "2"]
    show_views.main([*words, "--output", str(out)])
    picture: Any = cv2.imread(str(out), cv2.IMREAD_COLOR_RGB)
    height, width = 16, 34 + 4  # of the titles: "view 1" is wider than a view
    assert picture.shape == (height + 3 * 36, 3 * width, 3)
    assert (picture[height + 32 : height + 36] == 255).all()
    assert (picture[height:, 32:width] == 255).all()
    for column in range(3):
        assert picture[:height, column * width : (column + 1) * width].min() < 100  # it has a title
    data = datasets.load(f"folder:{folder}", "train")
    middle = picture[height + 36 : height + 68]
    np.testing.assert_array_equal(middle[:, :32], views.make_center_view(data.read(2), 32, 32))
    loader = Loader(data, [augmentations.AUGMENTATIONS["moco_v2"]] * 2, 32, batch_size=5, seed=0, num_workers=0)
    _, batch = next(loader.batches(0, 1))
    row = int(torch.nonzero(batch.index_n == 2)[0, 0])
    second = batch.views_VnCHW[1, row].permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(middle[:, 2 * width : 2 * width + 32], second)


def test_a_picture_that_would_become_an_image_or_is_no_png_is_refused(tmp_path: Path):
    folder = write_folder(tmp_path / "set", ["0.png"])
    words = ["--data", f"folder:{folder}", "--output"]
    refused(lambda: show_views.main([*words, str(folder / "views.png")]), "--output", f"inside folder:{folder}")
    refused(lambda: show_views.main([*words, str(tmp_path / "views.jpg")]), "views.jpg", ".png")
    refused(lambda: show_views.main([*words, str(folder)]), str(folder))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set"]


def test_views_of_an_own_module_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The module stays imported in this process, so its view has a name that nothing else uses."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv(extensions.VARIABLE, raising=False)
    folder = write_folder(tmp_path / "set", ["0.png"])
    code = "from pretrain import AUGMENTATIONS\nAUGMENTATIONS['shown'] = AUGMENTATIONS['moco_v1']\n"
    (tmp_path / "views_to_show.py").write_text(code)
    words = ["--augmentation", "shown", "--data", f"folder:{folder}", "--output", str(tmp_path / "a.png")]
    refused(lambda: show_views.main(words), "no augmentation 'shown'")
    show_views.main([*words, "--import", str(tmp_path / "views_to_show.py"), "--size", "16"])
    monkeypatch.delitem(augmentations.AUGMENTATIONS, "shown")
    assert (tmp_path / "a.png").is_file()

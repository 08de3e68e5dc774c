"""Images from memory have the pixels of the same image in a lossless file; anything else is one line with its type."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pretrain.common.image_checks.pixels import read_any
from pretrain.common.images import read_image
from tests.errors import refused
from tests.pretrain.images import picture

PIXELS = picture(0, 8, 10)


class Subclass(np.ndarray):
    pass


def turned() -> Image.Image:
    """Return the picture as a camera stores it that was held sideways."""
    image = Image.fromarray(np.rot90(PIXELS).copy())
    image.getexif()[0x0112] = 6
    return image


def with_alpha() -> Image.Image:
    image = Image.fromarray(PIXELS)
    image.putalpha(7)
    return image


SAME = {
    "array": lambda: PIXELS,
    "array, not contiguous": lambda: np.asfortranarray(PIXELS),
    "array, reversed from BGR": lambda: PIXELS[:, :, ::-1].copy()[:, :, ::-1],
    "array, read-only": lambda: np.frombuffer(PIXELS.tobytes(), np.uint8).reshape(PIXELS.shape),
    "array of a subclass": lambda: PIXELS.view(Subclass),
    "PIL": lambda: Image.fromarray(PIXELS),
    "PIL with alpha": with_alpha,
    "PIL of a sideways camera": turned,
    "tensor (3, H, W)": lambda: torch.from_numpy(PIXELS).permute(2, 0, 1),
    "tensor (H, W, 3)": lambda: torch.from_numpy(PIXELS),
}


@pytest.mark.parametrize("kind", SAME)
def test_pixels_are_those_of_the_file(tmp_path: Path, kind: str):
    pixels = read_any(SAME[kind](), "image")
    assert type(pixels) is np.ndarray and pixels.flags.c_contiguous and (pixels == PIXELS).all()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "CMYK", "I;16"])
def test_a_pil_image_is_read_as_its_file(tmp_path: Path, mode: str):
    image = Image.fromarray(PIXELS)
    image = Image.fromarray(PIXELS[:, :, 0].astype(np.uint16) * 256) if mode == "I;16" else image.convert(mode)
    image.save(tmp_path / "a.tif")
    assert (read_any(image, "image") == read_image(str(tmp_path / "a.tif"))).all()
    assert (read_any(tmp_path / "a.tif", "image") == read_any(image, "image")).all()


def closed(folder: Path) -> Image.Image:
    Image.fromarray(PIXELS).save(folder / "a.png")
    with Image.open(folder / "a.png") as image:
        pass
    return image


REFUSED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "nothing": (None, ("NoneType", "PIL image")),
    "a number": (3, ("int",)),
    "bytes": (b"\xff\xd8", ("bytes",)),
    "numbers": (PIXELS.tolist(), ("list",)),
    "a dictionary": ({"image": PIXELS}, ("dict",)),
    "a generator": ((PIXELS for _ in range(2)), ("generator",)),
    "no path": ("", ("empty",)),
    "no file": ("nothing.png", ("nothing.png",)),
    "gray": (PIXELS[:, :, 0], ("(8, 10)", "np.stack([image] * 3, axis=2)")),
    "channels first": (PIXELS.transpose(2, 0, 1), ("(3, 8, 10)", "image.transpose(1, 2, 0)")),
    "a batch": (np.stack([PIXELS] * 2), ("(2, 8, 10, 3)", "list(image)")),
    "a batch of one": (PIXELS[None], ("(1, 8, 10, 3)", "image[0]")),
    "a batch tensor": (torch.zeros(2, 3, 8, 10, dtype=torch.uint8), ("(2, 3, 8, 10)", "list(image)")),
    "fractions": (PIXELS / 255, ("float64", "(255 * image).round().astype(np.uint8)")),
    "a tensor of fractions": (torch.rand(3, 8, 10), ("float32", "(255 * image).round()")),
    "a tensor of bfloat16": (torch.rand(3, 8, 10).bfloat16(), ("bfloat16", "0 to 255")),
    "alpha": (np.dstack([PIXELS, PIXELS[:, :, :1]]), ("(8, 10, 4)", "image[:, :, :3]")),
    "empty": (PIXELS[:0], ("(0, 10, 3)",)),
    "text": (np.array(["a.png"]), ("shape (1,)",)),
    "32 bits": (Image.fromarray(PIXELS[:, :, 0].astype(np.float32)), ("32-bit",)),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_anything_else_is_one_line_without_its_values(kind: str):
    image, named = REFUSED[kind]
    assert len(refused(lambda: read_any(image, "image 7"), *named)) < 250


def test_a_closed_image_is_one_line(tmp_path: Path):
    refused(lambda: read_any(closed(tmp_path), "image 7"), "image 7", "closed")

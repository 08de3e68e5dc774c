"""Images that a caller or a data set hands over as objects rather than files, checked by one contract.

The contract: an array (H, W, 3) of uint8, RGB. An error names the type and shape of anything else, never its values,
and says how to convert it.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from ..errors import UserError, count_noun
from ..images import convert_pil, read_image
from ..interface import read_path

FORMS = "a path, a PIL image, an array (H, W, 3) of uint8 RGB, or a tensor (3, H, W)"


def read_any(image: Any, name: str) -> np.ndarray:
    """Return the pixels of an image in one of `FORMS` as (H, W, 3) uint8 RGB, upright.

    A tensor (H, W, 3) is read as an array.

    Args:
        name: names an image that is not a file, for errors.

    Raises:
        UserError: another type, or an array of another form.
        CorruptImage: an image that cannot be decoded.
    """
    if isinstance(image, (str, os.PathLike)):
        return read_image(read_path(image, name))
    if isinstance(image, Image.Image):
        return convert_pil(image, name)
    if is_tensor(image):
        shape = tuple(image.shape)
        by_channel = len(shape) == 3 and shape[0] == 3
        if by_channel:
            image = image.permute(1, 2, 0)
        if by_channel or shape[2:] == (3,):
            with contextlib.suppress(TypeError):  # a type that NumPy lacks, such as bfloat16
                image = np.asarray(image.detach().cpu())
    elif not isinstance(image, np.ndarray):
        raise UserError(f"{name} is of type {type(image).__name__}; pass {FORMS}")
    if image.ndim == 4 and len(image) > 1:
        raise UserError(f"{name} is {describe(image)}, which is a batch; pass a list of images: list(image)")
    return check_image(image, lambda: name, "pass (H, W, 3) uint8 RGB")


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor of torch, which need not be imported."""
    return hasattr(value, "detach") and hasattr(value, "permute")


def check_image(
    image: Any, name_it: Callable[[], str], rule: str, advise: Callable[[Any], str] | None = None
) -> np.ndarray:
    """Return an image as (H, W, 3) uint8, contiguous and writable.

    Args:
        name_it: names the image in errors.
        rule: what to pass instead.
        advise: returns how to convert the image (default: `advise_array`).
    """
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.shape[2:] == (3,) and image.size:
        return np.require(image, requirements=("C", "W", "E"))
    advice = (advise or advise_array)(image)
    raise UserError(f"{name_it()} is {describe(image)}; {rule}: {advice}")


def describe(value: Any) -> str:
    """Describe a value of a wrong type or shape in a few words."""
    if value is None or isinstance(value, (str, os.PathLike, int, float)):
        return repr(value)[:80]
    if isinstance(value, Image.Image):
        return f"a PIL image of mode {value.mode}"
    if isinstance(value, (bytes, bytearray)):
        return count_noun(len(value), "byte")
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value).__name__.replace("ndarray", "array")
    text = f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        text += f", {str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return text


def advise_array(image: Any) -> str:
    """Return how to convert an array, a tensor or nested lists to (H, W, 3) uint8 RGB."""
    is_torch = is_tensor(image)
    expression = "image.numpy()" if is_torch else "np.asarray(image)"
    try:
        array = np.asarray(image.detach().cpu() if is_torch else image)
    except (ValueError, TypeError):  # rows of different lengths, or a type that NumPy lacks, such as bfloat16
        return "make it an array of whole numbers from 0 to 255, all rows of one length"
    if array is image:
        expression = "image"
    if not array.size:
        return "leave out empty images"
    if array.dtype.kind not in "biuf":
        return "its pixels are not numbers"
    return _advise_values(array, _advise_shape(array.shape, expression))


def _advise_shape(shape: tuple[int, ...], expression: str) -> str:
    """Return an expression that makes an image (H, W, 3); "" if its channels cannot be recognized."""
    if len(shape) == 4 and shape[0] == 1:
        return _advise_shape(shape[1:], f"{expression}[0]")
    if len(shape) == 2:
        return f"np.stack([{expression}] * 3, axis=2)"
    if len(shape) != 3:
        return ""
    by_channels = {1: f"np.repeat({expression}, 3, axis=2)", 3: expression, 4: f"{expression}[:, :, :3]"}
    if shape[2] in by_channels:
        return by_channels[shape[2]]
    return _advise_shape((*shape[1:], shape[0]), f"{expression}.transpose(1, 2, 0)") if shape[0] in by_channels else ""


def _advise_values(array: np.ndarray, expression: str) -> str:
    """Return an expression that also makes the values uint8, or what to do if there is none."""
    if not expression:
        return "images have 3 channels, in the last axis"
    if array.dtype == np.uint8:
        return expression
    if array.dtype.kind == "b":
        return f"255 * {expression}.astype(np.uint8)"
    low = array.min()
    high = array.max()
    if array.dtype.kind == "f" and low >= 0 and high <= 1:
        return f"(255 * {expression}).round().astype(np.uint8)"
    if low >= 0 and high <= 255:
        rounded = ".round()" if array.dtype.kind == "f" else ""
        return f"{expression}{rounded}.astype(np.uint8)"
    if array.dtype == np.uint16:
        return f"({expression} >> 8).astype(np.uint8)"
    return f"its values, from {low:.4g} to {high:.4g}, must be scaled to 0 to 255 (and not normalized)"

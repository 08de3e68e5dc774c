"""Color operations on a view: each works in place on a contiguous (S, S, 3) uint8 image and rounds as PIL does."""

import math

import cv2
import numpy as np


def brightness(image: np.ndarray, factor: float) -> None:
    cv2.convertScaleAbs(image, dst=image, alpha=factor)


def contrast(image: np.ndarray, factor: float) -> None:
    mean = math.floor(cv2.mean(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY))[0] + 0.5)  # a whole number in PIL too
    cv2.addWeighted(image, factor, image, 0, mean * (1 - factor), dst=image)


def saturation(image: np.ndarray, factor: float) -> None:
    gray = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    cv2.addWeighted(image, factor, gray, 1 - factor, 0, dst=image)


def hue(image: np.ndarray, turn: float) -> None:
    hsv = cv2.cvtColor(image.astype(np.float32), cv2.COLOR_RGB2HSV)  # 8-bit hue would be off by up to 3 levels
    hsv[..., 0] += 360 * (turn % 1)  # OpenCV takes any angle above 0
    cv2.convertScaleAbs(cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB), dst=image)


def gray(image: np.ndarray, _value: float) -> None:
    cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB, dst=image)


def blur(image: np.ndarray, sigma: float) -> None:
    radius = math.ceil(3 * sigma)  # as in Pillow, the view's size does not limit it
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    kernel = (weights / weights.sum()).astype(np.float32)
    cv2.sepFilter2D(image, -1, kernel, kernel, dst=image, borderType=cv2.BORDER_REPLICATE)

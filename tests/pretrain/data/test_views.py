"""Views are compared with torchvision's transforms: equal boxes, equal operations, equal distributions."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms.v2 as T
import torchvision.transforms.v2.functional as TF
from PIL import Image, ImageFilter
from scipy.stats import ks_2samp

from pretrain.data import views
from pretrain.data.augmentations import AUGMENTATIONS, Augmentation, CenterCrop, PadCrop, RandomResizedCrop
from pretrain.data.color import blur, brightness, contrast, gray, hue, saturation
from pretrain.data.loader import make_random_stream
from pretrain.data.views import choose_reduction, make_views, normalize, sample_params
from tests.errors import refused
from tests.pretrain.images import picture

SIZE = 64
PICTURE = picture(5, 96, 128)
SQUARE = picture(6, SIZE, SIZE)
OPERATIONS = [
    *((op, value) for op in (brightness, contrast, saturation) for value in (0.0, 0.6, 1.0, 1.4, 1.8)),
    *((hue, value) for value in (-0.5, -0.4, -0.1, -0.01, 0.0, 0.07, 0.2, 0.5)),
    (gray, 0.0),
    *((blur, value) for value in (0.1, 0.5, 0.9, 2.0)),
]
REFERENCES = {  # torchvision's, and Pillow's blur: its filter has no kernel that a small view cuts off
    brightness: TF.adjust_brightness,
    contrast: TF.adjust_contrast,
    saturation: TF.adjust_saturation,
    hue: TF.adjust_hue,
    gray: lambda x, _: TF.rgb_to_grayscale(x, 3),
    blur: lambda x, sigma: x.filter(ImageFilter.GaussianBlur(sigma)),
}


def rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(("op", "value"), OPERATIONS)
def test_an_operation_is_torchvisions(op: Callable, value: float):
    ours = SQUARE.copy()
    op(ours, value)
    if op is not blur:
        exact = REFERENCES[op](torch.from_numpy(SQUARE).permute(2, 0, 1), value).permute(1, 2, 0).numpy()
        assert np.abs(ours.astype(int) - exact).max() <= 1
    pil = np.asarray(REFERENCES[op](Image.fromarray(SQUARE), value)).astype(int)
    assert np.abs(ours - pil).mean() < (2.5 if op is hue else 1)  # PIL's hue has 8 bits


@pytest.mark.parametrize("size", [32, 224])
@pytest.mark.parametrize("sigma", [0.6, 1.0, 1.4, 2.0])
def test_blur_is_as_wide_as_asked_for_at_every_size(size: int, sigma: float):
    line = np.zeros((size, size, 3), np.uint8)
    line[:, size // 2] = 255
    blur(line, sigma)
    weights = line[size // 2, :, 0] / line[size // 2, :, 0].sum()
    place = np.arange(size)
    assert ((weights * (place - weights @ place) ** 2).sum()) ** 0.5 == pytest.approx(sigma, rel=0.06)


def test_resize_is_pillows():
    for height, width in ((24, 24), (48, 100), (224, 224)):
        pil = np.asarray(Image.fromarray(PICTURE).resize((width, height), Image.Resampling.BILINEAR)).astype(int)
        assert np.abs(views.resize(PICTURE, height, width) - pil).max() <= 1


def p_value(a: np.ndarray, b: np.ndarray) -> float:
    """Return the p-value that both samples are of one distribution."""
    result: Any = ks_2samp(a, b)
    return float(result.pvalue)


def test_boxes_are_distributed_as_torchvisions():
    torch.manual_seed(0)
    crop = RandomResizedCrop((0.2, 1.0))
    generator = rng(1)
    boxes = []
    expected = []
    reference = T.RandomResizedCrop(SIZE, scale=crop.scale)
    image = torch.from_numpy(PICTURE).permute(2, 0, 1)
    for _ in range(1500):
        boxes.append(sample_params(Augmentation(crop), PICTURE.shape[0], PICTURE.shape[1], generator).box)
        params = reference.make_params([image])
        expected.append((params["top"], params["left"], params["height"], params["width"]))
    ours = np.array(boxes)
    theirs = np.array(expected)
    assert (ours[:, 0] + ours[:, 2] <= 96).all() and (ours[:, 1] + ours[:, 3] <= 128).all() and (ours >= 0).all()
    for column in range(4):
        assert p_value(ours[:, column], theirs[:, column]) > 0.01
    assert p_value(ours[:, 2] * ours[:, 3], theirs[:, 2] * theirs[:, 3]) > 0.01


@pytest.mark.parametrize(("height", "width", "box"), [(1000, 10, (493, 0, 13, 10)), (10, 1000, (0, 493, 10, 13))])
def test_a_thin_image_is_cropped_to_its_center(height: int, width: int, box: tuple[int, ...]):
    assert sample_params(AUGMENTATIONS["none"], 5, 7, rng(0)).box == (0, 0, 5, 7)
    assert sample_params(Augmentation(RandomResizedCrop((0.9, 1.0))), height, width, rng(0)).box == box


def statistics(view: np.ndarray) -> list[float]:
    """Compute what color, blur and crop change: level, contrast, colorfulness, sharpness, and the channels' balance."""
    x = view.astype(float)
    channel = x.mean(axis=(0, 1))
    sharpness = np.abs(np.diff(x, axis=0)).mean() / (x.std() + 1)
    return [x.mean(), x.std(), np.ptp(x, axis=2).mean(), sharpness, channel[0] - channel[2], channel[1] - channel[2]]


def worst_p_value(name: str, reference: Callable[[Image.Image], Image.Image], count: int = 400) -> float:
    """Return the smallest p-value of a Kolmogorov-Smirnov test per statistic, times their number (Bonferroni)."""
    torch.manual_seed(1)
    random.seed(1)
    image = Image.fromarray(PICTURE)
    ours = np.array(
        [statistics(make_views(PICTURE, [AUGMENTATIONS[name]], SIZE, lambda _, i=i: rng(i))[0]) for i in range(count)]
    )
    theirs = np.array([statistics(np.asarray(reference(image))) for _ in range(count)])
    return min(p_value(a, b) for a, b in zip(ours.T, theirs.T, strict=True)) * ours.shape[1]


BLURRED = T.RandomApply([T.Lambda(lambda x: x.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0))))], 0.5)
GRAYED = T.RandomGrayscale(0.2)
FLIPPED = T.RandomHorizontalFlip()
CROPPED = T.RandomResizedCrop(SIZE, (0.2, 1))
ANY_SCALE = T.RandomResizedCrop(SIZE, (0.08, 1))
PADDED = T.Compose([T.Resize((SIZE, SIZE)), T.RandomCrop(SIZE, 4)])
JITTERED = T.RandomApply([T.ColorJitter(0.4, 0.4, 0.4, 0.1)], 0.8)
PUBLISHED = {
    "moco_v1": [CROPPED, GRAYED, T.ColorJitter(0.4, 0.4, 0.4, 0.4), FLIPPED],
    "moco_v2": [CROPPED, JITTERED, GRAYED, BLURRED, FLIPPED],
    "simclr": [ANY_SCALE, FLIPPED, T.RandomApply([T.ColorJitter(0.8, 0.8, 0.8, 0.2)], 0.8), GRAYED, BLURRED],
    "simaugment": [CROPPED, FLIPPED, JITTERED, GRAYED],
    "crop_flip": [ANY_SCALE, FLIPPED],
    "pad_flip": [PADDED, FLIPPED],
    "flip": [T.Resize((SIZE, SIZE)), FLIPPED],
    "autoaugment_cifar": [PADDED, FLIPPED, T.AutoAugment(T.AutoAugmentPolicy.CIFAR10)],
    "autoaugment": [PADDED, FLIPPED, T.AutoAugment()],
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_a_recipe_is_distributed_as_torchvisions_transforms(name: str):
    assert worst_p_value(name, T.Compose(PUBLISHED[name])) > 0.01


def test_the_comparison_tells_recipes_apart():
    assert worst_p_value("moco_v2", T.Compose(PUBLISHED["moco_v1"])) < 1e-4


def test_flips_and_probabilities():
    params = [sample_params(AUGMENTATIONS["moco_v2"], 50, 50, rng(i)) for i in range(2000)]
    operations = [[op for op, _ in p.colors] for p in params]
    done = np.array([[op in ops for op in (brightness, gray, blur)] for ops in operations]).mean(axis=0)
    np.testing.assert_allclose([*done, np.mean([p.flip for p in params])], [0.8, 0.2, 0.5, 0.5], atol=0.04)
    firsts = [ops[0] for ops in operations if brightness in ops]
    shares = [firsts.count(op) / len(firsts) for op in (brightness, contrast, saturation, hue)]
    np.testing.assert_allclose(shares, 0.25, atol=0.04)
    sigmas = [value for p in params for op, value in p.colors if op is blur]
    assert 0.1 <= min(sigmas) < 0.15 and 1.95 < max(sigmas) <= 2.0
    assert not any(sample_params(AUGMENTATIONS["digits"], 50, 50, rng(i)).flip for i in range(50))


def test_views_are_functions_of_their_streams():
    augmentations = [AUGMENTATIONS["moco_v2"]] * 3
    first = make_views(PICTURE, augmentations, 32, lambda v: rng(v))
    assert first.shape == (3, 32, 32, 3) and first.dtype == np.uint8
    np.testing.assert_array_equal(first, make_views(PICTURE, augmentations, 32, lambda v: rng(v)))
    swapped = make_views(PICTURE, augmentations, 32, lambda v: rng(2 - v))
    np.testing.assert_array_equal(first[::-1], swapped)
    assert not np.array_equal(first[0], first[1])


@pytest.mark.parametrize(("height", "width"), [(96, 128), (128, 96), (40, 300)])
def test_center_view_is_torchvisions(height: int, width: int):
    image = picture(7, height, width)
    for size, shorter in ((32, 36), (28, 28)):
        expected = T.Compose([T.Resize(shorter), T.CenterCrop(size)])(Image.fromarray(image))
        assert np.abs(views.make_center_view(image, size, shorter).astype(int) - np.asarray(expected)).max() <= 1
    expected = Image.fromarray(image).resize((32, 32), Image.Resampling.BILINEAR)
    assert np.abs(views.make_center_view(image, 32, 0).astype(int) - np.asarray(expected)).max() <= 1


def test_pad_crop_moves_by_up_to_its_padding():
    image = picture(8, 16, 16)
    offsets = {sample_params(Augmentation(PadCrop(2)), 16, 16, rng(i)).offset for i in range(400)}
    assert offsets == {(top, left) for top in range(5) for left in range(5)}
    view = make_views(image, [Augmentation(PadCrop(16), flip=0.0)], 16, lambda _: rng(0))[0]
    top, left = sample_params(Augmentation(PadCrop(16), flip=0.0), 16, 16, rng(0)).offset or (0, 0)
    padded = np.pad(image, ((16, 16), (16, 16), (0, 0)))
    np.testing.assert_array_equal(view, padded[top : top + 16, left : left + 16])


def test_normalize():
    images = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8).permute(0, 1, 3, 2)
    for mean, std in (((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.5, 0.4, 0.3), (0.25, 0.2, 0.3))):
        expected = T.Normalize(mean, std)(images.float() / 255)
        assert normalize(images, mean, std).is_contiguous()
        torch.testing.assert_close(normalize(images, mean, std), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(normalize(images[None], mean, std), expected[None], atol=1e-5, rtol=1e-5)


def test_every_recipe_makes_views_of_tiny_and_thin_images():
    for image in (picture(1, 8, 8), picture(2, 3, 60)):
        views = make_views(image, list(AUGMENTATIONS.values()), 28, lambda v: rng(v))
        assert views.shape == (len(AUGMENTATIONS), 28, 28, 3)


def test_an_own_color_operation_is_applied_and_another_object_is_refused():
    class Black:
        p = 1.0

        def sample(self, rng: np.random.Generator) -> list:
            return [(lambda image, value: image.fill(int(value)), 7.0)]

    augmentation = Augmentation(CenterCrop(), flip=0.0, colors=(Black(),))
    assert (make_views(PICTURE, [augmentation], 16, lambda _: rng(0)) == 7).all()
    refused(lambda: Augmentation(CenterCrop(), colors=(object(),)), "color operation", "sample(rng)")  # pyright: ignore
    refused(lambda: Augmentation("center"), "'center'", "crop")  # pyright: ignore


SIZES = [(3000, 4000), (1080, 1920), (375, 500), (900, 2000), (224, 9000), (1800, 1800)]


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("name", ["moco_v2", "simclr", "digits", "autoaugment"])
def test_no_crop_of_a_reduced_image_is_smaller_than_a_view(name: str, height: int, width: int):
    """Twice the reduction would have such a crop."""
    augmentation = AUGMENTATIONS[name]
    reduction = choose_reduction([augmentation], 224, height, width)

    def draw_smallest_side(factor: int) -> int:
        streams = (make_random_stream(0, 0, 0, i) for i in range(1000))
        sizes = [sample_params(augmentation, -(-height // factor), -(-width // factor), s).box[2:] for s in streams]
        return min(map(min, sizes))

    assert reduction == 1 or draw_smallest_side(reduction) >= 224
    assert reduction == 8 or draw_smallest_side(2 * reduction) < 224 * 1.1


def test_the_smallest_crop_decides_the_reduction():
    """A MoCo v2 crop has at least a fifth of the area and sides in the ratio 3:4: 0.39 of the geometric mean side."""
    moco = [AUGMENTATIONS["moco_v2"]]
    reductions = {(3000, 4000): 4, (1080, 1920): 2, (375, 500): 1, (6000, 8000): 8}
    assert {size: choose_reduction(moco, 224, *size) for size in reductions} == reductions
    assert choose_reduction(moco, 96, 3000, 4000) == 8
    assert choose_reduction([*moco, AUGMENTATIONS["simclr"]], 224, 3000, 4000) == 2

"""Your own augmentation: small crops without color operations.

    python tools/launch.py pretrain --import docs/templates/my_views.py \
        --config-file configs/examples/demo_mocov2_R18_digits.yaml VIEWS.QUERY small_crops VIEWS.KEY small_crops
"""

from pretrain import AUGMENTATIONS, register
from pretrain.data.augmentations import Augmentation, RandomResizedCrop

register(AUGMENTATIONS, "small_crops", Augmentation(RandomResizedCrop(scale=(0.1, 0.5)), flip=0.0))

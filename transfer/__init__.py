"""Fine-tuning of detectors on COCO from a pretrained backbone, on Detectron2 or on torchvision's detectors."""

import warnings

# fvcore scripts two losses when it is imported; this package does not use them.
warnings.filterwarnings("ignore", message=r".*torch\.jit\.script.* is deprecated", category=FutureWarning)

"""Faster, Mask and Keypoint R-CNN with Detectron2's configs, names and numbers, on maintained libraries.

With the same weights it computes Detectron2's losses, gradients and detections (tests/transfer/test_parity.py), and its
checkpoints load there. It needs no compiler, causes fewer than a third of Detectron2's host-device synchronizations per
iteration (tests/test_simulated_device.py), and a resumed run equals an uninterrupted one, on a CPU bit for bit.
Detectron2 remains the reference for published comparisons.
"""

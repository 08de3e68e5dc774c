"""Convolutions of a step as a fraction of what the device could do in that time."""

from __future__ import annotations

from collections.abc import Callable

from torch.utils.flop_counter import FlopCounterMode

# Dense TFLOP/s by name of the device (float32 without tensor cores, TF32, bfloat16), from NVIDIA's data sheets.
# fmt: off
PEAKS = {
    "V100-SXM2": (15.7, None, None),
    "A100": (19.5, 156.0, 312.0),
    "L4": (30.3, 60.0, 121.0),
    "L40S": (91.6, 183.0, 362.0),
    "H100 PCIe": (51.0, 378.0, 756.0),
    "H100 80GB HBM3": (67.0, 494.7, 989.4),
    "H200": (67.0, 494.7, 989.4),
}
# fmt: on
PRECISIONS = ("float32", "tf32", "bf16")


def find_peak(device_name: str, precision: str) -> float | None:
    """Return dense FLOP/s of a device, or None where its name, or the precision there, is not in the table."""
    words = f" {device_name.replace('-', ' ')} "
    matches = [name for name in PEAKS if f" {name.replace('-', ' ')} " in words]
    if not matches:
        return None
    peak = PEAKS[max(matches, key=len)][PRECISIONS.index(precision)]
    return peak and 1e12 * peak


def count_convolution_flops(step: Callable[[], object]) -> int:
    """Return floating-point operations of all convolutions in a step, forward and backward; 2 per multiply-add."""
    with FlopCounterMode(display=False) as counter:
        step()
    counts = counter.get_flop_counts()["Global"]
    return sum(count for operation, count in counts.items() if "convolution" in str(operation))

"""Measurement of both stages on a GPU within a time limit: rows in order of decreasing value, each written at once."""

import argparse
import gc
import time
from typing import Any

import torch
from tabulate import tabulate

from pretrain.common.errors import UserError, first_line
from pretrain.common.files import write_json
from tools.benchmarks import gpu_rows
from tools.benchmarks.gpu_rows import Measurement
from tools.benchmarks.machine import describe_environment, describe_gpu

_HEAD = ["", "images/s", "ms/step", "peak MiB", "syncs/step", "conv / peak"]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure and print the rows; a row that fails, or no longer fits into the time limit, is recorded with the reason.

    ``args.output`` is written after each row, because a machine that is lent may be taken away.

    Raises:
        UserError: there is no GPU, and ``--small`` is not given.
    """
    start = time.monotonic()
    if not torch.cuda.is_available() and not args.small:
        raise UserError("torch sees no CUDA device; check nvidia-smi, or add --small to try the command without one")
    numbers: dict[str, Any] = {**describe_gpu(), **describe_environment()}
    numbers |= {"small": args.small, "rows": {}}
    for row in gpu_rows.list_rows(gpu_rows.SMALL if args.small else gpu_rows.FULL):
        if args.rows in row.name:
            numbers["rows"][row.name] = result = _measure(row, args.seconds - (time.monotonic() - start))
            print(f"{row.name}: {describe_result(result)}", flush=True)
            if args.output:
                write_json(args.output, numbers)
    print("\n\n".join(build_tables(numbers["rows"])))
    return numbers


def _measure(row: Measurement, seconds_left: float) -> dict[str, Any]:
    """Run the measurement of a row; return its numbers, or why there are none."""
    if seconds_left < row.seconds:
        return {"skipped": f"it takes about {row.seconds:.0f} s; {max(0, seconds_left):.0f} s were left"}
    start = time.monotonic()
    threads = torch.get_num_threads()
    try:
        gc.collect()
        torch.cuda.empty_cache()
        result = row.measure()
    except Exception as error:  # out of memory, a package that is missing, a kernel that this GPU lacks
        result = {"failed": f"{type(error).__name__}: {first_line(error)}"}
    torch.set_num_threads(threads)  # the losses are timed on one
    return {**result, "row_seconds": round(time.monotonic() - start, 1)}


def describe_result(result: dict[str, Any]) -> str:
    """Describe a row's result in one line of the log."""
    for word in ("skipped", "failed"):
        if word in result:
            return f"{word}: {result[word]}"
    return f"{result['row_seconds']} s"


def build_tables(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Return Markdown blocks: a table of the rates, one per row of losses, and why other rows were not measured."""
    rates = [[name, *_format_rate(result)] for name, result in rows.items() if "images_per_second" in result]
    blocks = [tabulate(rates, _HEAD, "github", disable_numparse=True)]
    for name, result in rows.items():
        if "objectives" in result:
            head = ["loss", "ms", "times faster", "times smaller"]
            losses = [
                [loss, form["ms"], form["times_faster"], form["times_smaller"] or 0.0]
                for loss, form in result["objectives"].items()
            ]
            blocks.append(f"{name.capitalize()}, compared with explicit logits ({result['sizes']}):")
            blocks.append(tabulate(losses, head, "github", floatfmt=("", ".2f", ".1f", ".1f")))
    missing = [f"{name} ({describe_result(row)})" for name, row in rows.items() if {"skipped", "failed"} & row.keys()]
    return [*blocks, f"Not measured: {'; '.join(missing)}."] if missing else blocks


def _format_rate(result: dict[str, Any]) -> list[str]:
    """Return the cells of `_HEAD` of a row; a dash for what it does not measure."""
    waits = result.get("synchronizations")
    fraction = result.get("convolution_share")
    return [
        f"{result['images_per_second']:,.0f}",
        f"{result['milliseconds']:.1f}",
        f"{result['peak_mib']:,.0f}" if result.get("peak_mib") else "-",
        f"{sum(waits.values()):g}" if waits else "-",
        f"{fraction:.0%}" if fraction else "-",
    ]

"""Measurement of both stages on a GPU within a time limit: rows in order of decreasing value, each written at once."""

import argparse
import multiprocessing
import re
import signal
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from tabulate import tabulate

from benchmarks import gpu_rows
from benchmarks.gpu_rows import CEILINGS, Measurement
from benchmarks.machine import describe_environment, describe_gpu
from pretrain.common.errors import UserError, first_line
from pretrain.common.files import read_json, write_json

_HEAD = ["", "images/s", "ms/step", "peak MiB", "syncs/step", "conv / peak", "conv / product", "moved / copy", "views"]
_UNKNOWN_COMMIT = "the commit is unknown, so that docs/benchmarks.md cannot show these numbers"
_EXIT_S = 5.0  # for the process of a row to end after it has sent its result


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure and print the rows; a row that fails, or no longer fits into the time limit, is recorded with the reason.

    Each row has a process of its own: after some errors of CUDA, a process can compute nothing more. ``args.output`` is
    written after each row, because a machine that is lent may be taken away.

    Raises:
        UserError: there is no GPU, and ``--small`` is not given; no row has the text of ``--rows``; or the rows of
            ``--skip-measured`` are of another GPU or commit.
    """
    start = time.monotonic()
    all_rows = gpu_rows.list_rows(gpu_rows.SMALL if args.small else gpu_rows.FULL)
    rows = [row for row in all_rows if args.rows in row.name]
    if not rows:
        raise UserError(f"no row contains {args.rows!r}; choose a text of {', '.join(row.name for row in all_rows)}")
    gpu = call_in_process(describe_gpu, 60.0)  # here, CUDA stays untouched: it cannot be used in a fork otherwise
    if "failed" in gpu:
        raise UserError(f"the GPU cannot be used: {gpu['failed']}; check nvidia-smi")
    if gpu["gpu"] is None and not args.small:
        raise UserError("torch sees no CUDA device; check nvidia-smi, or add --small to try the command without one")
    numbers: dict[str, Any] = {**gpu, **describe_environment(), "small": args.small}
    numbers["rows"] = _read_measured(args.skip_measured, numbers) if args.skip_measured else {}
    if not is_commit(numbers["git"]):
        print(
            f"{_UNKNOWN_COMMIT}; where git is, run: git rev-parse HEAD > GIT_STATE, and copy that file too", flush=True
        )
    for row in rows:
        if row.name not in numbers["rows"]:
            numbers["rows"][row.name] = result = _measure(row, args.seconds - (time.monotonic() - start))
            print(f"{row.name}: {describe_result(result)}", flush=True)
            if args.output:
                write_json(args.output, numbers)
    print("\n\n".join(build_tables(numbers["rows"])))
    return numbers


def is_commit(git_state: str) -> bool:
    """Return whether the state of the code names its commit."""
    return bool(re.match(r"[0-9a-f]{40}\b", git_state))


def _read_measured(path: str, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Read the rows that an earlier call has measured."""
    earlier = read_json(path)
    for key in ("gpu", "git", "small"):
        if earlier.get(key) != numbers[key]:
            problem = f"{path} was measured with {key} {earlier.get(key)}, not {numbers[key]}"
            raise UserError(f"{problem}; omit --skip-measured, and choose another --output")
    return {name: row for name, row in earlier["rows"].items() if not {"skipped", "failed"} & row.keys()}


def _measure(row: Measurement, seconds_left: float) -> dict[str, Any]:
    """Run the measurement of a row; return its numbers, or why there are none."""
    if seconds_left < row.seconds:
        return {"skipped": f"it takes about {row.seconds:.0f} s; {max(0, seconds_left):.0f} s were left"}
    start = time.monotonic()
    result = call_in_process(row.measure, seconds_left)
    return {**result, "row_seconds": round(time.monotonic() - start, 1)}


def call_in_process(function: Callable[[], dict[str, Any]], limit_s: float) -> dict[str, Any]:
    """Call a function in a forked process; return its result, or ``{"failed": reason}``."""
    context = multiprocessing.get_context("fork")  # imports take seconds
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(function, sender))
    try:
        process.start()  # an interrupt may come before the next line
        sender.close()
        if not receiver.poll(limit_s):
            return {"failed": f"it did not end within the {limit_s:.0f} s that were left"}
        result = receiver.recv()
        process.join(_EXIT_S)
        return result
    except EOFError:
        process.join()
        return {"failed": f"its process ended with status {process.exitcode}"}
    finally:
        if process.pid is not None:
            process.kill()
            process.join()


def _send_result(function: Callable[[], dict[str, Any]], sender: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    try:
        result = function()
    except Exception as error:  # out of memory, a package that is missing, a kernel that this GPU lacks
        result = {"failed": f"{type(error).__name__}: {first_line(error)}"}
    sender.send(result)


def describe_result(result: dict[str, Any]) -> str:
    """Describe a row's result in one line of the log."""
    for word in ("skipped", "failed"):
        if word in result:
            return f"{word}: {result[word]}"
    return f"{result['row_seconds']} s"


def build_tables(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Return Markdown blocks: a table of the rates, one per row of other numbers, and why rows were not measured."""
    ceilings = rows.get(CEILINGS, {})
    rates = [[name, *_format_rate(row, ceilings)] for name, row in rows.items() if "images_per_second" in row]
    blocks = [tabulate(rates, _HEAD, "github", disable_numparse=True)]
    if "product_tflops" in ceilings:
        products = ", ".join(f"{value:.1f} ({name})" for name, value in ceilings["product_tflops"].items())
        copies = f"{ceilings['device_gb_per_second']:.0f} GB/s on the GPU (read and written)"
        copies += f", {ceilings['host_to_device_gb_per_second']:.1f} GB/s from pinned memory to it"
        blocks.append(f"Ceilings: copies {copies}; matrix products in TFLOP/s: {products}.")
    for name, row in rows.items():
        if "peak_mib_by_images" in row:
            peaks = [f"{peak or 0:,.0f} ({images})" for images, peak in row["peak_mib_by_images"].items()]
            blocks.append(f"{name}: peak MiB (images per step) {', '.join(peaks)}.")
        if "objectives" in row:
            head = ["loss", "ms", "times faster", "times smaller"]
            losses = [
                [loss, form["ms"], form["times_faster"], form["times_smaller"] or 0.0]
                for loss, form in row["objectives"].items()
            ]
            blocks.append(f"{name.capitalize()}, compared with explicit logits ({row['sizes']}):")
            blocks.append(tabulate(losses, head, "github", floatfmt=("", ".2f", ".1f", ".1f")))
    missing = [f"{name} ({describe_result(row)})" for name, row in rows.items() if {"skipped", "failed"} & row.keys()]
    return [*blocks, f"Not measured: {'; '.join(missing)}."] if missing else blocks


def _format_rate(row: dict[str, Any], ceilings: dict[str, Any]) -> list[str]:
    """Return the cells of `_HEAD` of a row; a dash for what it does not measure."""
    seconds = row["milliseconds"] / 1e3
    waits = row.get("synchronizations")
    fractions = [row.get("convolution_share"), None, None, None]
    if "product_tflops" in ceilings and "convolution_tflop" in row:
        product = ceilings["product_tflops"][row["precision"]]
        views = row["view_mib"] * 2**20 / 1e9 / ceilings["host_to_device_gb_per_second"]
        fractions[1] = row["convolution_tflop"] / product / seconds
        fractions[3] = views / seconds
        if "moved_gib" in row:
            fractions[2] = row["moved_gib"] * 2**30 / 1e9 / ceilings["device_gb_per_second"] / seconds
    return [
        f"{row['images_per_second']:,.0f}",
        f"{row['milliseconds']:.1f}",
        f"{row['peak_mib']:,.0f}" if row.get("peak_mib") else "-",
        f"{sum(waits.values()):g}" if waits else "-",
        *(f"{fraction:.0%}" if fraction else "-" for fraction in fractions),
    ]

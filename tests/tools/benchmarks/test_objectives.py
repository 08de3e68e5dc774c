"""The naive forms are the same losses, and a row is printed for each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import benchmark
from tools.benchmarks import objectives

SIZES = ["--queries", "3", "--keys", "2", "--dims", "4", "--negatives", "9", "--anchors", "6", "--rounds", "1",
         "--device", "cpu"]  # fmt: skip


def test_a_row_is_printed_and_written_for_each_objective(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert benchmark.main(["objectives", *SIZES, "--json", str(tmp_path / "a.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("N 3, M' 2, D 4, K 9, A 6, cpu")
    names = [*objectives.NAIVE, "simclr", "tcl"]
    assert [line.split()[0] for line in lines[3:]] == names
    assert all(float(number) > 0 for line in lines[3:] for number in line.split()[1:4])
    written = json.loads((tmp_path / "a.json").read_text())
    assert list(written["objectives"]) == names and written["cpu"] and written["torch"]


def test_memory_grows_with_the_keys_in_the_vanilla_form_only(capsys: pytest.CaptureFixture[str]):
    sizes = ["--keys", "1", "6", "--queries", "32", "--dims", "8", "--negatives", "20000", "--device", "cpu"]
    assert benchmark.main(["memory", *sizes]) == 0
    one, six = ([float(cell) for cell in line.split()] for line in capsys.readouterr().out.splitlines()[3:])
    assert (one[:2], six[:2]) == ([1, 32], [6, 32])
    assert six[2] > 2 * one[2] and all(six[column] < 1.2 * one[column] for column in (3, 4, 5))
    assert six[2] > 5 * six[3] and six[4] > 2 * six[5]

"""The gradients of TCL's theorems along a real training: as its equations say for the weights k1 and k2 of the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pretrain.common.errors import UserError
from tests.pretrain import runs
from tools import gradient_ratios

OBJECTIVE = ("METHOD.NUM_KEYS", "1", "METHOD.JCL_LAMBDA", "1.0", "METHOD.LABELS", "class")


def test_the_theorems_hold_along_a_training(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name, k1, k2 in (("pull", "5000.0", "1.0"), ("push", "1.0", "1.5")):
        runs.run(images, tmp_path / name, *OBJECTIVE, "METHOD.NAME", "tcl", "METHOD.K1", k1, "METHOD.K2", k2)
    words = [str(tmp_path / "pull"), str(tmp_path / "push"), "--out", str(tmp_path / "out" / "ratios.svg")]
    gradient_ratios.main(words)
    found = json.loads((tmp_path / "out" / "ratios.json").read_text())
    pull, push = found[words[0]], found[words[1]]
    assert pull["step"] == push["step"] == list(range(1, 1 + 2 * runs.STEPS_PER_EPOCH))
    assert min(pull["theorem_1"] + push["theorem_1"]) > 1
    assert set(pull["theorem_2"]) == {1.0} and min(push["theorem_2"]) > 1
    assert max(pull["hard_negative"]) < 1  # so large a k1 takes weight from the negatives
    picture = (tmp_path / "out" / "ratios.svg").read_bytes()
    assert b"<svg" in picture
    gradient_ratios.main(words)
    assert (tmp_path / "out" / "ratios.svg").read_bytes() == picture
    line = json.loads((tmp_path / "push" / "metrics.json").read_text().splitlines()[0])
    assert push["theorem_2"][0] == line["hard_negative_gradient"] / line["hard_negative_gradient_k2_1"]
    assert f"{words[0]}: theorem_1 {min(pull['theorem_1']):.4g} to " in capsys.readouterr().out


def test_a_run_of_another_method_is_refused(tmp_path: Path):
    (tmp_path / "metrics.json").write_text('{"iteration": 0, "loss": 1.0}\n')
    with pytest.raises(UserError, match="has logged no gradients of hard pairs; name runs"):
        gradient_ratios.main([str(tmp_path)])

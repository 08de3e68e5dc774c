"""A detector's results, and a backbone extracted from it, record the pretraining that they come from."""

import json

import pytest

from pretrain.common.weights.backbone import read_backbone
from pretrain.common.weights.provenance import is_made_from
from tests.pretrain.runs import run
from tests.transfer import tiny_coco
from tools import report
from tools.reporting.document import render_markdown
from transfer.weights.convert import convert
from transfer.weights.load import read_weights

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


def test_fine_tuning_keeps_where_its_backbone_came_from(images, tmp_path, name) -> None:
    """The pretraining is JCL with a dense head."""
    words = "METHOD.DENSE_WEIGHT 0.5 MODEL.STEM imagenet SOLVER.EPOCHS 1 SEED 3"
    run(images, tmp_path / "run", *words.split())
    convert(tmp_path / "run", tmp_path / "w.pth", encoder="key")
    tiny_coco.edit(name, lambda content: content["annotations"][0].update(bbox=[0, 0, 0]))
    keys = {"MODEL__WEIGHTS": str(tmp_path / "w.pth"), "SOLVER__MAX_ITER": 1}
    results = tiny_coco.fine_tune(tiny_coco.command(tmp_path, f"{name}:skip_bad", "torchvision", **keys))
    # Data are named as the user named them, wherever the run folder keeps the copy without the bad records.
    assert results["protocol"]["train"] == results["protocol"]["test"] == [f"{name}:skip_bad"]
    assert list(results["datasets"]) == [f"{name}:skip_bad"] and f"{tmp_path}/out/datasets" not in results["config"]
    first = results["weights"]["provenance"]

    evaluated = read_weights(tmp_path / "out" / "model_final.pth").summary()["provenance"]  # of --eval-only
    assert evaluated["source_sha256"] == first["source_sha256"] and evaluated["method"] == "jcl"
    assert len(evaluated["fine_tuned_on"]) == 1

    done = convert(tmp_path / "out", tmp_path / "plain.pth", to_torchvision=True)
    reread = read_backbone(tmp_path / "plain.pth").provenance  # a plain state dict: it is recorded beside the file
    for provenance, source in ((done.provenance, "model_final.pth"), (reread, "plain.pth")):
        assert (provenance.method, provenance.epoch, provenance.config) == ("jcl", 1, first["config"])
        assert provenance.encoder == "key" and len(provenance.fine_tuned_on) == 1
        assert provenance.source == source
    chain = ["plain.pth", "model_final.pth", "checkpoint_final.pth"]
    assert [record.source for record in reread.chain()] == chain
    # A probe of it is made from the pretraining; that of another version has no chain.
    assert is_made_from({"source": reread.to_json()}, first["source_sha256"])
    assert not is_made_from({"source": reread.to_json()}, "another")

    shown = render_markdown(report.build_report([tmp_path / "out"]))
    row = next(line for line in shown.splitlines() if line.startswith("| out "))  # the costs have another
    assert [cell.strip() for cell in row.split("|")[1:3]] == ["out", "jcl"]
    assert f"- Every pretraining run: pretrained on folder:{images}, epochs 1, seed 3.\n" in shown
    assert f"- Weights: out: {tmp_path.name}/run/checkpoint_final.pth ({first['source_sha256'][:8]}).\n" in shown
    # Predictions are in a folder that is named after the copy without the bad records.
    predictions = results["predictions"][f"{name}:skip_bad"]
    assert isinstance(json.loads((tmp_path / "out" / predictions).read_text()), list)

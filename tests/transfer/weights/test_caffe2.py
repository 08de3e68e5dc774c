"""MSRA's files with Caffe2's names are converted to what Detectron2 loads from them."""

import functools
import pickle
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pretrain.common.weights.backbone import extract_backbone, read_backbone
from pretrain.common.weights.file import WeightsFile
from pretrain.common.weights.resnet_names import PREFIX, to_torchvision
from tests.errors import refused
from tests.resnets import caffe2, detectron2_stages, resnet_state
from tests.transfer import tiny_coco
from transfer.torchvision_engine.backbone import BottomUp
from transfer.weights.caffe2 import from_caffe2
from transfer.weights.convert import convert
from transfer.weights.load import Weights, check_weights_fit, load_weights, read_weights
from transfer.weights.verify import RESNET_STAGES, sample_image

MSRA = {
    "MODEL__RESNETS__DEPTH": 50,
    "MODEL__RESNETS__RES2_OUT_CHANNELS": 256,
    "MODEL__RESNETS__STRIDE_IN_1X1": True,
    "MODEL__PIXEL_MEAN": [103.53, 116.28, 123.675],
    "MODEL__PIXEL_STD": [1.0, 1.0, 1.0],
    "INPUT__FORMAT": "BGR",
}


class Case(NamedTuple):
    """One of the two kinds of files, and its conversion."""

    folded: bool
    source: Path
    differences: dict[str, float]
    weights: Weights


@pytest.fixture(scope="module", params=[False, True], ids=["with statistics", "folded"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    source = tmp_path_factory.mktemp("msra") / "R-50.pkl"
    arrays = caffe2(request.param)
    arrays["conv1_w_momentum"] = np.zeros_like(arrays["conv1_w"])
    # As Python 2 wrote them: Detectron's wrapper, or none.
    source.write_bytes(pickle.dumps({"blobs": arrays} if request.param else arrays, protocol=2))
    output = source.with_name("w.pth")
    return Case(request.param, source, convert(source, output).differences, read_weights(output))


def expected(folded: bool) -> dict[str, Tensor]:
    """Return the state in torchvision's names; tensors that the file lacks have Detectron2's initial values."""
    state = resnet_state("resnet50", head=False)
    for name, tensor in state.items():
        if name.endswith("num_batches_tracked") or (folded and name.endswith("running_mean")):
            tensor.zero_()
        elif folded and name.endswith("running_var"):
            tensor.fill_(1)
    return state


def in_torchvision(weights: Weights) -> dict[str, Tensor]:
    """Compute res2-res5 of the torchvision engine's backbone in evaluation mode."""
    model = BottomUp("resnet50", nn.BatchNorm2d, stride_in_1x1=True, freeze_at=0)
    holder = nn.ModuleDict({"backbone": nn.ModuleDict({"bottom_up": model})})
    load_weights(holder.state_dict, weights)
    with torch.no_grad():
        return model.eval()(sample_image()[..., :64, :64])


def test_every_tensor_arrives(case: Case) -> None:
    assert list(case.differences) == list(RESNET_STAGES) and max(case.differences.values()) <= 1e-4
    state = to_torchvision({name.removeprefix(PREFIX): tensor for name, tensor in case.weights.state.items()})
    complete = expected(case.folded)
    assert set(state) == set(complete)
    assert [name for name in complete if not torch.equal(state[name], complete[name])] == []
    direct = read_weights(case.source)  # as MODEL.WEIGHTS, without a conversion
    assert direct.state.keys() == {name for name in case.weights.state if "num_batches" not in name}
    assert all(torch.equal(tensor, case.weights.state[name]) for name, tensor in direct.state.items())
    recorded = direct.summary()["provenance"]
    assert len(recorded) >= 5 and recorded.items() <= case.weights.summary()["provenance"].items()


@pytest.mark.detectron2
def test_features_are_those_that_detectron2_computes_from_the_source(case: Case) -> None:
    image = sample_image()[..., :64, :64]
    theirs = detectron2_stages(case.source, 50, "FrozenBN", image, stride_in_1x1=True)
    converted = detectron2_stages(case.weights.path, 50, "FrozenBN", image, stride_in_1x1=True)
    for stage, ours in in_torchvision(case.weights).items():
        assert torch.equal(theirs[stage], converted[stage])
        assert torch.allclose(ours, theirs[stage], rtol=1e-4, atol=1e-4 * ours.abs().max().item())


def test_the_config_must_be_msras(case: Case, tmp_path: Path) -> None:
    norm = "FrozenBN" if case.folded else "SyncBN"
    good = tiny_coco.config(tmp_path, "x", **MSRA, MODEL__RESNETS__NORM=norm)
    check_weights_fit(case.weights, good)
    assert (
        case.weights.summary()["provenance"]["method"] == "supervised_msra"
    )  # by which the report knows the paper's start
    if case.folded:  # batch norm would divide by statistics that the scale already holds
        good.MODEL.RESNETS.NORM = "SyncBN"
        refused(lambda: check_weights_fit(case.weights, good), "MODEL.RESNETS.NORM", "SyncBN", "w.pth")


def test_msras_weights_are_not_converted_to_torchvisions_names(case: Case, tmp_path: Path) -> None:
    refused(lambda: read_backbone(case.weights.path), case.weights.path)
    for source in (case.source, case.weights.path):
        refused(lambda source=source: convert(source, tmp_path / "plain.pth", to_torchvision=True), "STRIDE_IN_1X1")
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_missing_or_unknown_are_refused() -> None:
    tensors = {name: torch.from_numpy(array) for name, array in caffe2().items()}
    unknown = {**tensors, "res6_0_branch2a_w": torch.zeros(1)}
    del tensors["res4_5_branch2b_bn_gamma"]
    for damaged, name in ((tensors, "layer3.5.bn2.weight"), (unknown, "res6_0_branch2a_w")):
        file = from_caffe2(WeightsFile(Path("R-50.pkl"), "", {}, damaged, None))
        refused(functools.partial(extract_backbone, file), name)

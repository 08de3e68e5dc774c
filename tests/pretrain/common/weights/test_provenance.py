"""Records are written and read without loss, also those of other versions; a chain is asked for a file."""

import json
from typing import Any

import pytest

from pretrain.common.weights.provenance import MSRA, InputFormat, Provenance, is_made_from

PRETRAINING = "METHOD: {NAME: jcl}\nVIEWS: {MEAN: [0.5, 0.4, 0.3], STD: [0.2, 0.2, 0.2]}\n"
# As the first version wrote it: flat, without a chain.
FLAT: dict[str, Any] = {
    "MODEL.RESNETS.DEPTH": 50,
    "MODEL.RESNETS.STRIDE_IN_1X1": False,
    "MODEL.RESNETS.RES2_OUT_CHANNELS": 256,
    "INPUT.FORMAT": "RGB",
    "MODEL.PIXEL_MEAN": [127.5, 102.0, 76.5],
    "MODEL.PIXEL_STD": [51.0, 51.0, 51.0],
    "source": "checkpoint_final.pth",
    "source_sha256": "ab" * 32,
    "arch": "resnet50",
    "stem": "imagenet",
    "prefix": "state_dict.encoder_q.",
    "encoder": "query",
    "config": PRETRAINING,
    "method": "jcl",
    "epoch": 200,
    "step": 1000,
}
NETWORK = {"arch": "resnet50", "stem": "imagenet", "prefix": "state_dict.encoder_q.", "encoder": "query"}
CHECKPOINT = Provenance.from_checkpoint(
    "checkpoint_final.pth", "ab" * 32, {"config": PRETRAINING, "epoch": 200, "step": 1000}, None, **NETWORK
)
DETECTOR = Provenance.from_detector(CHECKPOINT, MSRA, ("coco_2017_train",))
CONVERTED = Provenance.from_checkpoint(
    "model_final.pth", "cd" * 32, {"epoch": 9, "config": "A: 1"}, DETECTOR, **NETWORK
)
PROBED = Provenance.from_checkpoint("plain.pth", "ef" * 32, {}, CONVERTED, **NETWORK)


def test_a_checkpoint_is_recorded_as_by_the_first_version() -> None:
    assert json.dumps(CHECKPOINT.to_json()) == json.dumps(FLAT)
    assert Provenance.from_json(FLAT) == CHECKPOINT


@pytest.mark.parametrize(
    "record",
    [
        CHECKPOINT,
        DETECTOR,
        CONVERTED,
        PROBED,
        Provenance.random("resnet18", "cifar", 0),
        Provenance.from_caffe2(folded=True),
    ],
)
def test_what_is_written_is_read_without_loss(record: Provenance) -> None:
    text = json.dumps(record.to_json())
    assert Provenance.from_json(json.loads(text)) == Provenance.from_json(text) == record


def test_a_random_network_is_recorded_as_by_the_first_version() -> None:
    written = Provenance.random("resnet18", "cifar", 3).to_json()
    assert str(written) == "{'source': 'random', 'seed': 3, 'arch': 'resnet18', 'stem': 'cifar'}"


def test_a_detector_keeps_its_pretraining_and_has_its_own_input() -> None:
    for record in (CONVERTED, PROBED):
        assert (record.method, record.epoch, record.config, record.input) == ("jcl", 200, PRETRAINING, MSRA)
        assert record.fine_tuned_on == ("coco_2017_train",)
    again = Provenance.from_detector(PROBED, InputFormat("RGB"), ("balloons",))
    assert again.fine_tuned_on == ("coco_2017_train", "balloons") and again.input == InputFormat("RGB")
    assert [record.source for record in PROBED.chain()] == ["plain.pth", "model_final.pth", "checkpoint_final.pth"]


def test_records_of_other_versions_and_programs_are_read() -> None:
    newer = {**FLAT, "license": "MIT", "MODEL.NEW": 3, "earlier": {"source": "a.pth", "unknown": [1]}}
    read = Provenance.from_json(newer)
    assert read and read.earlier == Provenance("a.pth") and read.to_keys() == CHECKPOINT.to_keys()
    without_chain = Provenance.from_json({**FLAT, "earlier_source": "a.pth", "fine_tuned_on": ["x"]})
    assert without_chain and without_chain.earlier == Provenance("a.pth") and without_chain.fine_tuned_on == ("x",)
    wrong = Provenance.from_json({"source": 3, "method": ["jcl"], "epoch": True, "INPUT.FORMAT": 1, "arch": "resnet18"})
    assert wrong == Provenance(arch="resnet18")
    for other in ("another program's", "[1]", None, 3, [], {}, {"license": "MIT"}):
        assert Provenance.from_json(other) is None


RESULTS = {  # what a stage writes -> whether it was made from the checkpoint ab... and from another
    "probe": ({"source": CHECKPOINT.to_json()}, True, False),
    "probe of a converted file": ({"source": PROBED.to_json()}, True, False),
    "fine-tuning": ({"weights": {"path": "w.pth", "sha256": "12", "provenance": FLAT}}, True, False),
    "conversion": ({**FLAT, "file_sha256": "34"}, True, False),
    "random": ({"source": Provenance.random("resnet18", "cifar", 0).to_json()}, True, True),
    "fine-tuning from random values": ({"weights": {"path": "", "sha256": "", "provenance": {}}}, True, True),
    "pretraining": ({"checkpoint_sha256": "56", "method": "jcl"}, True, True),
    "a text that contains it": ({"source": {"source": "ab" * 32, "source_sha256": "56"}}, False, False),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_who_made_a_result_is_asked_of_its_chain(kind: str) -> None:
    results, of_this, of_another = RESULTS[kind]
    assert is_made_from(results, "ab" * 32) == of_this
    assert is_made_from(results, "99" * 32) == of_another

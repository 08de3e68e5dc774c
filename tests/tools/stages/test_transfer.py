"""The arguments of a fine-tuning stage in records and in its identity are those of earlier versions."""

import pytest

from tests.errors import refused
from tools.stages.base import Stage
from tools.stages.registry import find_kind
from tools.stages.transfer import Transfer

WORDS = {
    "--resume --engine torchvision OUTPUT_DIR /runs/a": "transfer",
    "--eval-only --engine detectron2 --visualize 3 OUTPUT_DIR /runs/a/eval_only": "evaluation",
}


@pytest.mark.parametrize("text", WORDS)
def test_words_of_records(text: str) -> None:
    kind = find_kind(WORDS[text])
    options = Transfer.Options(**Transfer.upgrade_arguments(text.split()))
    stage: Stage = kind(text.split()[-1], options)
    assert stage.arguments == ["transfer", text.split()]
    assert stage.describe_work(stage.arguments) == text.split()[:3]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "--resume",
        "--train --engine torchvision OUTPUT_DIR a",
        "--resume --engine torchvision --tasks 2 OUTPUT_DIR a",
        "--resume --engine torchvision --visualize two OUTPUT_DIR a",
        "--resume --engine torchvision OUTPUT_DIR",
    ],
)
def test_words_of_another_version_are_refused(text: str) -> None:
    refused(lambda: Transfer.upgrade_arguments(text.split()), "record", "rerun the original command")

"""The arguments of a fine-tuning stage are read from records and written as earlier versions wrote them."""

import pytest

from tests.errors import refused
from tools.launcher.arguments import TransferArguments

WORDS = {
    "--resume --engine torchvision OUTPUT_DIR /runs/a": TransferArguments("torchvision", "/runs/a"),
    "--eval-only --engine detectron2 --visualize 3 OUTPUT_DIR /runs/a/eval_only": TransferArguments(
        "detectron2", "/runs/a/eval_only", eval_only=True, visualize=3
    ),
}


@pytest.mark.parametrize("text", WORDS)
def test_words_of_records(text: str) -> None:
    arguments = TransferArguments.from_words(text.split())
    assert arguments == WORDS[text]
    assert arguments.to_words() == text.split()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "--resume",
        "--resume --engine torchvision",
        "--train --engine torchvision OUTPUT_DIR a",
        "--resume --engine torchvision --tasks 2 OUTPUT_DIR a",
        "--resume --engine torchvision --visualize two OUTPUT_DIR a",
        "--resume --engine torchvision OUTPUT_DIR",
    ],
)
def test_words_of_another_version_are_refused(text: str) -> None:
    refused(lambda: TransferArguments.from_words(text.split()), "record", "rerun the original command")

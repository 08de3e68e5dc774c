"""KEY VALUE pairs may stand anywhere among the options; --help-keys lists the keys and ends the command."""

import argparse

import pytest

from pretrain.common.config import overrides
from pretrain.common.config.keys import Effect, Key
from pretrain.common.config.limits import AT_LEAST_0
from tests.errors import refused

KEYS = [
    Key("SOLVER.BASE_LR", 0.03, AT_LEAST_0, "learning rate", Effect.RECIPE, aliases="LEARNING_RATE LR"),
    Key("DATA.TRAIN", "", None, "", Effect.RESULT),
]


def parser() -> argparse.ArgumentParser:
    program = argparse.ArgumentParser(prog="train")
    program.add_argument("--config-file", required=True)
    program.add_argument("--resume", action="store_true")
    overrides.add_keys(program, lambda: KEYS)
    overrides.add_usage(program)
    return program


def test_options_may_follow_key_value() -> None:
    words = ["SEED", "-1", "--config-file", "a.yaml", "SOLVER.BASE_LR", "1e-3", "--resume"]
    args, key_values = overrides.parse(parser(), words)
    assert (args.config_file, args.resume) == ("a.yaml", True)
    assert key_values == ["SEED", "-1", "SOLVER.BASE_LR", "1e-3"]


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("--confg-file=x", "did you mean '--config-file'"),
        *((word, "SOLVER.BASE_LR VALUE") for word in ("--base-lr", "--base_lr=0.1", "--lr")),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_option_or_key(word: str, remedy: str) -> None:
    words = ["--config-file", "a.yaml", "SEED", "1", word]
    refused(lambda: overrides.parse(parser(), words), "train: ", f"'{word}'", remedy)

"""The number of images that no batch of an epoch contains is logged where it matters."""

import logging

import pytest

from pretrain.model.batch_split import log_left_out

CASES = [  # images, batch, divisor, level and the end of the line
    (
        60,
        32,
        1,
        logging.WARNING,
        "SOLVER.IMS_PER_BATCH 32 leaves out 28 of 60 images in each epoch",
        "; 30 would leave out none",
    ),
    (60, 32, 8, logging.WARNING, "leaves out 28 of 60", "; 56 would leave out 4"),
    (1000, 256, 2, logging.WARNING, "leaves out 232 of 1,000", "; 250 would leave out none"),
    (1000, 128, 4, logging.WARNING, "leaves out 104 of 1,000", "; 124 would leave out 8"),
    (1000, 154, 2, logging.INFO, "leaves out 76 of 1,000", "; 142 would leave out 6"),
    (7, 4, 4, logging.WARNING, "leaves out 3 of 7", "different ones each time"),
]


@pytest.mark.parametrize(("images", "batch", "divisor", "level", "start", "end"), CASES)
def test_the_nearest_batch_that_uses_more_is_named(caplog, images, batch, divisor, level, start, end):
    caplog.set_level(logging.INFO)
    log_left_out("SOLVER.IMS_PER_BATCH", images, batch, divisor)
    assert caplog.records[0].levelno == level and start in caplog.text and caplog.records[0].message.endswith(end)


@pytest.mark.parametrize(("images", "batch"), [(64, 32), (10_000, 256), (1_281_167, 256)])
def test_less_than_one_in_a_hundred_is_not_named(caplog, images, batch):
    caplog.set_level(logging.INFO)
    log_left_out("SOLVER.IMS_PER_BATCH", images, batch, 1)
    assert not caplog.records

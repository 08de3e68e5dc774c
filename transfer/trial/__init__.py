"""A trial of a config: what a library would refuse later is refused before a run, in one line that names the key.

`parts` builds the parts of an engine and runs them on a made-up image, in about a second and on the CPU. If that fails,
`culprit` finds the key: the config records which keys are read (`recorded_config`). Once the data are read, one batch
is mapped before anything else is loaded.
"""

import contextlib
import copy
import dataclasses
import logging
import random
import warnings
from collections.abc import Iterator

import numpy as np
import torch
from fvcore.common.config import CfgNode

from pretrain.common import distributed
from pretrain.common.errors import UserError

from ..engine import Engine
from ..keys import KEYS
from ..training.samplers import TrainingData
from . import culprit, parts
from .recorded_config import Reads

log = logging.getLogger(__name__)


def try_config(engine_class: type[Engine], cfg: CfgNode, *, eval_only: bool) -> set[str]:
    """Build and run the parts of a run with this config; return the names of the keys that they read.

    A failure is raised only if a key explains it: the run itself decides about all others. Returns no names then.

    Raises:
        UserError: the engine refuses a key's value.
    """
    if distributed.world_size() > 1:  # of a group that the caller had joined: the other ranks would have to take part
        return set()

    def attempt(tried: CfgNode, reads: Reads) -> None:
        with _leave_no_trace():
            parts.run(engine_class, tried, reads, eval_only=eval_only)

    reads = Reads()
    try:
        attempt(cfg, reads)
    except UserError:
        raise
    except Exception as error:
        package = culprit.find_missing_package(error)
        if package:
            raise UserError(f"this config needs the package {package}; run: pip install {package}") from error
        keys = [key for key in reads.latest_first() if key in KEYS and key not in parts.SMALL]
        refusal = culprit.explain(error, cfg, keys, lambda changed: attempt(changed, Reads()))
        if refusal:
            raise UserError(refusal) from error
        log.debug("no key explains the failure of the trial", exc_info=error)
        return set()
    return set(reads)


def try_batch(data: TrainingData, seed: int, start: int) -> None:
    """Map the images of this rank's batch number ``start`` in this process, with a copy of the mapper.

    Raises:
        UserError: an image cannot be read or mapped. What a user's module raises is not translated.
    """
    try:
        data = dataclasses.replace(data, mapper=copy.deepcopy(data.mapper))
    except Exception:  # a user's mapper, which may count its calls, but cannot be copied
        return
    try:
        with _keep_random_states():
            next(data.batches(seed=seed, start=start, workers=0))
    except UserError:
        raise
    except Exception as error:
        failure = culprit.Failure(error)
        if not failure.is_explicable:
            raise
        where = f"{', '.join(error.__notes__)} ({failure.place})"
        raise UserError(
            f"a training image is refused: {failure.reason}, {where}; correct the image or its annotations"
        ) from error


@contextlib.contextmanager
def _keep_random_states() -> Iterator[None]:
    """Restore the states of the random generators at the end."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextlib.contextmanager
def _leave_no_trace() -> Iterator[None]:
    """Restore the random states at the end; the run itself shows the warnings that are suppressed meanwhile."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with _keep_random_states(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)

"""What the stages of run folders have completed: by which kind, which work, and from which checkpoint."""

from pathlib import Path
from typing import Any

from pretrain.common.errors import UserError
from pretrain.common.run.folder import read_stage
from pretrain.common.run.state import read_state
from pretrain.common.weights import provenance

from . import SUMMARIES
from .base import Stage
from .inputs import hash_content
from .registry import find_kind


def find_recorded_kind(name: str) -> type[Stage]:
    """Return the kind of stage that a run records, or `Stage` itself, which says nothing, if it is none of ours."""
    return find_kind(name) if name in SUMMARIES else Stage


def read_kind(folder: str | Path) -> type[Stage]:
    """Read the kind of stage that a run folder belongs to; see `find_recorded_kind`."""
    return find_recorded_kind(read_stage(folder))


def read_fingerprint(folder: str | Path) -> str:
    """Read the fingerprint of the work that was completed in a folder; it is empty if there is none."""
    state = read_state(folder)
    return state.get("fingerprint", "") if state.get("state") == "complete" else ""


def is_from_final_checkpoint(results: dict[str, Any], run: Path) -> bool:
    """Return False if ``results`` name a checkpoint that is not the final one of the run folder ``run``."""
    final = read_kind(run).find_final_checkpoint(run)
    return final is None or provenance.is_made_from(results, final)


def is_complete(stage: Stage) -> bool:
    """Return whether exactly this work was completed, from the current checkpoint, and its product still exists."""
    if not Path(stage.product).exists() or read_fingerprint(stage.folder) != stage.fingerprint():
        return False
    results = stage.read_results()
    return all(is_from_final_checkpoint(results, Path(folder)) for folder in stage.folders.values())


def check_parents(stage: Stage) -> None:
    """Check that the stages that ``stage`` builds on are complete, as they were when it was submitted."""
    for key, fingerprint in stage.parents.items():
        if key in stage.folders and read_fingerprint(stage.folders[key]) != fingerprint:
            state = f"not complete in {stage.folders[key]} (cancelled, failed or changed)"
            raise UserError(f"{stage.name} builds on {key}, which is {state}; rerun the command that started both")


def check_inputs(stage: Stage) -> None:
    """Check that the weights that ``stage`` reads are those that its identity names; it names missing ones itself."""
    for path, content in stage.inputs.items() if stage.reads_weights() else ():
        current = hash_content(path) if content else ""
        if current not in ("", content):
            change = f"{content[:15]} -> {current[:15]}"
            # A folder's content is its newest checkpoint, of which a run in training writes another.
            remedy = "name one of its checkpoints" if Path(path).is_dir() else "restore it"
            raise UserError(
                f"{path} has changed since it was submitted ({change}); {remedy}, or rerun the original command"
            )

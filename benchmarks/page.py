"""Write the section of docs/benchmarks.md that shows measurements on GPUs: python -m benchmarks.page."""

from collections.abc import Mapping, Sequence
from typing import Any

if __name__ == "__main__":
    from pretrain.common.command_line import run_program

    run_program("benchmarks.page")

from benchmarks.gpu import build_tables, is_commit
from pretrain.common.errors import UserError
from pretrain.common.files import read_json
from tools import ROOT

PAGE = ROOT / "docs/benchmarks.md"
_START, _END = "<!-- `make docs` writes this section -->", "<!-- end -->"
_INTRODUCTION = """\
## On GPUs

`make gpu` tests the code on a GPU and measures it, in nine minutes. Pretraining steps include the copy of the views to
the GPU, but not the loader; detection iterations are those of training, with two image sizes in turn."""
_COLUMNS = """\
Peak memory is what torch allocates; add about 0.5 GiB for CUDA itself. The last columns are fractions of the time of a
step: "conv / peak" is the time that the FLOPs of its convolutions take by the GPU's data sheet; "conv / product", at
the measured speed of large matrix products in the same precision; "moved / copy", the time that a copy on the GPU
takes for the bytes that all kernels read and write; "views", the copy of the views to the GPU. The largest of them
tells what limits a step. If all of them are small, launching the kernels does."""
_NOTHING = "No GPU has been measured yet. [Measurements are welcome](../CONTRIBUTING.md#measurements-on-gpus)."


def build_section(measured: Mapping[str, dict[str, Any]]) -> str:
    """Build the section from what `benchmark.py gpu` wrote, by name of the file.

    Raises:
        UserError: numbers of an unknown commit.
    """
    parts = [_build_part(name, numbers) for name, numbers in measured.items()]
    parts = [_COLUMNS, *parts] if parts else [_NOTHING]
    return "\n\n".join([_START, _INTRODUCTION, *parts, _END]) + "\n"


def replace_section(page: str, section: str) -> str:
    """Return the page with its section replaced."""
    before, _, old = page.partition(_START)
    return before + section + old.partition(f"{_END}\n")[2]


def read_measured() -> dict[str, dict[str, Any]]:
    """Read the files of all GPUs, without those of tiny models."""
    files = {path.name: read_json(path) for path in sorted(PAGE.parent.glob("benchmarks/*gpu*.json"))}
    return {name: numbers for name, numbers in files.items() if not numbers["small"]}


def _build_part(file_name: str, numbers: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {numbers[name]}" for name in ("driver", "torch", "cuda", "cudnn", "nccl"))
    if not is_commit(numbers["git"]):
        problem = f"docs/benchmarks/{file_name} does not name the commit that was measured (git: {numbers['git']})"
        raise UserError(f"{problem}; measure again where .git is, or after: git rev-parse HEAD > GIT_STATE")
    source = f"commit {numbers['git'][:7]}{numbers['git'][40:]} ([all numbers](benchmarks/{file_name}))"
    return "\n\n".join([f"### {numbers['gpu']}", f"{versions}, {source}.", *build_tables(numbers["rows"])])


def main(argv: Sequence[str] | None = None) -> int:
    page = replace_section(PAGE.read_text(encoding="utf-8"), build_section(read_measured()))
    PAGE.write_text(page, encoding="utf-8")
    return 0

"""Check that this environment has the packages that pyproject.toml lists, and that they can be imported.

    python tools/packages.py dev,docs

The last step of `make setup`, and a check of the doctor. Of this project, it imports nothing.
"""

import argparse
import importlib
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read_requirements(extras: list[str]) -> list[str]:
    """Return the requirements of the project and of some of its extras.

    Raises:
        ValueError: pyproject.toml has no such extra.
    """
    available = _PROJECT["optional-dependencies"]
    for extra in extras:
        if extra not in available:
            raise ValueError(f"no extra {extra!r} in pyproject.toml; choose from {', '.join(available)}")
    return [*_PROJECT["dependencies"], *(text for extra in extras for text in available[extra])]


def find_unfit(requirements: list[str]) -> list[str]:
    """Describe the requirements that no installed package meets."""
    from packaging.requirements import Requirement  # one of the requirements

    unfit = []
    for requirement in map(Requirement, requirements):
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = "none"
        if version == "none" or not requirement.specifier.contains(version, prereleases=True):
            unfit.append(f"{requirement} is required, and {version} is installed")
    return unfit


def find_broken(requirements: list[str]) -> list[str]:
    """Describe the installed packages that cannot be imported."""
    names = {re.split(r"[^\w.-]", text)[0].lower().replace("_", "-") for text in requirements}
    broken = []
    for module, packages in sorted(importlib.metadata.packages_distributions().items()):
        if module.startswith("_") or names.isdisjoint(package.lower().replace("_", "-") for package in packages):
            continue
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever it raises, the others are checked, too
            broken.append(f"{module} cannot be imported: {type(error).__name__}: {error}")
    return broken


def main() -> int:
    """Check the packages; print what is wrong, and return 1 if something is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="?", default="", help="extras of pyproject.toml, separated by commas")
    args = parser.parse_args()
    try:
        requirements = read_requirements([name for name in args.extras.split(",") if name])
        problems = find_unfit(requirements) or find_broken(requirements)
    except (ValueError, ImportError) as error:
        problems = [str(error)]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())

"""Every test of a stage runs in an empty folder, as the launcher's do."""

from tests.tools.launcher.conftest import _in_an_empty_folder  # noqa: F401

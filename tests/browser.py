"""A browser for the tests that look at a page."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@contextmanager
def open_chromium() -> Iterator["Browser"]:
    """Start Chromium without a window; skip the test where it is missing."""
    api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: make setup")
    with api.sync_playwright() as playwright:
        try:  # root needs the option
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"needs Chromium (apt-get install chromium): {str(error).splitlines()[0]}")
        yield browser
        browser.close()

"""The commands of a checkout, and their implementation."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the checkout, or the copy of its code that jobs run
GUIDE = "docs/read_a_report.md"  # below ROOT; each report names it

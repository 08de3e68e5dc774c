"""The commands of a checkout, and their implementation."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the checkout

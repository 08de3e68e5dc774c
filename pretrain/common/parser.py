"""The parser of every command line."""

import argparse
from typing import Any, NoReturn

from .errors import UserError


class Parser(argparse.ArgumentParser):
    """An argument parser that takes no abbreviations, and raises UserError instead of printing its usage."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}; see --help")

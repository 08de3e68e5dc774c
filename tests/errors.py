"""What every refusal has in common, so that its wording is free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pretrain.common.errors import UserError


def refused(call: Callable[[], Any], *names: object) -> str:
    """Calls it and returns the text of its UserError: one line that names the key, the value and what else is given."""
    with pytest.raises(UserError) as raised:
        call()
    text = str(raised.value)
    assert "\n" not in text and [str(name) for name in names if str(name) not in text] == [], text
    return text

"""A check of what all errors have in common, so that tests do not depend on their wording."""

from collections.abc import Callable
from typing import Any

import pytest

from pretrain.common.errors import UserError


def refused(call: Callable[[], Any], *names: object) -> str:
    """Call it and return the text of its UserError, which must be one line and contain each of the given parts."""
    with pytest.raises(UserError) as raised:
        call()
    text = str(raised.value)
    assert "\n" not in text and [str(name) for name in names if str(name) not in text] == [], text
    return text

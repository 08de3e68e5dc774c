"""The converter's command line; what it converts is tested in tests/transfer."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain.common.errors import UserError
from tools import convert_to_d2


@pytest.mark.parametrize("name", ["a\nb.pth", "a\x1b[2J.pth", "a\u2028b.pth", "a\udcff.pth"])
def test_an_output_that_no_line_can_show_is_refused(tmp_path: Path, name: str):
    with pytest.raises(UserError, match=r"^OUTPUT is '.*', with a line break, a control character or bytes") as raised:
        convert_to_d2.main(["absent.pth", str(tmp_path / name)])
    assert str(raised.value).isprintable()

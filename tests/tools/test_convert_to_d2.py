"""The converter's command line; what it converts is tested in tests/transfer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.common.errors import UserError
from tools import convert_to_d2


@pytest.mark.parametrize("name", ["a\nb.pth", "a\x1b[2J.pth", "a\u2028b.pth", "a\udcff.pth"])
def test_an_output_that_no_line_can_show_is_refused(tmp_path: Path, name: str):
    with pytest.raises(UserError, match=r"^OUTPUT is '.*', with a line break, a control character or bytes") as raised:
        convert_to_d2.main(["absent.pth", str(tmp_path / name)])
    assert str(raised.value).isprintable()


def test_a_missing_source_is_refused_before_torch_is_imported(tmp_path: Path):
    code = (
        "import sys; from tools import convert_to_d2\n"
        "try: convert_to_d2.main(sys.argv[1:])\n"
        "except ValueError as error: print(error, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "absent.pth"), str(tmp_path / "w.pth")]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert ended.stdout == f"no run folder or checkpoint at {tmp_path / 'absent.pth'} False\n"

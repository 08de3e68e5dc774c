"""metrics.json is continued where a run was cut short."""

from pretrain.common.run.metrics import drop_metrics


def test_damaged_lines_of_metrics_are_dropped_and_the_others_kept(tmp_path) -> None:
    lines = [b'{"iteration": 1, "loss": 2.0}', b"\xff", b'{"iteration": "a"}', b"[]", b'{"iteration": 2}']
    (tmp_path / "metrics.json").write_bytes(b"\n".join(lines) + b'\n{"iterat')
    drop_metrics(tmp_path, 2)
    assert (tmp_path / "metrics.json").read_text() == '{"iteration": 1, "loss": 2.0}\n'


def test_the_evaluations_after_the_last_step_are_written_again(tmp_path) -> None:
    lines = ['{"iteration": 4, "rankme": 3.0}', '{"iteration": 5, "loss": 2.0}']
    (tmp_path / "metrics.json").write_text("\n".join([*lines, '{"iteration": 5, "rankme": 4.0}', ""]))
    drop_metrics(tmp_path, 6)
    assert (tmp_path / "metrics.json").read_text().splitlines() == lines

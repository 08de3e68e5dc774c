"""The launcher's command line: help, dry runs, and mistakes that are found before anything is started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from pretrain.common.errors import UserError
from tests.tools.launcher.helpers import ROOT, TINY
from tools import launch
from tools.launcher import stages

COCO = f"{ROOT}/configs/coco_R50_FPN_1x_jcl.yaml"
HERE = ["--cluster", "local", "--gpus", "0"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pretrain", "--method", "jlc"], "no default recipe for --method jlc .*did you mean 'jcl'"),
        (["pretrain", "--method", "jcl", "--dry-ru"], "--dry-ru"),  # no abbreviations
        (["pretrain", "--method", "jcl", "--epochs", "5"], "'--epochs'; keys have no dashes: SOLVER.EPOCHS or LINEAR"),
        (["report", "x", "y", "--cluster", "local"], "report does not know '--cluster'"),
        (["status", "nowhere"], "nothing was started in nowhere"),
    ],
)
def test_a_users_mistake_is_one_line(words: list[str], message: str):
    with pytest.raises(UserError, match=message) as raised:
        launch.main(words)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("command", "cluster"), [("linear", "local"), ("convert", "local"), ("knn", "slurm")])
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("nowhere", "no weights at .*nowhere: neither a file nor a folder with a checkpoint"),
        ("notes.pth", "notes.pth holds no weights: it holds text, 'version https://git-lfs"),
        ("empty.pth", "empty.pth holds no weights: it is empty"),
    ],
)
def test_wrong_weights_leave_no_folder(tmp_path: Path, cluster: str, command: str, weights: str, message: str):
    (tmp_path / "notes.pth").write_text("version https://git-lfs.github.com/spec/v1")
    (tmp_path / "empty.pth").touch()
    before = sorted(tmp_path.rglob("*"))
    words = ["out.pth"] if command == "convert" else []
    with pytest.raises(UserError, match=message):
        launch.main([command, weights, *words, "--cluster", cluster, "--gpus", "0"])
    assert sorted(tmp_path.rglob("*")) == before


TORCHVISION = ["transfer", "--config-file", COCO, "--engine", "torchvision"]
TRUTH = ["DATASETS.TRAIN", "('coco:a.json:here',)", "DATASETS.TEST", "('coco:a.json:here',)"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pretrain", "--method", "jcl"], "no ImageNet at datasets/imagenet/train"),
        (
            ["pretrain", "--method", "jcl", "DATA.TRAIN", "folder:here", "MODEL.WEIGHTS", "gone.pth"],
            "no weights at gone.pth",
        ),
        (["knn", "random"], "no ImageNet at datasets/imagenet/train"),
        ([*TORCHVISION, "MODEL.WEIGHTS", ""], "no annotation file at datasets/coco/"),
        ([*TORCHVISION, *TRUTH, "MODEL.WEIGHTS", "gone.pth"], "no weights at gone.pth"),
    ],
)
def test_missing_data_leave_no_folder(tmp_path: Path, words: list[str], message: str):
    (tmp_path / "here").mkdir()
    (tmp_path / "a.json").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=message):
        launch.main([*words, *HERE])
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_folder_may_be_the_start_of_another_pretraining(
    tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoint_final.pth").write_bytes(b"a checkpoint")
    monkeypatch.setattr("tools.launcher.graph.LocalRun.run", lambda run: 0)
    words = ["DATA.TRAIN", f"folder:{images}", "SOLVER.IMS_PER_BATCH", "48", "MODEL.WEIGHTS", "run"]
    assert launch.main(["pretrain", "--method", "jcl", *HERE, *words]) == 0


def test_data_may_be_on_the_nodes_of_a_cluster_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tools.launcher.graph.submit", lambda specs, options, **given: [SimpleNamespace(job_id="7")])
    assert launch.main(["pretrain", "--method", "jcl", "--cluster", "slurm"]) == 0


def test_sbatch_script_of_a_dry_run(capsys: pytest.CaptureFixture):
    words = ["pretrain", "--method", "mocov2", "--cluster", "slurm", "--nodes", "2", "--gpus", "8", "--dry-run"]
    words += [
        "--time",
        "4:00:00",
        "--sbatch",
        "comment=a $(b) 'c'",
        "--sbatch",
        "exclusive",
        "--setup",
        "module load cuda",
    ]
    assert launch.main([*words, "DATALOADER.NUM_WORKERS", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in (
        "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=8", "#SBATCH --gpus-per-node=8", "#SBATCH --time=240",
        "#SBATCH --signal=USR2@120", "#SBATCH --kill-on-invalid-dep=yes", "#SBATCH --requeue", "#SBATCH --exclusive",
        "module load cuda",
        "#SBATCH --comment='a $(b) '\"'\"'c'\"'\"''", "#SBATCH --exclusive", "export PYTHONSAFEPATH=1",
    ):  # fmt: skip
        assert line in lines
    (srun,) = [line for line in lines if line.startswith("srun ")]
    assert "--kill-on-bad-exit=1" in srun and "--cpus-per-task=6" in srun


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "no weights at weights/jcl_R50_IN1k_200ep.pth: .*tools/convert_to_d2.py"),
     (["MODEL.WEIGHTS", "", "SOLVER.IMS_PER_BATCH", "12"], "is 12; it must be a multiple of the 8 processes"),
     (["MODEL.WEIGHTS", "", "OUTPUT_DIR", "50%"], "50% holds a '%', which SLURM interprets as a pattern")],
)  # fmt: skip
def test_a_fine_tuning_that_cannot_start_is_refused_before_it_queues(words: list[str], message: str):
    with pytest.raises(UserError, match=message):
        launch.main(["transfer", "--config-file", COCO, "--cluster", "slurm", "--gpus", "8", *words])


def test_overrides_may_follow_a_list_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture):
    for name in ("one", "two"):
        spec = stages.pretrain(stages.recipe_of("mocov2"), [*TINY, "OUTPUT_DIR", str(tmp_path / name)])
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(spec.config)
    words = ["distributions", "one", "two", "VIEWS.KEY", "moco_v1", "OUTPUT_DIR", "fig3", "--dry-run"]
    assert launch.main([*words, *HERE]) == 0
    assert str(tmp_path / "fig3") in capsys.readouterr().out


def test_a_dry_run_says_what_was_checked_or_would_be_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture, images: Path
):
    words = ["pretrain", "--method", "jcl", *HERE, "--dry-run", "SOLVER.IMS_PER_BATCH", "48", "DATA.TRAIN"]
    assert launch.main([*words, f"folder:{images}"]) == 0
    shown, err = capsys.readouterr()
    assert "pretrain  -> runs/jcl_R50_IN1k_200ep\n" in shown and "1 process(es) on this machine" in shown
    assert "stages to run, 0 refused" in shown
    assert err.startswith("recipe: ") and err.endswith("configs/pretrain/jcl_R50_IN1k_200ep.yaml\n")
    assert launch.main([*words, "folder:gone"]) == 0
    assert "refused  pretrain" in (shown := capsys.readouterr().out) and "no image folder at gone" in shown
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_downloads_nothing(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("transfer.weights.files.local_file", lambda address: pytest.fail(address))
    monkeypatch.setattr("transfer.coco.data.find", lambda name: None)
    words = [*TORCHVISION, "MODEL.WEIGHTS", "https://example.org/a.pth", *HERE]
    assert launch.main([*words, "--dry-run"]) == 0
    assert "stages to run, 0 refused" in capsys.readouterr().out
    with pytest.raises(pytest.fail.Exception, match=r"https://example\.org/a\.pth"):
        launch.main(words)


def test_recipes_are_listed_by_a_word(capsys: pytest.CaptureFixture[str]):
    assert launch.main(["recipes", "CIFAR100"]) == 0
    text = capsys.readouterr().out
    assert "configs/pretrain/sce_R18_cifar100_200ep.yaml\n    SCE on CIFAR-100" in text and "65.45 top-1" in text
    assert "mocov2_R50" not in text
    with pytest.raises(UserError, match="mentions 'cifar1000'"):
        launch.main(["recipes", "cifar1000"])

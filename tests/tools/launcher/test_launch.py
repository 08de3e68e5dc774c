"""The launcher's command line: help, dry runs, and mistakes that are found before anything is started."""

import os
import re
from pathlib import Path

import pytest

from pretrain.common.run.state import RunContext
from tests.errors import refused
from tests.tools.launcher.helpers import ROOT
from tools import launch
from tools.stages.convert import Convert
from transfer.coco.names import Source

COCO = f"{ROOT}/configs/coco_R50_FPN_1x_jcl.yaml"
HERE = ["--cluster", "local", "--gpus", "0"]
JCL = ["pretrain", "--method", "jcl"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["pretrain", "--method", "jlc"], ("--method jlc", "did you mean 'jcl'")),
        ([*JCL, "--dry-ru"], ("--dry-ru",)),  # no abbreviations
        (["report", "x", "y", "--cluster", "local"], ("report: unknown option '--cluster'",)),
        ([*JCL, "--parallel", "2"], ("launch.py pretrain has no option --parallel; it runs one stage",)),
        (["convert", "a", "b.pth", "--gpus", "1"], ("launch.py convert has no option --gpus; it runs in one process",)),
        ([*JCL, "SEED", "1", "-N2"], ("launch.py pretrain has no option -N; use --nodes ",)),
        ([*JCL, "OUTPUT_DIR", "-p", "-t30"], ("launch.py pretrain has no option -t; use --time ",)),
        (["convert", "a", "b.pth", "-N", "2"], ("launch.py convert has no option -N; it runs in one process",)),
        (["convert", "a", "b.pth", "--ntasks=2"], ("convert has no option --ntasks; it runs in one process",)),
        (["knn", "random", "-n", "2"], ("launch.py knn has no option -n; use --tasks ", "the number per node")),
        (["resume", "runs/a", "--gpus", "4"], ("resume has no option --gpus; it keeps the options of the original",)),
        (["resume", "runs/a", "--qos=long"], ("resume has no option --qos; it keeps the options of the original",)),
        (["resume", "runs/a", "-p", "gpu"], ("launch.py resume has no option -p; use --partition ",)),
        (["distributions", "runs/a", "runs/b"], ("python -m studies.jcl_multikey.similarity",)),
        (["fit", "--config", "a.yaml"], ("no command 'fit'; use pretrain (", "linear (", "transfer (")),
        (["eval"], ("no command 'eval'; use knn or linear (a backbone) or transfer --eval-only",)),
        (["predict", "a.jpg"], ("no command 'predict'; run python tools/predict.py",)),
        (["pretain"], ("no command 'pretain'; did you mean 'pretrain'?",)),
        ([""], ("no command ''; choose one of pretrain, knn, ",)),
    ],
)
def test_a_users_mistake_is_one_line(words: list[str], named: tuple[str, ...]):
    refused(lambda: launch.main(words), *named)


@pytest.mark.parametrize("words", [["pretrain", "--method", "jcl"], ["pipeline", "x.yaml"], ["resume", "runs/x"]])
def test_torchrun_is_told_that_the_launcher_starts_the_processes(monkeypatch: pytest.MonkeyPatch, words: list[str]):
    """The launcher may run inside a job (in a stage, or under srun), whose variables are not torchrun's."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    refused(lambda: launch.main(words), "torchrun", "--tasks N", "torchrun -m pretrain")
    assert launch.main(["recipes", "CIFAR100"]) == 0


def test_no_torch_is_imported_to_count_gpus_that_a_stage_does_not_use(monkeypatch, images: Path, tmp_path: Path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("pretrain.common.gpus._count_devices", lambda: pytest.fail("GPUs were counted"))
    monkeypatch.setattr("tools.launcher.graphs.local_run.LocalRun.run", lambda run: len(run._free_gpus))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoint_final.pth").write_bytes(b"a checkpoint")
    pretraining = [*JCL, "--gpus", "0", "DATA.TRAIN", f"folder:{images}", "SOLVER.IMS_PER_BATCH", "48"]
    pretraining += ["MODEL.WEIGHTS", "run"]
    for words in (pretraining, ["convert", "run", "weights.pth"]):
        for more in ([], ["--dry-run"]):
            assert launch.main([*words, "--cluster", "local", *more]) == 0


def test_a_conversion_has_the_options_of_its_script():
    options = Convert.Options("run", "a.pth", encoder="key", pixel_mean=(1.0, 2.0, 3.0))
    stage = Convert.load(options)
    assert stage.arguments[2] == {"encoder": "key", "pixel_mean": (1.0, 2.0, 3.0)}
    refused(lambda: stage.run(RunContext()), "no run folder or checkpoint at")


TORCHVISION = ["transfer", "--config-file", COCO, "--engine", "torchvision"]
TRUTH = ["DATASETS.TRAIN", "('coco:a.json:here',)", "DATASETS.TEST", "('coco:a.json:here',)"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["convert", "nowhere", "out.pth"], "no weights at {}/nowhere"),
        (["linear", "notes.pth"], "notes.pth contains no weights: it is a pointer of Git LFS; run git lfs pull"),
        (["knn", "empty.pth", "--cluster", "slurm"], "empty.pth contains no weights: it is empty"),
        ([*JCL, "DATA.TRAIN", "folder:here", "MODEL.WEIGHTS", "gone.pth"], "no weights at gone.pth"),
        (["knn", "random"], "no ImageNet in DATA.ROOT datasets"),
        ([*TORCHVISION, "MODEL.WEIGHTS", ""], "no annotation file at datasets/coco/"),
        ([*TORCHVISION, *TRUTH, "MODEL.WEIGHTS", "gone.pth"], "no weights at gone.pth"),
        (
            [*TORCHVISION, "MODEL.WEIGHTS", "", "SOLVER.IMS_PER_BATCH", "12", "--cluster", "slurm", "--gpus", "8"],
            "is 12; it must be a multiple of 8 (8 processes",
        ),
        ([*TORCHVISION, "MODEL.WEIGHTS", "", "SOLVER.STEPS", "(200, 100)"], "SOLVER.STEPS is (200, 100)"),
        (["knn", "random", "OUTPUT_DIR", "50%", "--cluster", "slurm"], "interprets '%'"),
    ],
)
def test_what_cannot_start_is_refused_and_leaves_no_folder(tmp_path: Path, words: list[str], named: str):
    (tmp_path / "here").mkdir()
    (tmp_path / "a.json").touch()
    (tmp_path / "notes.pth").write_text("version https://git-lfs.github.com/spec/v1")
    (tmp_path / "empty.pth").touch()
    before = sorted(tmp_path.rglob("*"))
    here = HERE[:2] if words[0] == "convert" else HERE
    refused(lambda: launch.main([*words[:1], *here, *words[1:]]), named.format(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before


def test_sbatch_script_of_a_dry_run(capsys: pytest.CaptureFixture):
    words = ["pretrain", "--method", "mocov2", "--cluster", "slurm", "--nodes", "2", "--gpus", "8", "--dry-run"]
    words += ["--time", "4:00:00", "--sbatch", "exclusive", "--cluster-file", "site.yaml"]
    Path("site.yaml").write_text("setup: [module load cuda]\n")
    assert launch.main([*words, "DATALOADER.NUM_WORKERS", "5", "MODEL.BN_GROUPS", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    options = (
        "nodes=2 ntasks-per-node=8 gpus-per-node=8 time=240 signal=USR2@120 kill-on-invalid-dep=yes requeue exclusive"
    )
    expected = {f"#SBATCH --{option}" for option in options.split()} | {"module load cuda", "export PYTHONSAFEPATH=1"}
    assert expected - {*lines} == set()
    (srun,) = [line for line in lines if line.startswith("srun ")]
    assert "--kill-on-bad-exit=1" in srun and "--cpus-per-task=6" in srun


@pytest.mark.parametrize(
    ("gpus", "expected"), [("a100:8", "8 A100: about 14 hours, 1.9 GiB"), ("b300:8", ""), ("8", "")]
)
def test_a_dry_run_says_the_hours_on_gpus_whose_type_is_known(capsys, gpus: str, expected: str):
    words = ["pretrain", "--method", "mocov2", "--cluster", "slurm", "--gpus", gpus, "--dry-run", "SOLVER.AMP", "bf16"]
    assert launch.main(words) == 0
    shown = capsys.readouterr().out
    assert ("computed, not measured" in shown) == bool(expected)
    assert expected in shown


def test_a_dry_run_says_the_hours_on_the_gpus_of_this_machine(capsys, monkeypatch, images: Path):
    """Those of a folder's images, which are counted."""
    monkeypatch.setattr("tools.launcher.job_options.list_visible_gpus", lambda: ["0"])
    monkeypatch.setattr("tools.launcher.graphs.dry_run.list_visible_gpus", lambda: ["0"])
    monkeypatch.setattr("tools.launcher.graphs.dry_run.name_visible_gpu", lambda: "NVIDIA GeForce RTX 4090")
    words = ["pretrain", "--method", "mocov2", "--cluster", "local", "--dry-run", "DATA.TRAIN", f"folder:{images}"]
    assert launch.main([*words, "SOLVER.IMS_PER_BATCH", "48"]) == 0
    assert re.search(r"#   pretrain: RTX 4090: about \d+ minutes?, ", capsys.readouterr().out)


def test_a_dry_run_says_what_would_run_and_where(tmp_path: Path, capsys, images: Path):
    words = ["pretrain", "--method", "jcl", *HERE, "--dry-run", "SOLVER.IMS_PER_BATCH", "48", "DATA.TRAIN"]
    assert launch.main([*words, f"folder:{images}"]) == 0
    shown, err = capsys.readouterr()
    assert "pretrain  -> runs/jcl_R50_IN1k_200ep\n" in shown and "1 process on this machine" in shown
    assert "1 of 1 stage to run\n" in shown
    assert err.startswith("recipe: ") and err.endswith("configs/pretrain/jcl_R50_IN1k_200ep.yaml\n")
    assert not (tmp_path / "runs").exists()
    launch.main([*words, f"folder:{images}", "OUTPUT_DIR", "-p"])  # a value may look like an option of sbatch
    assert "pretrain  -> -p\n" in capsys.readouterr().out


@pytest.mark.parametrize("cluster", ["local", "slurm"])
def test_weights_at_an_address_are_fetched_here_unless_it_is_a_dry_run(capsys, monkeypatch, cluster: str):
    """Nodes of a cluster may have no internet."""
    monkeypatch.setattr("transfer.weights.locate.download", lambda address: pytest.fail(address))
    monkeypatch.setattr("transfer.coco.data.locate_data_set", lambda name: Source(name, None, Path()))
    words = [*TORCHVISION, "MODEL.WEIGHTS", "https://example.org/a.pth", *HERE[2:], "--cluster", cluster]
    assert launch.main([*words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "1 of 1 stage to run\n" in shown and "# warning: https://example.org/a.pth is not checked" in shown
    with pytest.raises(pytest.fail.Exception, match=r"https://example\.org/a\.pth"):
        launch.main(words)


def test_a_dry_run_reports_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    words = ["pretrain", "--method", "mocov2", *HERE, "OUTPUT_DIR", str(tmp_path / "a/run"), "--dry-run"]
    assert launch.main(words) == 2
    assert f"cannot write to {tmp_path}" in capsys.readouterr().out


@pytest.mark.parametrize("file", ["demo", "demo_quick"])
@pytest.mark.parametrize("gpus", [0, 6])
def test_the_demo_uses_one_gpu_per_stage(file: str, gpus: int, monkeypatch, capsys):
    Path("configs").symlink_to(f"{ROOT}/configs")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    makefile = (ROOT / "Makefile").read_text()
    (options,) = re.findall(r"^SIDE_BY_SIDE := (.*)", makefile, re.MULTILINE)
    assert f"launch.py pipeline configs/examples/{file}.yaml $(SIDE_BY_SIDE)" in makefile
    assert launch.main(["pipeline", f"configs/examples/{file}.yaml", *options.split(), "--dry-run"]) == 0
    places = re.findall(r"# (\d+) process on this machine, GPUs: ([\w,]+)", capsys.readouterr().out)
    assert sorted(places) == sorted({("1", "none"), ("1", "0" if gpus else "none")})  # each once


def test_recipes_are_listed_by_a_word(capsys: pytest.CaptureFixture[str]):
    assert launch.main(["recipes", "CIFAR100"]) == 0
    text = capsys.readouterr().out
    assert re.search("^configs/pretrain/\n(  .*\n)*  sce_R18_cifar100_200ep.yaml +SCE on CIFAR-100", text, re.MULTILINE)
    assert "mocov2_R50" not in text and "top-1" not in text
    assert launch.main(["recipes", "sce_R18_cifar100_200ep"]) == 0
    text = capsys.readouterr().out
    assert "65.45 top-1" in text and " H100: about" in text
    assert "8 H100" not in text  # two groups of batch norm
    assert launch.main(["recipes", "mocov2_R50_IN1k"]) == 0
    assert "      8 A100: about 14 hours, 1.9 GiB per GPU\n" in capsys.readouterr().out
    refused(lambda: launch.main(["recipes", "cifar1000"]), "mentions 'cifar1000'")


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]):
    assert launch.main([]) == 2
    printed = capsys.readouterr().out
    assert "many runs:\n  pipeline " in printed and "control:\n  resume " in printed

"""The launcher's command line, options, specs and graphs; nothing is started here but in this process."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from pretrain.common.errors import UserError
from tools import launch
from tools.launcher import options, stages, submit
from tools.launcher.graph import Graph, Node, run_here
from tools.launcher.options import Options
from tools.launcher.spec import StageSpec, read_json

ROOT = Path(__file__).parents[2]
TINY = ["MODEL.ARCH", "resnet18", "SOLVER.EPOCHS", "2"]


@pytest.fixture(autouse=True)
def no_site_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


def counting(folder: Path, steps: int = 2, extra: str = "") -> StageSpec:
    args = (str(folder), steps, 0.0, extra)
    return StageSpec("fake", str(folder), "tests.tools.fake_stages:count", args=args)


def test_help_imports_neither_torch_nor_submitit():
    code = (
        "import sys; sys.argv = ['launch.py', '--help']\n"
        "from tools import launch\n"
        "try: launch.main()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'submitit', 'fvcore'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "python tools/launch.py pretrain --method jcl" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pretrain", "--method", "jlc"], "no default recipe for --method jlc .*did you mean 'jcl'"),
        (["pretrain", "--method", "foo"], "no default recipe for --method foo .*by --config-file FILE"),
        (["pretrain"], r"no recipe; give --method NAME \(jcl, .*mocov2.*\) or --config-file FILE"),
        (["pretrain", "--method", "jcl", "--config-file", "x.yaml"], "--method jcl and --config-file x.yaml each name"),
        (
            ["pretrain", "--config-file", f"{ROOT}/configs/coco_R50_FPN_1x_jcl.yaml"],
            "coco_R50_FPN_1x_jcl.yaml is a fine-tuning config; run: python tools/launch.py transfer --config-file /",
        ),
        (["linear", "random", "--config-file", f"{ROOT}/configs/coco_R50_FPN_1x_jcl.yaml"], "is a fine-tuning config"),
        (["pretrain", "--method", "jcl", "--gpu-count", "2"], "does not know '--gpu-count'"),
        (["pretrain", "--method", "jcl", "SOLVER.BASELR", "1"], "unknown config key SOLVER.BASELR.*SOLVER.BASE_LR"),
        (["pretrain", "--method", "jcl", "--cluster", "local", "--nodes", "2"], "--nodes 2 needs --cluster slurm"),
        (["pretrain", "--method", "jcl", "--cluster", "local", "--setup", "module load x"], "--setup is for SLURM"),
        (["linear", "nowhere"], "nowhere does not exist"),
        (["status", "nowhere"], "nothing was started in nowhere"),
        (["pipeline", "none.yaml"], "no file none.yaml"),
        (
            ["transfer", "--config-file", f"{ROOT}/configs/coco_R50_FPN_1x_jcl.yaml", "--engine", "detectron"],
            "engine 'detectron' is not one of auto, detectron2, torchvision; did you mean 'detectron2'",
        ),
        (["transfer", "--config-file", "none.yaml"], "no config file at none.yaml"),
        (["report", "x", "y", "--cluster", "local"], "report does not know '--cluster'"),
    ],
)
def test_a_users_mistake_is_one_line(words: list[str], message: str):
    with pytest.raises(UserError, match=message) as raised:
        launch.main(words)
    assert "\n" not in str(raised.value)


def test_a_run_folder_that_cannot_be_made_is_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("a file")
    data = f"folder:{tmp_path}"
    words = ["pretrain", "--method", "jcl", "--cluster", "local", "--gpus", "0", "DATA.TRAIN", data, "OUTPUT_DIR"]
    for place in ("file", "file/run"):
        with pytest.raises(UserError, match=r"cannot write .*: (File exists|Not a directory); choose another folder$"):
            launch.main([*words, str(tmp_path / place)])


@pytest.mark.parametrize("cluster", ["local", "slurm"])
@pytest.mark.parametrize("command", ["linear", "knn", "embedding", "distributions", "convert"])
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("configs", "no weights at .*configs: it is no file and no folder with a checkpoint"),
        ("notes.pth", "notes.pth holds no weights: it holds text, 'version https://git-lfs"),
        ("empty.pth", "empty.pth holds no weights: it is empty"),
    ],
)
def test_wrong_weights_leave_no_folder(tmp_path: Path, cluster: str, command: str, weights: str, message: str):
    (tmp_path / "configs").mkdir()
    (tmp_path / "notes.pth").write_text("version https://git-lfs.github.com/spec/v1")
    (tmp_path / "empty.pth").touch()
    before = sorted(tmp_path.rglob("*"))
    words = ["out.pth"] if command == "convert" else []
    for more in ([], ["--detach"]):
        with pytest.raises(UserError, match=message):
            launch.main([command, weights, *words, "--cluster", cluster, "--gpus", "0", *more])
    assert sorted(tmp_path.rglob("*")) == before


COCO = f"{ROOT}/configs/coco_R50_FPN_1x_jcl.yaml"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pretrain", "--method", "jcl"], "no ImageNet at datasets/imagenet/train"),
        (["pretrain", "--method", "jcl", "DATA.TRAIN", "cifar10"], "cannot read cifar10: expected datasets/cifar-10"),
        (["pretrain", "--method", "jcl", "DATA.TRAIN", "folder:gone"], "no image folder at gone"),
        (["pretrain", "--method", "jcl", "DATA.TRAIN", "cifar1"], "unknown data set 'cifar1'"),
        (["pretrain", "--method", "jcl", "DATA.TRAIN", "folder:here", "DATA.VAL", "folder:gone"], "folder at gone"),
        (
            ["pretrain", "--method", "jcl", "DATA.TRAIN", "folder:here", "MODEL.WEIGHTS", "gone.pth"],
            "no file of MODEL.WEIGHTS at gone.pth",
        ),
        (["knn", "random"], "no ImageNet at datasets/imagenet/train"),
        (["linear", "random", "DATA.TRAIN", "folder:here", "DATA.PROBE_TRAIN", "folder:gone"], "folder at gone"),
        (["transfer", "--config-file", COCO, "--engine", "torchvision"], "no annotation file at datasets/coco/"),
        (
            ["transfer", "--config-file", COCO, "--engine", "torchvision", "DATASETS.TRAIN", "('coco:a.json:here',)",
             "DATASETS.TEST", "('coco:a.json:here',)", "MODEL.WEIGHTS", "gone.pth"],
            "no file of MODEL.WEIGHTS at gone.pth",
        ),
    ],
)  # fmt: skip
def test_missing_data_leave_no_folder(tmp_path: Path, words: list[str], message: str):
    (tmp_path / "here").mkdir()
    (tmp_path / "a.json").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=message):
        launch.main([*words, "--cluster", "local", "--gpus", "0"])
    assert sorted(tmp_path.rglob("*")) == before


def test_data_may_be_on_the_nodes_of_a_cluster_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tools.launcher.options._check_partition", lambda options: None)
    monkeypatch.setattr("tools.launcher.commands.run_stage", lambda spec, options: 0)
    assert launch.main(["pretrain", "--method", "jcl", "--cluster", "slurm"]) == 0


def test_default_recipe_dry_run_names_the_run_folder(capsys: pytest.CaptureFixture, tmp_path: Path):
    assert launch.main(["pretrain", "--method", "jcl", "--cluster", "local", "--gpus", "0", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert f"# pretrain -> {tmp_path / 'runs/jcl_R50_IN1k_200ep'}" in shown
    assert "1 process(es) on this machine" in shown and "GiB in checkpoints" in shown
    assert not (tmp_path / "runs").exists()


def test_sbatch_script_of_a_dry_run(capsys: pytest.CaptureFixture):
    words = ["pretrain", "--method", "mocov2", "--cluster", "slurm", "--nodes", "2", "--gpus", "8", "--dry-run"]
    words += ["--time", "4:00:00", "--cpus-per-task", "6", "--comment", "a $(b) 'c'", "--setup", "module load cuda"]
    assert launch.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in (
        "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=8", "#SBATCH --gpus-per-node=8", "#SBATCH --time=240",
        "#SBATCH --signal=USR2@120", "#SBATCH --kill-on-invalid-dep=yes", "#SBATCH --requeue", "module load cuda",
        "#SBATCH --comment='a $(b) '\"'\"'c'\"'\"''", "export PYTHONSAFEPATH=1",
    ):  # fmt: skip
        assert line in lines
    (srun,) = [line for line in lines if line.startswith("srun ")]
    assert "--kill-on-bad-exit=1" in srun and "--cpus-per-task=6" in srun


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("30", 30), ("0:30", 1), ("90:30", 91), ("4:00:00", 240), ("1-0", 1440), ("2-03:04:05", 3065), ("1-0:30", 1470)],
)
def test_times(text: str, minutes: int):
    assert options.parse_minutes(text) == minutes


@pytest.mark.parametrize("text", ["", "4h", "-5", "0", "1:2:3:4", "0:00:00"])
def test_times_that_are_none(text: str):
    with pytest.raises(UserError, match="--time"):
        options.parse_minutes(text)


def test_command_line_wins_over_the_sites_file(tmp_path: Path):
    site = tmp_path / "cluster.yaml"
    site.write_text("partition: gpu\naccount: 42\ncpus-per-task: 8\nsetup: module load cuda\n")
    found = options.resolve({"cluster": "local", "cpus_per_task": 3}, str(site))
    assert (found.partition, found.account, found.cpus_per_task, found.setup) == ("gpu", "42", 3, ())
    site.write_text("partitoin: gpu\n")
    with pytest.raises(UserError, match=r"unknown key partitoin.*did you mean 'partition'"):
        options.resolve({"cluster": "local"}, str(site))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": 0}, "--nodes is 0"),
        ({"gpus": -1}, "--gpus is -1"),
        ({"comment": "a\nb"}, "--comment holds a line break"),
        ({"time": "1", "signal_delay": 60}, "--signal-delay 60 s is not shorter"),
        ({"gpus": 64}, "--gpus 64, but"),
    ],
)
def test_values_that_cannot_work(given: dict, message: str):
    with pytest.raises(UserError, match=message):
        options.resolve({"cluster": "local", **given})


def test_visible_gpus_keep_the_users_choice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-ab12")
    assert options.visible_gpus() == ["3", "GPU-ab12"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert options.visible_gpus() == []


@pytest.mark.parametrize(("gpus", "kept"), [(4, 1), (1, 1), (0, 0)])
def test_a_stage_of_one_process_keeps_one_gpu_if_it_has_use_for_it(gpus: int, kept: int):
    asked = Options(cluster="slurm", nodes=2, gpus=gpus)
    ours = stages.distributions(["runs/a", "runs/b"])
    fitting = asked.fitting(ours)
    assert (fitting.nodes, fitting.tasks_per_node, fitting.gpus_per_node) == (1, 1, kept)
    assert asked.fitting(stages.convert("runs/a", "a.pth")).gpus_per_node == 0
    assert asked.fitting(counting(Path("x"))) == asked


def test_fingerprint_knows_what_is_computed_and_not_where(tmp_path: Path):
    recipe = stages.recipe_of("mocov2")
    one = stages.pretrain(recipe, [*TINY, "OUTPUT_DIR", str(tmp_path / "a")])
    elsewhere = stages.pretrain(recipe, [*TINY, "OUTPUT_DIR", str(tmp_path / "b"), "DATALOADER.NUM_WORKERS", "1"])
    other = stages.pretrain(recipe, [*TINY, "SEED", "1", "OUTPUT_DIR", str(tmp_path / "a")])
    assert one.fingerprint() == elsewhere.fingerprint() != other.fingerprint()
    assert replace(one, parents={"data": "parent"}).fingerprint() != one.fingerprint()
    assert StageSpec.from_json(json.loads(json.dumps(one.to_json()))).fingerprint() == one.fingerprint()


def test_fingerprint_does_not_know_keys_at_their_default(monkeypatch: pytest.MonkeyPatch):
    from pretrain import config

    earlier = stages.pretrain(stages.recipe_of("mocov2"), TINY).fingerprint()
    real = config.default_config

    def later():  # a later version has one key more
        cfg = real()
        cfg.SOLVER.NESTEROV = False
        return cfg

    monkeypatch.setattr(config, "default_config", later)
    assert stages.pretrain(stages.recipe_of("mocov2"), TINY).fingerprint() == earlier
    assert stages.pretrain(stages.recipe_of("mocov2"), [*TINY, "SOLVER.NESTEROV", "True"]).fingerprint() != earlier


def test_a_probe_takes_the_runs_own_config(tmp_path: Path):
    trained = stages.pretrain(stages.recipe_of("mocov2"), [*TINY, "OUTPUT_DIR", str(tmp_path / "run")])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(trained.config)
    probe = stages.probe("linear", str(tmp_path / "run"), overrides=["LINEAR.BASE_LR", "10"])
    assert probe.folder == str(tmp_path / "run" / "linear") and probe.args == (str(tmp_path / "run"),)
    assert "ARCH: resnet18" in probe.config and "BASE_LR: 10" in probe.config


def test_transfer_takes_its_output_from_the_overrides(tmp_path: Path):
    config = tmp_path / "c.yaml"
    config.write_text("VERSION: 2\n")
    spec = stages.transfer(str(config), ["OUTPUT_DIR", "here", "SEED", "1"], engine="torchvision")
    assert spec.folder == str(tmp_path / "here")
    assert spec.args[0] == ["--resume", "--engine", "torchvision", "OUTPUT_DIR", spec.folder]
    assert yaml.safe_load(spec.config) == {"SEED": 1}


def graph_of(folder: Path, *nodes: Node) -> Graph:
    return Graph("pipeline", str(folder), nodes, counting(folder / "report"))


DEBUG = Options(cluster="debug", gpus=0)


def test_a_graph_redoes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture):
    graph = graph_of(tmp_path, Node("a", counting(tmp_path / "a")), Node("b", counting(tmp_path / "b"), ("a",)))
    assert run_here(graph, DEBUG) == 0
    assert (tmp_path / "a/steps.0").read_text().split() == ["0", "1"]
    (tmp_path / "b/results.json").unlink()  # b's product is gone: b alone is done again
    capsys.readouterr()
    assert run_here(graph, DEBUG) == 0
    shown = capsys.readouterr().out
    assert "[1/2] a: already complete" in shown and "[2/2] b: already complete" not in shown
    assert (tmp_path / "b/results.json").exists()


def test_overrides_may_follow_a_list_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        spec = stages.pretrain(stages.recipe_of("mocov2"), [*TINY, "OUTPUT_DIR", str(tmp_path / name)])
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(spec.config)
    words = ["distributions", "one", "two", "VIEWS.KEY", "moco_v1", "OUTPUT_DIR", "fig3", "--dry-run"]
    assert launch.main([*words, "--cluster", "local"]) == 0
    assert str(tmp_path / "fig3") in capsys.readouterr().out


def test_snapshot_holds_the_code_and_its_state(tmp_path: Path):
    code = submit.snapshot(tmp_path)
    assert (code / "pretrain/train.py").read_bytes() == (ROOT / "pretrain/train.py").read_bytes()
    assert (code / "tools/launcher/job.py").is_file() and not list(code.glob("**/__pycache__"))
    assert (code / "GIT_STATE").read_text().strip()


def test_debug_runs_in_this_process(tmp_path: Path):
    from tools.launcher.run import run_stage

    assert run_stage(counting(tmp_path / "a"), DEBUG) == 0
    assert read_json(tmp_path / "a/results.json")["metrics"] == {"count": 2}
    assert counting(tmp_path / "a").is_complete()

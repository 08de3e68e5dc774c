"""The documentation is true: its commands and snippets run, and every named test exists (`make site` checks links).

In the pages, a snippet is a fenced block. Snippets run page by page, in order and in a folder of the page's own, with
as little training as possible. Their data are those of the page: an earlier command makes them, with fewer images, or
from small drawings where it would download photographs. A snippet whose first line is a comment ``# Needs ...`` (GPUs,
SLURM, data, internet) is only parsed, and so is a command that other tests run. Exceptions are README's commands for
your own images, which a test makes, and other_frameworks.md, which test_other_frameworks.py runs.
"""

import argparse
import ast
import glob
import importlib
import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import pretrain
from pretrain.common.config import extensions
from pretrain.config import load_config
from pretrain.methods import ops
from tests.resnets import resnet_state
from tests.snippets import PAGES, ROOT, Snippet, commands, program_of, runnable, snippets
from tests.tools.test_make_trees import write_wheel
from tools import make_data
from tools.data import trees
from tools.launcher import job_options
from tools.launcher.graphs import pipeline
from tools.stages import recipes
from transfer.config import load_config as load_detector_config

pytestmark = pytest.mark.docs
# What a shell runs beside our programs (studies have their own tests), and where else the command of a program is run.
OTHERS = (
    r"git clone URL pretrain-to-transfer|cd pretrain-to-transfer"
    r"|source \.venv/bin/activate|sinfo|cp \S+ \S+|curl -L --create-dirs -o \S+ \S+|bash \.ci/run"
    r"|python -m studies\.\w+\.\w+ .+"
)
# In Troubleshooting: what varies in a message, between its fixed parts, and errors of torch, CUDA, Pillow and gloo.
VARYING = r"\.\.\.|[\d%:;,()]|\S*\.\w+| is | are "
OF_LIBRARIES = r"no kernel image|Connection refused|CUDA out of memory|ncclUnhandled|Cuda failure|exceeds limit of"
RUN_ELSEWHERE = {
    "launch.py doctor": "tools/launcher/test_doctor.py",
    "--cluster slurm": "tools/launcher/test_launch.py, test_slurm*.py",
}
# Appended to the commands of the pages. No key of DATA or DATASETS: the data are those of the page.
FEWER_IMAGES = "--images 70 --val-images 20 --scenes 6 --val-scenes 4"
PRETRAINING = (
    "SOLVER.MAX_STEPS 2 SOLVER.IMS_PER_BATCH 16 VIEWS.IMAGE_SIZE 32 DATALOADER.NUM_WORKERS 0 "
    "LINEAR.EPOCHS 1 LINEAR.LR_SCHEDULE cosine LINEAR.IMS_PER_BATCH 16"
)
FINE_TUNING = (
    "SOLVER.MAX_ITER 2 SOLVER.STEPS () SOLVER.IMS_PER_BATCH 2 TEST.PRECISE_BN.NUM_ITER 1 DATALOADER.NUM_WORKERS 0 "
    "INPUT.MIN_SIZE_TRAIN (64,) INPUT.MIN_SIZE_TEST 64"
)


class Parsed(Exception):
    """An exception that ends a program once it has parsed its command line."""


@pytest.fixture
def only_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_known_args
    open_calls = []

    def parse_known_args(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        open_calls.append(self)
        parsed = parse(self, *args, **kwargs)  # calls this function for a subcommand
        open_calls.pop()
        if open_calls:
            return parsed
        raise Parsed(*parsed)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)


@pytest.mark.parametrize(("program", "words"), commands())
def test_a_command_is_accepted(program: str, words: str, only_parse: None) -> None:
    module = importlib.import_module(program.removesuffix(".py").replace("/", "."))
    imported, other_words = extensions.take_options(shlex.split(words))
    try:
        module.main(other_words)
    except Parsed as parsed:
        args, trailing_words = parsed.args
    except SystemExit as end:
        assert end.code == 0, words  # --help
        return
    keys = [*getattr(args, "opts", []), *trailing_words]
    assert not [word for word in keys if word.startswith("--")], words
    if imported:  # the templates have their own tests
        return
    detector = program == "transfer/train_net.py"
    assert not keys or detector or getattr(args, "takes_overrides", False), words
    if detector or getattr(args, "command", "") == "transfer":
        load_detector_config(ROOT / args.config_file, keys)
    elif getattr(args, "command", "") == "pretrain" and "config_file" in args:
        load_config(ROOT / args.config_file, keys)
    elif getattr(args, "command", "") == "pretrain" and not args.method.isupper():  # NAME stands for a method
        load_config(recipes.find_recipe(args.method), [*recipes.find_recipe_overrides(args.method), *keys])


def test_every_snippet_is_one_that_is_checked() -> None:
    """Each snippet is fenced, in a language that is checked, and contains only commands that a test knows."""
    known = {"bash", "python", "yaml", "text", "bibtex"}
    assert [(block.page.name, block.language) for block in snippets() if block.language not in known] == []
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert not re.search(r"^ {4,}(python|make|from|import|git) |^ +```(bash|python|yaml)", text, re.MULTILINE), page
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for block in snippets("bash"):
        for line in block.lines():
            program, *words = line.split()
            assert program_of(line) or (program == "make" and words[0] in targets) or re.fullmatch(OTHERS, line), line


def test_the_operations_that_objectives_share_are_listed() -> None:
    page = (ROOT / "docs/tutorials/own_objective.md").read_text()
    listed = {
        name: arguments.split(", ") for name, arguments in re.findall(r"^\| `(\w+)\((.+?)\)` \|", page, re.MULTILINE)
    }
    functions = dict(inspect.getmembers(ops, inspect.isfunction))
    assert sorted(listed) == [
        name for name in functions if functions[name].__module__ == ops.__name__ and name[0] != "_"
    ]
    for name, arguments in listed.items():
        named = [argument for argument in arguments if argument != "..."]
        assert [*inspect.signature(functions[name]).parameters][: len(named)] == named
    arguments = [*inspect.signature(ops.check_batch_inputs).parameters]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == arguments


def test_every_test_that_is_named_exists() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = {
        name
        for page in (*PAGES, ROOT / "tests/README.md")
        for name in re.findall(r"`(test_\w+)(?:\.\.\.)?`", page.read_text())
    }
    assert len(named) > 30 and [name for name in sorted(named) if f"def {name}" not in tests] == []


def test_the_messages_that_troubleshooting_lists_are_those_of_the_code() -> None:
    """A part of each symptom is a text in the code; what varies in a message is `...`, a number or a file."""
    paths = [path for folder in ("pretrain", "transfer", "tools") for path in (ROOT / folder).rglob("*.py")]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (.+?) \|", page, re.MULTILINE)
    symptoms = [symptom for cell in cells for symptom in re.findall("`(.+?)`", cell)]
    assert len(symptoms) > 30
    for symptom in symptoms:
        parts = [part.strip() for part in re.split(VARYING, symptom)]
        is_ours = any(part in text for part in parts if len(part) > 5 for text in texts)
        assert is_ours or re.search(OF_LIBRARIES, symptom), symptom


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=lambda page: page.stem)
def test_the_snippets_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("configs", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(trees, "_download", lambda folder: write_wheel(folder / "trees.whl", monkeypatch))
    Path("weights").mkdir()
    torch.save(resnet_state("resnet18"), "weights/start.pth")
    for block in runnable(page):
        run(block)


def test_readme_trains_on_your_own_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run both blocks of README that need your own images, on drawn scenes in place of /data."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    write_own_images(Path("data"))
    train = pretrain.pretrain
    keys = PRETRAINING.split()
    fewer_steps = dict(zip(keys[::2], map(yaml.safe_load, keys[1::2]), strict=True))
    monkeypatch.setattr(pretrain, "pretrain", lambda file, overrides: train(file, overrides | fewer_steps))
    blocks = [block for block in snippets("bash", "python") if block.page == ROOT / "README.md"]
    blocks = [block for block in blocks if "your own images" in block.needs]
    shell, python = (block._replace(text=block.text.replace("/data/", "data/")) for block in blocks)
    for line in shell.lines():
        run_line(line)
    assert len(json.loads(Path("predictions/images.json").read_text())["images"]) == 4
    variables: dict[str, Any] = {}
    exec(python.text, variables)
    assert variables["resnet"](torch.zeros(2, 3, 64, 64)).shape == (2, 512)


def write_own_images(folder: Path) -> None:
    """Write scenes of two classes, even and odd digits, and their boxes as `make_data.py split` writes them."""
    make_data.main(["digits", "--output", "drawn", "--images", "70", "--scenes", "20", "--val-scenes", "4"])
    annotations = Path("drawn/coco/annotations/instances_train.json")
    content = json.loads(annotations.read_text())
    content["categories"] = [{"id": 1, "name": "even"}, {"id": 2, "name": "odd"}]
    for record in content["annotations"]:
        record["category_id"] = 1 + record["category_id"] % 2
    annotations.write_text(json.dumps(content))
    make_data.main(["split", str(annotations), "--output", str(folder), "--val", "0.2"])
    (folder / "photos").symlink_to(Path("drawn/coco/train").absolute())
    (folder / "new_photos").symlink_to(Path("drawn/coco/val").absolute())


def test_few_commands_of_the_pages_are_shortened() -> None:
    """Count the commands that do not run as written; none of them uses other data than its page names."""
    lines = [line for page in PAGES for block in runnable(page) if block.language == "bash" for line in block.lines()]
    programs = [(program, words_of(words)) for program, words in filter(None, map(program_of, lines))]
    data_sets = [words[0] for program, words in programs if program == "tools/make_data.py"]
    assert sorted(data_sets) == [*["digits"] * 5, "duplicates", "trees"]  # fewer images; no download
    assert sum(is_training(program, words) for program, words in programs) == 9  # fewer steps on smaller images
    added = [*PRETRAINING.split(), *shlex.split(FINE_TUNING)]
    assert not [word for word in added if word.startswith(("DATA.", "DATASETS.", "MODEL.ROI_HEADS"))]


def run(block: Snippet) -> None:
    if block.language == "bash":
        for line in block.lines():
            run_line(line)
    elif block.language == "python":
        run_apart("-c", block.text)
    else:
        check_yaml(block.text)


def run_line(line: str) -> None:
    """Run a shell command in this process, on little data and for few steps."""
    if line == "make demo-quick":
        line = "python tools/launch.py pipeline configs/examples/demo_quick.yaml"
    if line.startswith("cp "):
        shutil.copy(*line.split()[1:])
    command = program_of(line)
    if not command or ("--dry-run" not in line and any(text in line for text in RUN_ELSEWHERE)):
        return
    program = command[0]
    words = small(program, words_of(command[1]))
    if "--import" in words:
        run_apart(*(["-m", "tests.in_process"] if words[0] == "pipeline" else [str(ROOT / program)]), *words)
        return
    name = "tests.in_process" if program == "tools/launch.py" else program.removesuffix(".py").replace("/", ".")
    module = importlib.import_module(name)
    try:
        assert not module.main(words) or program == "transfer/train_net.py", line
    except SystemExit as end:
        assert end.code == 0, line  # --help and --help-keys


def words_of(text: str) -> list[str]:
    """Split a command line into words, and expand patterns of file names."""
    return [expanded for word in shlex.split(text) for expanded in (sorted(glob.glob(word)) if "*" in word else [word])]


def run_apart(*words: str) -> None:
    """Run Python in a separate process, which may import and register what this one must not."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def is_training(program: str, words: Sequence[str]) -> bool:
    """Return whether a command trains or extracts features, and is not a dry run."""
    stages_that_train = ("pretrain", "linear", "knn", "embedding", "pipeline")
    is_stage = program == "tools/launch.py" and words[0] in stages_that_train
    return (is_stage or program == "transfer/train_net.py") and not {"--dry-run", "--help-keys"} & set(words)


def small(program: str, words: Sequence[str]) -> list[str]:
    """Return the same command with fewer images, or with very little training and on this machine."""
    if program == "tools/make_data.py" and words[0] == "digits":
        return [*words, *FEWER_IMAGES.split()]
    if not is_training(program, words):
        return list(words)
    if program == "transfer/train_net.py":
        return ["--engine", "torchvision", *words, *shlex.split(FINE_TUNING)]
    here = ["--cluster", "local", "--gpus", "0"]
    if words[0] == "pipeline":
        Path("small.yaml").write_text(yaml.safe_dump(small_plan(pipeline.read_pipeline_file(words[1]))))
        return ["pipeline", "small.yaml", *words[2:], *here]
    return [*words, *here, *PRETRAINING.split()]


def small_plan(plan: dict[str, Any]) -> dict[str, Any]:
    """Return a pipeline with fewer images, hardly any training and at most two seeds."""
    if plan["DATA"]:
        kind, *arguments = pipeline.split_words(plan["DATA"])
        plan["DATA"] = [kind, *arguments[:-1], *FEWER_IMAGES.split(), arguments[-1]]
    plan["OVERRIDES"] = [*pipeline.split_words(plan["OVERRIDES"]), *PRETRAINING.split()]
    plan["TRANSFER_OVERRIDES"] = [*pipeline.split_words(plan["TRANSFER_OVERRIDES"]), *shlex.split(FINE_TUNING)]
    plan["SEEDS"] = plan["SEEDS"][: 2 if plan["BASELINE"] else 1]
    plan["LINEAR"] = [config for config in plan["LINEAR"] if config == "own"]
    plan["ENGINE"] = "torchvision"
    return {key: value for key, value in plan.items() if value}


def check_yaml(text: str) -> None:
    """Save a file under the name in its first line, and read it as its program does."""
    name = Path(text.splitlines()[0].removeprefix("# ")).name
    Path(name).write_text(text)
    if name == "cluster.yaml":
        assert job_options.resolve_options({"cluster": "slurm"}, name).partition == "gpu"
    else:
        plan = pipeline.read_pipeline_file(name)
        assert plan["BRANCHES"] or plan["PRETRAIN"]

"""SLURM's own words: names of options, and options and variables that exclude each other."""

from itertools import combinations

import pytest

from tests.errors import refused
from tools.launcher import sbatch
from tools.launcher.job_options import JobOptions, resolve_options

pytestmark = pytest.mark.usefixtures("programs")  # of which there are none: no scheduler

# A name and value as sbatch takes them, and what the script has.
NAMES = [
    ("qos=long", {"qos": "long"}),
    ("--mem=1G", {"mem": "1G"}),
    ("-C=gpu", {"constraint": "gpu"}),
    ("-q long", {"qos": "long"}),
    ("C=gpu&ib", {"constraint": "gpu&ib"}),
    ("mem_per_cpu=1G", {"mem-per-cpu": "1G"}),
    ("reserv=day1", {"reservation": "day1"}),
    ("H", {"hold": ""}),
    ("exclusive=user", {"exclusive": "user"}),
    ("exclusive=yes", {"exclusive": ""}),
    ("overcommit=no", {}),
    ("cluster=alex", {"clusters": "alex"}),
    ("comment=a=b c", {"comment": "a=b c"}),
    ("exclude=n[1-2,7],m3", {"exclude": "n[1-2,7],m3"}),
    ("of-a-plugin=1", {"of-a-plugin": "1"}),
    ("of-a-plugin", {"of-a-plugin": ""}),
    ("nice", {"nice": ""}),
    ("--contiguous", {"contiguous": ""}),
    ("qos=no", {}),
]
REFUSED_NAMES = [
    ("job=foo", "--sbatch job-name is set by the launcher"),
    ("J=foo", "--sbatch job-name is set by the launcher"),
    ("tasks-per-node=2", "--sbatch ntasks-per-node is set by the launcher"),
    ("nod=2", "--sbatch: 'nod' is ambiguous; write one of nodefile, nodelist, nodes"),
    ("X=1", "--sbatch: 'X' is no long option of sbatch"),
    ("=1", "--sbatch: '' is ambiguous"),
    ("cpus-per-gpu=4", "--sbatch cpus-per-gpu excludes cpus-per-task, which is set by the launcher"),
    ("ntasks-per-gpu=4", "--sbatch ntasks-per-gpu excludes ntasks-per-node, which is set by the launcher"),
    ("help", "--sbatch help is set by the launcher"),
    ("chdir=/a", "--sbatch chdir is set by the launcher"),
    ("exclude", "--sbatch exclude has no value; write exclude=VALUE"),
    ("x", "--sbatch exclude has no value"),
    ("comment=", "--sbatch comment has no value"),
    ("mem=true", "--sbatch mem has no value"),
    ("contiguous=1", "--sbatch contiguous=1: sbatch takes no value for it; write contiguous alone"),
    ("H=yes please", "--sbatch hold=yes please: sbatch takes no value"),
    ("comment=a\nb", r"--sbatch comment is 'a\nb', which contains unprintable characters"),
    ("", "--sbatch: '' is ambiguous"),
]
SRUN_NAMES = [
    ("container-image=a", {"container-image": "a"}),
    ("overlap", {"overlap": ""}),
    ("mpi=none", {"mpi": "none"}),
]
REFUSED_SRUN_NAMES = [
    ("ntasks=1", "--srun ntasks would change ntasks, which is set by the launcher"),
    ("exp=NONE", "--srun exp would change export"),
    ("--cpus-per-task=2", "--srun cpus-per-task would change cpus-per-task"),
    ("n=1", "--srun: 'n' is no long option of srun"),
    ("label=a\tb", "--srun label is 'a\\tb', which contains unprintable characters"),
]
# A variable, and an option in the script; sbatch would prefer the variable, or refuse both.
HIDDEN_VARIABLES = [
    *(("MEM_PER_NODE", name) for name in ("mem", "mem-per-cpu", "mem-per-gpu")),
    *(("MEM_PER_CPU", name) for name in ("mem", "mem-per-cpu", "mem-per-gpu")),
    *(("HINT", name) for name in ("hint", "threads-per-core", "ntasks-per-core", "extra-node-info")),
    *(("THREADS_PER_CORE", name) for name in ("hint", "threads-per-core", "extra-node-info")),
    ("CORE_SPEC", "thread-spec"),
    ("THREAD_SPEC", "core-spec"),
    ("EXCLUSIVE", "oversubscribe"),
    ("REQ_SWITCH", "switches"),
    ("WAIT4SWITCH", "switches"),
    ("TIMELIMIT", "time"),
    ("ARRAY_INX", "array"),
    ("CPU_FREQ_REQ", "cpu-freq"),
    ("DEBUG", "verbose"),
    ("MEM_PER_GPU", "mem-bind"),  # jobs have no GPU option of the shell
    ("GRES", "gres"),
]
KEPT_VARIABLES = [("MEM_PER_NODE", "qos"), ("MEM_BIND", "mem"), ("QOS", "mem"), ("WAIT_ALL_NODES", "wait")]


def test_no_row_is_lost():
    """A row guards a repair: remove one only together with what it is about."""
    tables = (NAMES, REFUSED_NAMES, HIDDEN_VARIABLES, KEPT_VARIABLES, sbatch.EXCLUSIVE)
    assert [len(table) for table in tables] == [19, 18, 24, 4, 10]
    assert (len(SRUN_NAMES), len(REFUSED_SRUN_NAMES)) == (3, 5)


@pytest.mark.parametrize(("word", "options"), NAMES)
def test_options_have_the_names_that_sbatch_takes(word: str, options: dict[str, str]):
    assert resolve_options({"cluster": "slurm", "sbatch": [sbatch.parse_word(word)]}).sbatch == options


@pytest.mark.parametrize(("word", "message"), REFUSED_NAMES)
def test_other_names_are_refused(word: str, message: str):
    refused(lambda: resolve_options({"cluster": "slurm", "sbatch": [sbatch.parse_word(word)]}), message)


@pytest.mark.parametrize(("word", "options"), SRUN_NAMES)
def test_options_of_srun(word: str, options: dict[str, str]):
    assert resolve_options({"cluster": "slurm", "srun": [sbatch.parse_word(word)]}).srun == options


@pytest.mark.parametrize(("word", "message"), REFUSED_SRUN_NAMES)
def test_other_options_of_srun_are_refused(word: str, message: str):
    refused(lambda: resolve_options({"cluster": "slurm", "srun": [sbatch.parse_word(word)]}), message)


PAIRS = sorted({pair for group in sbatch.EXCLUSIVE for pair in combinations(group, 2)})


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_options_that_exclude_each_other(first: str, second: str):
    """The command line's replaces the site's; both in one place are refused."""
    for site, command in ((first, second), (second, first)):
        assert sbatch.merge_options({site: "1", "qos": "a"}, {command: "2"}) == {"qos": "a", command: "2"}
        assert sbatch.merge_options({site: "1"}, {site: "false"}) == {}
    both = {name: "" if name == "oversubscribe" else "1" for name in (first, second)}
    refused(lambda: sbatch.name_options(both, "--sbatch"), "exclude each other; give one")
    assert sbatch.name_options({first: "1", second: "no"}, "--sbatch") == {first: "1", second: "no"}


@pytest.mark.parametrize(("variable", "option"), HIDDEN_VARIABLES + KEPT_VARIABLES)
def test_a_variable_that_an_option_of_the_script_excludes_is_hidden(variable: str, option: str, monkeypatch):
    monkeypatch.setenv(f"SBATCH_{variable}", "gpu:1" if variable == "GRES" else "1")
    expected = [f"SBATCH_{variable}"] if (variable, option) in KEPT_VARIABLES else []
    assert list(sbatch.list_variables([option])) == expected


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"gres": "gpu:a100:4,scratch:9"}, 8),
        ({"gres": "gpu:2"}, 4),
        ({"gres": "gpu"}, 2),
        ({"gres": "scratch:9"}, 0),
        ({"gpus": "a100:5"}, 5),
        ({"gpus-per-task": "1"}, 6),
        ({"gpus-per-task": "a100:1"}, 6),
        ({"gpus-per-socket": "2", "sockets-per-node": "2"}, 8),
        ({"gpus-per-socket": "a100:2", "sockets-per-node": "1:2"}, 4),
        ({"gpus": "a100:2,v100:1"}, 3),
        ({"gres": "gpu:1,gpu:1"}, 4),
        ({"gres": "gres:gpu:a100=2"}, 4),
        ({"gres": "gpu:1g.10gb:2"}, 4),
        ({"gres": "gpu:0"}, 0),
        ({"gres": "none"}, 0),
        ({"gres": "shard:2,mps:50"}, 0),
        ({"tres-per-task": "cpu=4,gres/gpu:a100=1"}, 6),
        ({"mem": "9G"}, 0),
    ],
)
def test_gpus_that_only_sbatch_is_asked_for_are_counted(options: dict[str, str], count: int):
    assert sbatch.count_requested_gpus(options, nodes=2, tasks=3) == count


@pytest.mark.parametrize(
    ("nodelist", "count"), [("a", 1), ("a,b", 2), ("gpu[1-3],m7", 4), ("r[1-2]n[01-10,12]", 22), ("n[a,b]", 2)]
)
def test_a_job_gets_no_more_nodes_than_it_asks_for(nodelist: str, count: int):
    """SLURM gives a job all nodes that nodelist names, whatever --nodes says."""

    def choose(nodes: int) -> JobOptions:
        return resolve_options({"cluster": "slurm", "nodes": nodes, "sbatch": [("w", nodelist)]})

    assert choose(count).sbatch == {"nodelist": nodelist}
    assert sbatch.omit_nodes({"nodefile": "f", "nodelist": nodelist, "qos": "a"}) == {"qos": "a"}
    if count > 1:
        assert f"--nodes {count}" in refused(lambda: choose(count - 1), nodelist)

"""The display of what would be started: the stages of a graph, and the scripts or processes that would run them."""

from collections.abc import Mapping
from pathlib import Path

from pretrain.common.errors import UserError, count_noun
from pretrain.common.gpus import list_visible_gpus, name_visible_gpu
from pretrain.common.shell import shorten_path, shorten_paths
from tools.estimates.model import COMPUTED
from tools.estimates.published import find_gpu

from ..execution import slurm
from ..execution.submit import build_environment, find_code, preview_script
from ..job_options import JobOptions
from .graph import Graph, Node
from .plan import Plan, plan_graph
from .submission import describe_cost, format_dependency, group_nodes, split_batch


def show_graph(graph: Graph, options: JobOptions, needs_data: bool = False, ask_slurm: bool = False) -> int:
    """Print the stages, and the scripts or commands of those that can start; return 2 if one is invalid, else 0.

    A stage that builds on an invalid one cannot start either.

    Args:
        needs_data: as for `start_graph`.
        ask_slurm: ask SLURM about each kind of job, too.
    """
    plan = plan_graph(graph, options, is_dry_run=True, needs_data=needs_data)
    startable: dict[str, Node] = {}
    for node in graph.nodes:
        order = f"  after {', '.join(node.parents)}" if node.parents else ""
        reason = f"\n         {shorten_paths(plan.errors[node.key])}" if node.key in plan.errors else ""
        state = "queued" if node.key in plan.queued else "complete"
        if reason:
            state = "invalid"
        elif node.key in plan.missing:
            state = "to run"
            if all(key in startable or key not in plan.missing for key in node.parents):
                startable[node.key] = node
        print(f"{state:<8} {node.key}{order}  -> {shorten_path(node.stage.folder)}{reason}")
    if graph.report:
        print(f"to run   report  after everything  -> {shorten_path(graph.report.product)}")
    code = find_code(graph.output)
    batches: list[list[Node]] = []
    if options.cluster == "slurm":
        groups = group_nodes(startable.values(), startable.keys(), plan)
        batches = [array for group in groups for array in split_batch(group, options)]
    for batch in batches:
        parents = [f"<job of {key}>" for node in batch for key in node.parents if key in startable]
        stages = [node.stage for node in batch]
        resources = plan.resources[batch[0].key]
        script = preview_script(stages, resources, code, format_dependency("afterok", parents))
        print(f"\n# {', '.join(node.key for node in batch)}\n{script}")
    errors = len(plan.errors)
    invalid = f", of which {errors} {'is' if errors == 1 else 'are'} invalid" if errors else ""
    print(f"\n# {len(plan.missing)} of {count_noun(len(graph.nodes), 'stage')} to run{invalid}")
    print(f"# checked: config, data, run folder, weights{', cores' if options.cluster == 'slurm' else ''}")
    for warning in dict.fromkeys(plan.warnings):
        print(f"# warning: {warning}")
    if options.cluster == "slurm":
        print(describe_cost(plan))
        if ask_slurm:
            if errors:
                print("# SLURM was not asked about invalid stages, nor about those that wait for one")
            errors += _ask_slurm(batches, plan, code)
    elif startable:
        print(_describe_processes(startable, plan, options.num_parallel))
    for line in describe_estimates(plan):
        print(line)
    return 2 if errors else 0


def _ask_slurm(batches: list[list[Node]], plan: Plan, code: Path) -> int:
    """Print what SLURM says about each kind of job; return the number of refusals."""
    errors = 0
    samples: dict[str, list[Node]] = {}  # the first batch of each size and resources
    for batch in batches:
        samples.setdefault(f"{len(batch)} {plan.resources[batch[0].key]}", batch)
    for batch in samples.values():
        try:
            resources = plan.resources[batch[0].key]
            script = preview_script([node.stage for node in batch], resources, code, "")
            answer = slurm.ask_start_time(script, build_environment(resources))
        except UserError as error:
            answer = str(error)
            errors += 1
        print(f"# {batch[0].key}: {answer}")
    return errors


def describe_estimates(plan: Plan) -> list[str]:
    """Describe what each stage that is to run is expected to cost on its GPUs, once for all that cost the same.

    On SLURM, the type of the GPUs is the one in --gpus TYPE:NUMBER; here, it is that of the machine.
    """
    on_gpus = {key: node for key, node in plan.missing.items() if plan.resources[key].gpus}
    is_local = any(plan.resources[key].cluster != "slurm" for key in on_gpus)
    local_gpu = name_visible_gpu() if is_local else ""
    stages: dict[str, list[str]] = {}
    for key, node in on_gpus.items():
        resources = plan.resources[key]
        count = resources.nodes * resources.gpus
        gpu = find_gpu(resources.gpu_type if resources.cluster == "slurm" else local_gpu)
        estimate = gpu and node.stage.estimate(gpu, count)
        if estimate:
            stages.setdefault(estimate.describe(), []).append(key)
    lines = [f"#   {', '.join(keys)}: {text}" for text, keys in stages.items()]
    return [f"# expected ({COMPUTED}):", *lines] if lines else []


def _describe_processes(startable: Mapping[str, Node], plan: Plan, parallel: int) -> str:
    """Describe the processes of the stages on this machine, once for all stages that have the same."""
    stages: dict[str, list[str]] = {}
    for key in startable:
        resources = plan.resources[key]
        devices = ",".join(list_visible_gpus()[: resources.gpus]) if resources.gpus else "none"
        text = f"{count_noun(resources.tasks, 'process', 'processes')} on this machine, GPUs: {devices}"
        stages.setdefault(text, []).append(key)
    lines = [f"# {text}: {'all' if len(stages) == 1 < len(keys) else ', '.join(keys)}" for text, keys in stages.items()]
    at_once = f"{count_noun(parallel, 'stage')} at a time; " if len(startable) > 1 else ""
    return "\n".join([*lines, f"# {at_once}the output is in launch/ of each run folder"])

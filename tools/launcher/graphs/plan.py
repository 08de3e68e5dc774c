"""The plan of a start: which stages of a graph are missing, with which resources, and why some cannot start."""

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pretrain.common.config import extensions
from pretrain.common.errors import UserError, count_noun, shorten_list
from pretrain.common.output import warn
from pretrain.common.run.folder import check_no_foreign_files
from pretrain.common.shell import shorten_paths
from tools.stages.base import Stage
from tools.stages.completion import check_parents, is_complete
from tools.stages.identity import describe_changes
from tools.stages.registry import build_stage

from ..execution import slurm
from ..execution.job import Job
from ..execution.job_file import read_imported
from ..execution.jobs import wait_for_ending_jobs
from ..execution.slurm import JobState
from ..job_options import JobOptions, from_record
from ..record_formats import PIPELINE_FILE, read_launch, read_pipeline
from ..resources import Resources
from .checks import check_stage
from .graph import REPORT, Graph, Node


@dataclass
class Plan:
    """The stages of a graph to start, by key.

    Attributes:
        missing: the stages to start, valid or not.
        resources: what the jobs of these stages get, and that of the report.
        queued: SLURM jobs of stages that are pending or running, and of the report.
        errors: why stages cannot start.
        warnings: what the user should know before the start, such as data that this machine does not have.
    """

    missing: dict[str, Node]
    resources: dict[str, Resources]
    queued: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def refuse_invalid(self, graph: Graph) -> None:
        """Raise UserError if stages are invalid; if there are several, print each cause once."""
        if graph.is_single and self.errors:
            raise UserError(next(iter(self.errors.values())))
        causes = self._describe_causes()
        if len(self.errors) > 1:
            warn("\n".join(causes))
            causes = [f"{len(self.errors)} of {len(graph.nodes)} stages are invalid (see above)"]
        if causes:
            raise UserError(f"{causes[0]}; nothing was started")

    def print_warnings(self) -> None:
        """Print each warning once."""
        for warning in dict.fromkeys(self.warnings):
            warn(f"warning: {warning}")

    def _describe_causes(self) -> list[str]:
        """Return one line per cause, with the stages that it concerns."""
        stages: dict[str, list[str]] = {}
        for key, error in self.errors.items():
            stages.setdefault(shorten_paths(error), []).append(key)
        return [f"{_count_stages(keys)}: {error}" for error, keys in stages.items()]


def _count_stages(keys: list[str]) -> str:
    remaining = len(keys) - 1
    return f"{keys[0]} and {count_noun(remaining, 'other stage')}" if remaining else keys[0]


def plan_graph(graph: Graph, options: JobOptions, *, is_dry_run: bool = False, needs_data: bool = False) -> Plan:
    """Find the stages to start, and check each of them.

    Args:
        is_dry_run: nothing will start; download no weights, and count the images (a stage that starts at once does).
        needs_data: also refuse a SLURM job if its data are not on this machine.
    """
    if graph.report:
        check_no_foreign_files(graph.output, ("report.md", "report.html"), str(PIPELINE_FILE), "folder")
    missing = {node.key: node for node in graph.nodes if not is_complete(node.stage)}
    stages = {key: node.stage for key, node in missing.items()}
    if graph.report:
        stages[REPORT] = graph.report
    plan = Plan(missing, {key: options.for_stage(stage) for key, stage in stages.items()})
    folders = {key: Path(stage.folder) for key, stage in stages.items()}
    dropped = _list_dropped_stages(graph)
    last_jobs = wait_for_ending_jobs([*folders.values(), *dropped.values()])
    unchanged: list[str] = []
    may_wait = options.cluster == "slurm" and not graph.is_single  # for jobs of an earlier command
    for key, folder in folders.items():
        job, state = last_jobs.get(folder, (None, JobState("")))
        try:
            if job and job.is_slurm and may_wait and state.word in ("PENDING", "RUNNING"):
                if key in plan.missing:
                    _check_same_work(plan.missing[key], job)
                if _has_other_resources(stages[key], job, plan.resources[key]):
                    unchanged.append(key)
                plan.queued[key] = job.id
                plan.missing.pop(key, None)
            elif job:
                job.check_not_running(state)
            if key in plan.missing:
                _check_node(plan.missing[key], graph, plan, is_dry_run, needs_data)
        except UserError as error:
            plan.errors[key] = str(error)
    if graph.report:
        queued = [
            f"{key} (job {last_jobs[path][0].id})" for key, path in dropped.items() if _is_queued(last_jobs, path)
        ]
        plan.warnings += _describe_queue(graph, options, len(plan.missing) + 1, unchanged, queued)
    return plan


def _list_dropped_stages(graph: Graph) -> dict[str, Path]:
    """Return the folders of stages, by key, that only the graph has that was started last in the same folder."""
    file = Path(graph.output) / PIPELINE_FILE
    if graph.is_single or not file.exists():
        return {}
    folders = {node.stage.folder for node in graph.nodes}
    try:
        stages = read_pipeline(file).stages
    except UserError:  # it is damaged, and will be written again
        return {}
    return {stage["key"]: Path(stage["folder"]) for stage in stages if stage["folder"] not in folders}


def _is_queued(last_jobs: Mapping[Path, tuple[Job, JobState]], folder: Path) -> bool:
    return folder in last_jobs and last_jobs[folder][0].is_slurm and last_jobs[folder][1].is_active


def _has_other_resources(stage: Stage, job: Job, resources: Resources) -> bool:
    """Return whether a job in the queue was submitted with other resources than it would get now."""
    submitted = from_record(read_launch(job.folder).options).for_stage(stage)
    return submitted != from_record(asdict(resources.request)).for_stage(stage)  # what a record keeps of both


def _describe_queue(graph: Graph, options: JobOptions, jobs: int, unchanged: list[str], queued: list[str]) -> list[str]:
    """Describe what may surprise the user about the queue.

    Args:
        jobs: how many will be submitted.
        unchanged: stages whose jobs wait with other resources.
        queued: stages of an earlier command that have jobs, but are not part of this one.
    """
    warnings: list[str] = []
    cancel = f"python tools/launch.py cancel {shlex.quote(graph.output)}"
    if unchanged:
        names = shorten_list(unchanged)
        warnings.append(f"the jobs of {names} keep the options that they were submitted with; to change them: {cancel}")
    if queued:
        names = shorten_list(queued)
        warnings.append(
            f"an earlier command submitted {names}, which this one does not have; cancel what is not needed"
        )
    limit = slurm.read_max_jobs(options.account, options.slurm_cluster) if options.cluster == "slurm" else jobs
    if jobs > limit:
        text = f"this submits {count_noun(jobs, 'job')}, but your account may have {limit} in the queue at a time"
        warnings.append(text)
    return warnings


def _check_same_work(node: Node, job: Job) -> None:
    """Check that a job in the queue does the work of ``node``: a pipeline's file, or a module, may have been edited."""
    submitted = build_stage(read_launch(job.folder).spec)
    changes = extensions.describe_change(read_imported(job))
    if submitted.fingerprint() != node.stage.fingerprint():
        changes = describe_changes(node.stage, submitted.identity, allowed=()) or "what it builds on has changed"
    if changes:
        remedy = f"cancel it first: python tools/launch.py cancel {shlex.quote(str(job.folder))}"
        raise UserError(f"job {job.id} in the queue does other work ({changes}); {remedy}, or undo the change")


def _check_node(node: Node, graph: Graph, plan: Plan, is_dry_run: bool, needs_data: bool) -> None:
    """Raise UserError if a missing stage cannot start; add warnings about it to the plan."""
    if graph.is_single:  # no other stage runs before it
        check_parents(node.stage)
    else:
        _check_checkpoints(node, graph, plan)
        plan.warnings += _describe_needless_run(node, graph, plan)
    plan.warnings += check_stage(node, graph, plan.resources[node.key], is_dry_run, needs_data)


def _check_checkpoints(node: Node, graph: Graph, plan: Plan) -> None:
    """Raise UserError if a stage that ``node`` builds on is complete, but its checkpoint is gone."""
    complete = [other for other in graph.nodes if other.key not in {*plan.missing, *plan.queued}]
    for parent in complete:
        is_gone = parent.stage.trains_backbone and not parent.stage.has_checkpoint()
        if parent.key in node.parents and is_gone:
            remedy = "restore it, or move the folder away to run the stage again"
            raise UserError(f"the checkpoint is gone from {parent.stage.folder}; {remedy}")


def _describe_needless_run(node: Node, graph: Graph, plan: Plan) -> list[str]:
    """Return a warning if ``node`` would train for hours although every stage that builds on it is complete."""
    children = [other.key for other in graph.nodes if node.key in other.parents]
    if not node.stage.trains_backbone or not children or not plan.missing.keys().isdisjoint(children):
        return []
    return [f"{node.key} has no result and runs again, although every stage that depends on it is complete"]

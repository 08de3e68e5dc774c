"""The submission of a graph of stages to SLURM, as jobs that depend on one another."""

import shlex
import signal
from collections import Counter
from collections.abc import Iterable, Set
from pathlib import Path

from pretrain.common.errors import UserError, count_noun
from pretrain.common.interrupt import Stopped, handle_stop_signals
from pretrain.common.output import warn
from pretrain.common.run import file_names
from pretrain.common.run.state import RunContext
from pretrain.common.shell import shorten_path

from ..execution import slurm
from ..execution.job import SCRIPT, read_jobs
from ..execution.records import format_resume_command
from ..execution.submit import copy_code, remove_folder, submit_job
from ..job_options import JobOptions
from ..sbatch import count_requested_gpus
from ..time_limits import UNLIMITED
from .graph import REPORT, Graph, Node, write_graph
from .plan import Plan


def submit_graph(graph: Graph, options: JobOptions, plan: Plan) -> int:
    """Submit what is missing as dependent jobs that share one copy of the code; active jobs are left alone."""
    for node in graph.nodes:
        if node.key in plan.queued:
            print(f"{node.key}: job {plan.queued[node.key]} is already queued or running")
        elif node.key not in plan.missing:
            print(f"{node.key}: already complete")
    has_queued_stages = bool(plan.queued.keys() - {REPORT})
    if not plan.missing and not has_queued_stages:  # all are complete
        write_graph(graph, options)
        if graph.report:
            graph.report.run(RunContext())
        return 0
    if not plan.missing and REPORT in plan.queued:
        return 0  # each stage and the report have their jobs
    _check_all_recorded(graph, options.slurm_cluster)
    Submission(graph, options, plan).run()
    print(describe_cost(plan))
    print(f"to see the status: python tools/launch.py status {shlex.quote(shorten_path(graph.output))}")
    return 0


def _check_all_recorded(graph: Graph, cluster: str) -> None:
    """Raise UserError if a job in the queue is in no record: its launcher was killed between sbatch and the record."""
    folders = [Path(stage.folder) for stage in (*(node.stage for node in graph.nodes), graph.report) if stage]
    output = Path(graph.output)
    places = {place for folder in folders for place in (folder, *folder.parents) if place.is_relative_to(output)}
    scripts = {str(script) for place in places for script in place.glob(f"launch/*/{SCRIPT}")}
    scripts -= {job.script for folder in folders for job in read_jobs(folder)}
    job_id = slurm.find_waiting_job(scripts, cluster) if scripts else ""
    if job_id:
        problem = f"job {job_id} in the queue is of an earlier command for {output}, which was killed at its submission"
        raise UserError(f"{problem}; cancel it first: scancel {job_id}")


class Submission:
    """A submission of a graph's missing stages, which signals do not interrupt: the id of a job would be lost."""

    def __init__(self, graph: Graph, options: JobOptions, plan: Plan) -> None:
        self._graph, self._options, self._plan = graph, options, plan
        self._jobs = {key: job_id for key, job_id in plan.queued.items() if key != REPORT}
        self._earlier_report = plan.queued.get(REPORT, "")
        self._submitted: list[str] = []
        self._signals: list[str] = []

    def run(self) -> None:
        """Submit the stages.

        Raises:
            UserError: sbatch refused a job; the jobs before it were cancelled, unless there were only too many of them.
            Stopped: a signal arrived; all jobs were cancelled.
        """
        launch_folder = Path(self._graph.output, file_names.LAUNCH_FOLDER)
        is_new = not launch_folder.exists()
        with handle_stop_signals(lambda number, _: self._signals.append(signal.Signals(number).name)):
            try:
                write_graph(self._graph, self._options)
                self._submit_missing(copy_code(self._graph.output))
            except BaseException as error:
                if is_new and not self._submitted and not isinstance(error, slurm.SubmissionUnknown):
                    remove_folder(launch_folder)
                if isinstance(error, slurm.TooManyJobs):
                    raise self._describe_limit(error) from error
                remaining = self._cancel()
                if isinstance(error, Stopped) and remaining:
                    error.remedy = (
                        f"{', '.join(remaining)} may still be in the queue: look in squeue, and cancel what is"
                    )
                raise

    def _submit_missing(self, code: Path) -> None:
        """Submit the missing stages in arrays, and the report, which waits for all of them."""
        missing = self._plan.missing
        for batch in group_nodes(missing.values(), {*missing, *self._jobs}, self._plan):
            previous = ""
            for array in split_batch(batch, self._options):
                self._submit_array(array, code, previous)
                previous = self._submitted[-1].partition("_")[0]
        if self._graph.report:
            dependency = format_dependency("afterany", [*self._jobs.values(), self._earlier_report])
            self._add_job([Node(REPORT, self._graph.report)], code, dependency)

    def _submit_array(self, nodes: list[Node], code: Path, previous: str) -> None:
        """Submit an array after the job ``previous``; if it is too large for the queue, its halves one by one."""
        parents = [self._jobs[key] for node in nodes for key in node.parents if key in self._jobs]
        dependency = format_dependency("afterok", parents) or format_dependency("afterany", [previous])
        try:
            self._add_job(nodes, code, dependency)
        except slurm.TooManyJobs as error:
            if len(nodes) == 1:
                raise
            warn(f"{error}; trying smaller arrays")
            middle = len(nodes) // 2
            self._submit_array(nodes[:middle], code, previous)
            self._submit_array(nodes[middle:], code, self._submitted[-1].partition("_")[0])

    def _add_job(self, nodes: list[Node], code: Path, dependency: str) -> None:
        """Submit one job, which is an array if there are several nodes, and note its ids."""
        keys = [node.key for node in nodes]
        ids = submit_job([node.stage for node in nodes], self._plan.resources[keys[0]], code, dependency)
        self._submitted += ids
        self._jobs |= zip(keys, ids, strict=True)
        if self._signals:
            raise Stopped(self._signals[0], "no job of this command is left in the queue")
        for key, job_id in zip(keys, ids, strict=True):
            print(f"{key}: job {job_id} {dependency}".rstrip())

    def _describe_limit(self, error: UserError) -> UserError:
        if not self._submitted:
            return UserError(f"{error}; wait until some of your jobs have ended")
        remaining = self._plan.missing.keys() - self._jobs.keys()
        remedy = f"when some of your jobs have ended, submit them: {format_resume_command(self._graph.output)}"
        return UserError(
            f"{error}; {count_noun(len(remaining), 'stage')} not submitted, the others stay in the queue; {remedy}"
        )

    def _cancel(self) -> list[str]:
        """Cancel the submitted jobs; return those that may remain in the queue."""
        remaining = []
        for job_id in self._submitted:
            try:
                slurm.cancel_job(job_id, self._options.slurm_cluster)
            except UserError as error:
                warn(str(error))
                remaining.append(job_id)
        cancelled = [job_id for job_id in self._submitted if job_id not in remaining]
        if cancelled:
            warn(f"cancelled the submitted jobs: {', '.join(cancelled)}")
        return remaining


def describe_cost(plan: Plan) -> str:
    """Describe the GPU-hours of each kind of stage and their sum, if every attempt uses its whole time limit."""
    requests: Counter[tuple[str, int, int, int]] = Counter()
    for key, node in plan.missing.items():
        resources = plan.resources[key]
        requested = count_requested_gpus(resources.sbatch, resources.nodes, resources.tasks)
        gpus = resources.nodes * resources.gpus or requested
        if gpus:
            requests[node.stage.name, gpus, resources.minutes, resources.max_timeouts] += 1
    lines = []
    unlimited: list[str] = []
    total = 0.0
    for (stage, gpus, minutes, max_timeouts), jobs in requests.items():
        if minutes == UNLIMITED:
            lines.append(f"# {stage}: {count_noun(jobs, 'job')} with {count_noun(gpus, 'GPU')}, without a time limit")
            unlimited.append(stage)
            continue
        attempts = max_timeouts + 1
        cost = jobs * gpus * minutes / 60 * attempts
        total += cost
        limit = f"{count_noun(gpus, 'GPU')} x {minutes / 60:.4g} h x {count_noun(attempts, 'attempt')}"
        lines.append(f"# {stage}: {count_noun(jobs, 'job')}, each at most {limit} = {cost:,.0f} GPU-hours")
    if not lines:
        return "# no GPU-hours: no stage asks for whole GPUs"
    remark = "--max-timeouts sets the attempts; those that are preempted are extra"
    limit = f"at most {total:,.0f} GPU-hours in total"
    if unlimited:
        limit = f"no limit in total, because {', '.join(unlimited)} may run forever"
    return "\n".join([*lines, f"# {limit} ({remark})"])


def group_nodes(nodes: Iterable[Node], waiting: Set[str], plan: Plan) -> Iterable[list[Node]]:
    """Group ``nodes`` by what is submitted together.

    An array contains the nodes of one stage and equal resources that build on none in ``waiting``. Other nodes, and all
    nodes of this machine, are alone.
    """
    groups: dict[str, list[Node]] = {}
    for node in nodes:
        resources = plan.resources[node.key]
        is_in_array = resources.cluster == "slurm" and waiting.isdisjoint(node.parents)
        name = f"{node.stage.name} {resources}" if is_in_array else node.key
        groups.setdefault(name, []).append(node)
    return groups.values()


def split_batch(batch: list[Node], options: JobOptions) -> list[list[Node]]:
    """Split a batch into arrays of the size that SLURM accepts."""
    size = slurm.read_max_array(options.slurm_cluster) if len(batch) > 1 else 1
    return [batch[first : first + size] for first in range(0, len(batch), size)]


def format_dependency(kind: str, job_ids: Iterable[str]) -> str:
    """Return a dependency in sbatch's form, or an empty string for no jobs."""
    ids = ":".join(filter(None, job_ids))
    return f"{kind}:{ids}" if ids else ""

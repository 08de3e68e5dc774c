"""The start of a graph of stages, on this machine or through SLURM.

Complete stages are skipped, missing ones run, and a failure ends only its own branch.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pretrain.common.interrupt import Stopped
from pretrain.common.output import survive_lost_output, warn
from pretrain.common.run.lease import claim
from pretrain.common.run.state import RunContext
from pretrain.common.shell import shorten_path

from ..execution.records import format_resume_command
from ..job_options import JobOptions
from .graph import Graph, write_graph
from .local_run import LocalRun
from .plan import Plan, plan_graph


def start_graph(graph: Graph, options: JobOptions, needs_data: bool = False) -> int:
    """Run what is missing on this machine, or submit it; return the exit status.

    Args:
        needs_data: refuse SLURM jobs whose data are not on this machine.

    Raises:
        UserError: a stage cannot be started, or another process runs or submits the same graph; nothing was started.
    """
    is_local = options.cluster == "local"
    with _claim_output(graph, is_local):
        plan = plan_graph(graph, options, needs_data=needs_data)
        plan.refuse_invalid(graph)
        plan.print_warnings()
        with survive_lost_output():
            if is_local:
                return _run_graph(graph, options, plan)
            from .submission import submit_graph

            return submit_graph(graph, options, plan)


@contextlib.contextmanager
def _claim_output(graph: Graph, is_local: bool) -> Iterator[None]:
    """Let one process at a time start the graph; leave no empty folder if nothing was started.

    A single stage claims its run folder itself, but only after its job is recorded there.
    """
    new_folders = [path for path in (Path(graph.output), *Path(graph.output).parents) if not path.exists()]
    purpose = ("the launcher of a run" if is_local else "a submission") if graph.is_single else "a pipeline"
    try:
        with claim(graph.output, purpose, file="launch" if graph.is_single else ""):
            yield
    finally:
        with contextlib.suppress(OSError):  # they contain stages
            for path in new_folders:
                path.rmdir()


def _run_graph(graph: Graph, options: JobOptions, plan: Plan) -> int:
    """Run what is missing on this machine, and then the report of a graph that has one."""
    if not plan.missing and graph.is_single:
        remedy = "its data are not compared: if they have changed, move it away and run it again"
        print(f"{shorten_path(graph.output)} is already complete; {remedy}")
        return 0
    write_graph(graph, options)
    try:
        status = LocalRun(graph, plan.missing, plan.resources, options.num_parallel).run()
        if graph.report:
            graph.report.run(RunContext())
        return status
    except Stopped as stop:
        warn(f"{stop}\nto continue: {format_resume_command(graph.output)}")
        return 130

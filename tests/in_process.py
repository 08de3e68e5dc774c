"""launch.py with its stages in this process, for tests that inject faults or run many commands."""

import sys
from collections.abc import Sequence
from unittest import mock

from pretrain.common.interrupt import StopRequest
from pretrain.common.run.state import RunContext
from tools import launch
from tools.launcher.execution.rank_main import run_stage
from tools.launcher.graphs.graph import Graph, write_graph
from tools.launcher.graphs.plan import plan_graph
from tools.launcher.job_options import JobOptions

HERE = JobOptions(cluster="local", gpus=0)


def run(graph: Graph, options: JobOptions = HERE, needs_data: bool = False) -> int:
    """Replace `start_graph` on this machine, without a process per stage and without records."""
    plan = plan_graph(graph, options, needs_data=needs_data)
    plan.refuse_invalid(graph)
    plan.print_warnings()
    write_graph(graph, options)
    stop = StopRequest()
    with stop.handle_signals():
        for node in plan.missing.values():
            run_stage(node.stage, RunContext(stop))
    if graph.report:
        graph.report.run(RunContext())
    return 0


def main(argv: Sequence[str]) -> int:
    with mock.patch("tools.launcher.graphs.start.start_graph", run):
        return launch.main(argv)


if __name__ == "__main__":
    main(sys.argv[1:])

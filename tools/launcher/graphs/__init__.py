"""Graphs of stages: a single stage, a pipeline or a paper's table; checked, shown and started."""

"""Branches of a pipeline over seeds: their scores, and what these show."""

"""Experiments whose claims a command checks: `python -m docs.experiments.NAME`."""

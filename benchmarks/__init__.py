"""Benchmarks: `python -m benchmarks.NAME` prints device, ceiling, a table, and one line of JSON."""

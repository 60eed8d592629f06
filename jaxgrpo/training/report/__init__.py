"""`jaxgrpo report`: what a run folder says, as one HTML file or in the terminal.

Everything is read from the folder, so a report can be made of a run under way, killed or finished.
"""

from jaxgrpo.training.report.record import Record, read_run
from jaxgrpo.training.report.writing import check_can_draw, report, write_report

__all__ = ["Record", "check_can_draw", "read_run", "report", "write_report"]

"""`jaxgrpo report`: what a run folder says, as one HTML file or in the terminal.

Everything is read from the folder, so a report can be made of a run under way, killed or finished.
"""

from jaxgrpo.training.report.page import check_can_draw, report, write_report
from jaxgrpo.training.report.record import Record, read_run

__all__ = ["Record", "check_can_draw", "read_run", "report", "write_report"]

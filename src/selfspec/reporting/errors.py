"""The one error of the report."""

from selfspec.errors import SelfspecError


class ReportError(SelfspecError):
    """The report's inputs are missing, malformed or contradict themselves; one line, fit to print."""

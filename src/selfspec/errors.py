"""The base of every error whose message is meant for the person who runs a stage."""

from __future__ import annotations


class SelfspecError(RuntimeError):
    """A failure the user can act on: the message names what is wrong and what to do next.

    ``stages/_run.py`` prints it without a traceback and exits with 2; anything else that escapes a
    stage is a bug and keeps its traceback.
    """

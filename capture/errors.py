"""Errors that a caller is told in one line; `exit_status` is what the command line exits with."""

from __future__ import annotations


class GdncheckError(Exception):
    """Base: the message says what is wrong, where, and what to do next, on one line."""

    exit_status = 2


class BadInput(GdncheckError):
    """The user's file, name or option is wrong."""


class CannotRun(GdncheckError):
    """Nothing could run: a package, a device or a captured layer is missing."""

    exit_status = 3


class Refused(GdncheckError):
    """An adapter declines a call that lies outside the kernel's capabilities."""

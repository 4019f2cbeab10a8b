"""The command line: ``dormouse``. Its entry point is ``main``."""

from dormouse.cli.commands import main

__all__ = ["main"]

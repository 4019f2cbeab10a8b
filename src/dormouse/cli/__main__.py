"""``python -m dormouse.cli``: the command line where no ``dormouse`` script is on the path."""

from dormouse.cli.commands import main

main()

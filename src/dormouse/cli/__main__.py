"""``python -m dormouse.cli``: the command line where no ``dormouse`` script is on the path."""

from dormouse.cli.commands import main

if __name__ == "__main__":  # else it is imported by a process that the server forks
    main()

"""`python -m rlsys` is the command `rlsys`."""

from rlsys.commands.entry_point import main

if __name__ == "__main__":
    main()

"""The command `rlsys`: one module for each subcommand.

    rlsys NAME ARGUMENTS ─► entry_point.py ─► command_table.py ─► NAME_command.main(ARGUMENTS)

A module of a subcommand is imported when it is called, so that `rlsys --help` starts quickly. A new
subcommand is one line in command_table.py.
"""

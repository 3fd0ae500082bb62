"""What runs inside the sandbox, before a program does. Standard library only; imports nothing of
the rest of rlsys, which is not there.
"""

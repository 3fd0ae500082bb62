"""Modules that run inside the sandbox.

They use only the standard library, because the rest of rlsys is not available there.
"""

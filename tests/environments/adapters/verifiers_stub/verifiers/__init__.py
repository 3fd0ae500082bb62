"""A stub of verifiers, see v1."""

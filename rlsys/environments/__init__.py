"""Environments: functions that play episodes with the policy and return their rewards."""

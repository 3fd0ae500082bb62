"""Environments: what a rollout does besides sampling."""

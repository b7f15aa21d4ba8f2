"""Orchestrate the stages as Prefect flows, and run them from the command line."""

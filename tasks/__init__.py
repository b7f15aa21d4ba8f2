"""Implement the stages of the pipeline, one package per stage."""

"""Licences: what each parent's licence allows and obliges, and what follows for the merged weights."""

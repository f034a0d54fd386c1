"""Measurements of this project's own speed, each a package that runs with `python -m`."""

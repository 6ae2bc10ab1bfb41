"""Tools of the repository: hooks of the documentation site, its pictures, and the lists of `make venv`."""

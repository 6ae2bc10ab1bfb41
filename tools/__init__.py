"""Tools of the repository: hooks of the documentation site, and the pictures in it."""

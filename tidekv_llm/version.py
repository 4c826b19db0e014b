"""The release, written once: pyproject.toml and the package read it here."""

__version__ = "0.1.0"

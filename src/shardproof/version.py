"""The version of this package, which every manifest names as its writer."""

__version__ = "0.1.0"

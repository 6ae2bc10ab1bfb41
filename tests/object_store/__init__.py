"""Tests with a real S3 server."""

"""The command line, and the reports that it prints."""

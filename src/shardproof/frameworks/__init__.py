"""Adapters for training frameworks. Each is one module, which needs the framework that it is named after."""

"""Arguments and options that several commands share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

from shardproof.cli.words import seconds_of

__all__ = ["folder_argument", "json_option", "print_json", "span"]

Function = TypeVar("Function", bound=Callable[..., Any])


def span(_context: click.Context, _parameter: click.Parameter, value: str) -> float:
    """For an option's `callback`: seconds, from a text such as "1h"; a usage error if it is none."""
    try:
        return seconds_of(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def folder_argument(name: str) -> Callable[[Function], Function]:
    """A folder that must exist. A path that does not is bad usage, exit code 2."""
    return click.argument(name, type=click.Path(exists=True, file_okay=False))


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def print_json(value: Any) -> None:
    """A JSON document on standard output, indented."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))

"""Conversion of checkpoints between formats: planned, written in units, verified, published."""

from shardproof.conversion.convert import ConversionReport, convert
from shardproof.conversion.mapping import MappedTensor, Move
from shardproof.conversion.request import ConversionRequest

__all__ = ["ConversionReport", "ConversionRequest", "MappedTensor", "Move", "convert"]

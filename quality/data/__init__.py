"""Texts to score: a user's JSONL, or English technical prose that Python and its packages bring. Knows no model's weights."""

from shoal.quality.data.load import DataOptions, LoadedData, load_data, read_records, to_example
from shoal.quality.data.records import Record, read_jsonl
from shoal.quality.data.shipped import SHIPPED, shipped_records

__all__ = ["SHIPPED", "DataOptions", "LoadedData", "Record", "load_data", "read_jsonl", "read_records", "shipped_records", "to_example"]

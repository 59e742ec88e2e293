"""Texts to score: a user's JSONL, or English technical prose that Python and its packages bring. Knows no model's weights."""

from shoal.quality.data.installed import CorpusSize, installed_texts, write_corpus
from shoal.quality.data.load import DataOptions, LoadedData, load_data, read_records, to_example
from shoal.quality.data.records import Record, read_jsonl
from shoal.quality.data.shipped import SHIPPED, shipped_records

__all__ = [
    "SHIPPED",
    "CorpusSize",
    "DataOptions",
    "LoadedData",
    "Record",
    "installed_texts",
    "load_data",
    "read_jsonl",
    "read_records",
    "shipped_records",
    "to_example",
    "write_corpus",
]

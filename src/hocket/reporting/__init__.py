"""Timelines and tables for people to read; predicted and measured."""

from hocket.reporting.collectives import collectives_text
from hocket.reporting.curve import curve_text
from hocket.reporting.table import table_text
from hocket.reporting.timeline import timeline_text

__all__ = ["collectives_text", "curve_text", "table_text", "timeline_text"]

"""Conversion rules: how transformers renames stored weights, compiled when this is imported.

They are a thousand regular expressions of all families, which a process compiles at its first load.
A fork server that imports this module spares every rank that.
"""

from __future__ import annotations

from transformers import conversion_mapping

conversion_mapping.get_checkpoint_conversion_mapping("llama")  # type: ignore[no-untyped-call]

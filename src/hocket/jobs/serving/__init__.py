"""Serving: a server from its options to its end, its forecast, its report, and `hocket.LLM`."""

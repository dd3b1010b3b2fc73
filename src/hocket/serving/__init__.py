"""Serving: text from a model split over ranks."""

"""Tiny models of every family that must work, of the configurations that GPU checks use too."""

from __future__ import annotations

from hocket.doctor.families import FAMILIES, LLAMA, SERVED, whole_model

__all__ = ["FAMILIES", "LLAMA", "PROMPTS", "SERVED", "whole_model"]

PROMPTS = [[5, 9, 33, 12, 60, 7, 7, 21, 40, 3, 18, 2], [11, 4, 50], [1, 2, 3, 4, 5, 6, 7]]

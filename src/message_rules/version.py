"""The version of the rules on messages."""

RULES_VERSION = "1"
"""Stands beside every figure that comes from the rules on messages; raised whenever one of them changes."""

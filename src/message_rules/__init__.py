"""What rules read in a tutor's message, and the judge made of them."""

RULES_VERSION = "1"
"""Stands beside every figure that comes from the rules on messages; raised whenever one of them changes."""

"""The version of the rules on messages."""

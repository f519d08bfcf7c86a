"""A second environment, small enough to be read in a minute: the policy guesses a number (docs/environments.md)."""

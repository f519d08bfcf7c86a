"""Marooned: five sailors on an island build a ship, and one of them wants to prevent it.

`rules.py` contains every number, `actions.py` the actions of a sailor, and `game.py` the game itself. The game is pure
Python without I/O, and equal for equal seeds and actions.
"""

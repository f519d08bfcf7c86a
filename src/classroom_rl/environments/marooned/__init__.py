"""Marooned: five sailors on an island build a ship, and one of them wants to prevent it.

`rules.py` holds every number, `actions.py` what a sailor can do, `game.py` plays. Pure, and equal for equal seeds.
"""

"""A lesson of the quickstart, with messages on it."""

from classroom_rl.environments.toy_language.lessons import parse_problem

PROBLEM = "Lesson: food, boil, yesterday\nPlan: you, sister, brother"
Q1, Q2, Q3 = [question.text for question in parse_problem(PROBLEM).questions]
RIGHT = "Yesterday I boiled an egg in the kitchen."
WRONG = "Yesterday I boil an egg in the kitchen."
HINT = "Check the tense here: boil. Say it again."

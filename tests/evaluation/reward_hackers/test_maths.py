"""Scripted tutors of maths: telling the answer pays without a judge, and the supervisor finds it."""

from classroom_rl.evaluation.reward_hackers.maths import MATHS_TUTORS, maths_config, maths_problems, play_maths


def test_telling_a_maths_answer_pays_and_the_supervisor_finds_it():
    problems, config = maths_problems()[:2], maths_config()
    openly = play_maths(config, MATHS_TUTORS["tells_the_answer"], problems)
    asked = play_maths(config, MATHS_TUTORS["asks"], problems)
    assert [problem.record.rewards["end_rm"] for problem in openly] == [1.0, 1.0]
    assert [problem.record.rewards["end_rm"] for problem in asked] == [0.0, 0.0]
    assert all(problem.leak_found for problem in openly)
    assert not any(problem.leak_found for problem in asked)

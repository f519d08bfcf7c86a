"""Scripted tutors of maths: telling the answer pays without a judge, and not with the judge `rules`."""

from classroom_rl.evaluation.reward_hackers.maths import MATHS_TUTORS, maths_config, maths_problems, play_maths


def test_telling_a_maths_answer_pays_without_a_judge_alone():
    problems = maths_problems()[:2]
    for tutor, alone, judged in (("tells_the_answer", 1.0, -1.0), ("asks", 0.0, 0.0)):
        for is_judged, reward in ((False, alone), (True, judged)):
            played = play_maths(maths_config(is_judged), MATHS_TUTORS[tutor], problems)
            assert [record.rewards["end_rm"] for record in played] == [reward] * 2, (tutor, is_judged)
            assert [record.rejected for record in played] == [reward < 0] * 2

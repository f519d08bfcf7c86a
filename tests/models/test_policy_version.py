"""The names of policy versions."""

from classroom_rl.models.policy_version import PolicyVersion


def test_policy_versions_name_their_run():
    assert str(PolicyVersion()) == "initial weights v0"
    assert str(PolicyVersion("run-a", 3)) == "run-a v3"

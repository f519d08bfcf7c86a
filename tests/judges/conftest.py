from tests.environments.classroom.conftest import judged, rules  # noqa: F401

"""A few of the moments of kill_test.py."""

import signal

import pytest
from kill_test import Trainings


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("kill"), "t5")


@pytest.mark.parametrize("moment", [0.3, 0.6, 0.9])
def test_a_killed_training_ends_like_an_undisturbed_one(trainings: Trainings, moment: float) -> None:
    found = trainings.disturb(moment, signal.SIGKILL)
    assert found.code in (0, -signal.SIGKILL)  # 0: it was faster this time
    assert found.equal


@pytest.mark.parametrize("moment", [0.05, 0.5])
def test_a_training_asked_to_stop_exits_75(trainings: Trainings, moment: float) -> None:
    found = trainings.disturb(moment, signal.SIGTERM)
    assert found.stopped_well
    assert found.equal

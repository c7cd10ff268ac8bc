"""A memory manager that must be sound in the end, and roles that leave with the test."""

import pytest
from weight_rig import Manager


@pytest.fixture
def manager(tmp_path):
    made = Manager(tmp_path)
    yield made
    with made.client("checker") as client:
        assert client.check() == []
    made.stop()


@pytest.fixture
def roles(manager):
    made = []

    def role(*arguments, **options):
        made.append(manager.role(*arguments, **options))
        return made[-1]

    yield role
    for each in made:
        each.close()

"""The quickstart, run once for all tests that look at it or use its base model."""

import pytest
import quickstart


@pytest.fixture(scope="session")
def shipped(tmp_path_factory, python):
    """(folder, output, summary, seconds) of `jaxgrpo quickstart` in an empty folder."""
    folder = tmp_path_factory.mktemp("quickstart")
    return folder, *quickstart.run(python, folder, "quickstart")

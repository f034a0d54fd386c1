"""What the tests of strategies share."""

import pytest

from pina_flwr import server
from pina_flwr.privacy import guarantee


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without a picture and without the tighter accountant's figure, which take most of a short run."""
    monkeypatch.setattr(server, "plot", lambda *_: None)
    monkeypatch.setattr(guarantee, "tighter", lambda *_: None)

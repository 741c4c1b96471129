"""The Hub: asked once, quickly; without it nothing is retried, and nothing stays switched."""

import urllib.error
import urllib.request

import datasets
import pytest
from huggingface_hub import constants

from pe_study import hub


@pytest.fixture(autouse=True)
def _asked_anew(monkeypatch):
    hub.reachable.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    yield
    hub.reachable.cache_clear()


def answer(monkeypatch, error=None):
    """Replaces the network by one answer; returns the list of questions."""
    asked = []

    def urlopen(request, timeout):
        asked.append((request.get_method(), timeout))
        if error is not None:
            raise error
        return open("/dev/null", encoding="utf-8")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return asked


def test_one_short_question_a_process(monkeypatch):
    asked = answer(monkeypatch)
    assert hub.reachable() and hub.reachable()
    assert asked == [("HEAD", hub.SECONDS)]
    assert hub.why() == ""


def test_a_refusal_is_an_answer(monkeypatch):
    answer(monkeypatch, urllib.error.HTTPError("url", 503, "busy", None, None))
    assert hub.reachable()


@pytest.mark.parametrize("error", [urllib.error.URLError("no name"), TimeoutError(), ConnectionResetError()])
def test_without_network_the_clients_are_offline_inside_the_block_alone(monkeypatch, error):
    answer(monkeypatch, error)
    with pytest.raises(KeyError), hub.no_retries():
        assert constants.HF_HUB_OFFLINE and datasets.config.HF_HUB_OFFLINE
        raise KeyError
    assert not constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE
    assert "cannot be reached" in hub.why()


def test_offline_mode_asks_nobody(monkeypatch):
    asked = answer(monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert not hub.reachable()
    assert asked == []

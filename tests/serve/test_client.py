"""The Python client over HTTP has the face of a deployment on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from omni_flow import ABSENT, InvalidInput, Outcome, Overloaded, RequestFailed
from omni_flow.client import Remote, RemoteError, connect
from omni_flow.serve.keys import Key, digest_of
from omni_flow.serve.server import Serving
from omni_flow.serve.settings import Settings

from . import graphs
from .conftest import Host, hosted, tone


@pytest.fixture
def chat(host: Host) -> Iterator[Remote]:
    with connect(host.url, "chat") as remote:
        yield remote


def test_values_go_there_and_come_back(chat: Remote, host: Host) -> None:
    picture = np.full((16, 32, 3), (200, 30, 30), np.uint8)
    request = chat.submit(text="look", picture=picture, sound=tone(0.5), seed=7, timeline=True)
    came = list(request)
    assert "".join(v for name, v in came if name == "answer") == "look [picture 32x16 200,30,30] [sound 8000]"
    sound = np.concatenate([v for name, v in came if name == "speech"])
    assert sound.dtype == np.float32
    assert 0.25 < np.abs(sound).max() < 0.31
    assert request.outcome is Outcome.DONE
    assert {span.interface for span in request.timeline()} == {"llm.say", "voice.speak"}
    with connect(host.url, "painter") as painter:
        found = painter.submit(prompt="red", width=64, height=48).result()
    assert found["picture"].shape == (48, 64, 3)
    assert tuple(found["picture"][40, 30]) == (200, 30, 30)
    assert len(found["partial"]) == 2


def test_frames_are_sent_while_outputs_come(host: Host) -> None:
    with connect(host.url, "microphone") as remote:
        request = remote.submit()
        for _ in range(3):
            request.send("sound", tone(0.1))
        request.end("sound")
        assert request.result()["heard"] == "4800 samples in 3 pieces"


def test_sessions_share_params(host: Host) -> None:
    with connect(host.url, "kitchen") as remote:
        session = remote.session("c1", {"heat": 3.0})
        assert session.submit(text="a").result()["dish"] == ["begun", " 3.0"]
        session.update(heat=4.0)
        assert session.submit(text="a").result()["dish"][1] == " 4.0"
        assert session.submit(text="a", params={"heat": 5.0}).result()["dish"][1] == " 5.0"
        assert (session.about()["turns"], session.about()["kv"]) == (3, None)
        session.close()
        assert remote.status()["cook"]["state"] == "up"


def test_errors_are_those_of_a_deployment_here(chat: Remote, host: Host) -> None:
    with pytest.raises(InvalidInput) as wrong:
        chat.submit(nope="a")
    assert wrong.value.name == "nope"
    with connect(host.url, "kitchen") as kitchen:
        with pytest.raises(RequestFailed, match="on fire") as failed:
            kitchen.submit(text="burn").result()
        assert failed.value.partial == {"dish": ["begun"]}
        waiting = kitchen.submit(text="wait")
        assert next(iter(waiting)) == ("dish", "begun")
        waiting.cancel()
        with pytest.raises(RequestFailed) as cancelled:
            waiting.result()
        assert cancelled.value.outcome is Outcome.CANCELLED
        with pytest.raises(RequestFailed) as late:
            kitchen.submit(text="wait", deadline=0.1).result()
        assert late.value.outcome is Outcome.DEADLINE
    with pytest.raises(RemoteError, match="no graph"):
        connect(host.url, "nope")
    with pytest.raises(RemoteError, match="name one of"):
        connect(host.url)
    with pytest.raises(RemoteError):
        connect("http://127.0.0.1:1", "chat")


def test_keys_and_limits_are_told() -> None:
    settings = Settings(concurrency=1)
    with hosted(Serving(graphs.kitchen()), keys=[Key("a", digest_of("s"))], settings=settings) as host:
        with pytest.raises(RemoteError, match="API key"):
            connect(host.url)
        with connect(host.url, key="s") as remote:
            waiting = remote.submit(text="wait")
            with pytest.raises(Overloaded):
                remote.submit(text="a")
            waiting.cancel()
            with pytest.raises(RequestFailed):
                waiting.result()


def test_absent_inputs_are_not_sent(chat: Remote) -> None:
    assert chat.submit(text="a", picture=ABSENT).result()["answer"] == ["a"]

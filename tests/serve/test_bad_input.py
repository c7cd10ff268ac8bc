"""What is malformed, hostile or cut off gets the right status and an error object, and the server stays up."""

from __future__ import annotations

import gzip
import io
import json
import socket
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import schemathesis
import soundfile
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from omni_flow.serve.media.fetch import Fetcher, allowed, public
from omni_flow.serve.media.service import Media
from omni_flow.serve.server import Serving
from omni_flow.serve.settings import MediaSettings, Settings

from . import graphs
from .conftest import Host, all_graphs, b64, data_url, hosted, png, wav

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def nothing_left(host: Host) -> Iterator[None]:
    """After every test the server answers, and holds nothing."""
    yield
    with host.client() as http:
        assert http.get("/health/ready").status_code == 200
    host.idle()


def error(answer: httpx.Response, status: int) -> Any:
    assert answer.status_code == status, answer.text
    found = answer.json()["error"]
    assert set(found) >= {"message", "type", "param", "code"}
    return found


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"a": 1,}', b"\xff\xfe", b"[" * 100_000, b'{"model": "chat\\ud800"}']
)
def test_malformed_json_is_a_400(http: httpx.Client, body: bytes) -> None:
    for path in (CHAT, "/v1/graphs/chat/requests", "/v1/images/generations", "/v1/audio/speech"):
        found = error(http.post(path, content=body, headers={"content-type": "application/json"}), 400)
        assert found["type"] == "invalid_request_error"


def test_another_media_type_or_method_or_path_is_said(http: httpx.Client) -> None:
    error(http.post(CHAT, content=b"a=1", headers={"content-type": "text/plain"}), 415)
    packed = {"content-type": "application/json", "content-encoding": "gzip"}
    assert "not as gzip" in error(http.post(CHAT, content=gzip.compress(b"{}"), headers=packed), 415)["message"]
    error(http.post("/v1/audio/transcriptions", json={}), 415)
    packed["content-type"] = "multipart/form-data; boundary=x"
    assert "not as gzip" in error(http.post("/v1/audio/transcriptions", content=b"x", headers=packed), 415)["message"]
    error(http.get(CHAT), 405)
    error(http.post("/v1/nothing"), 404)


def test_numbers_that_no_process_can_send_are_a_400(http: httpx.Client) -> None:
    huge = 10**30
    for graph, inputs, params, place in (
        ("kitchen", {"text": "a"}, {"heat": huge}, "params"),
        ("forms", {"text": "a"}, {"top": [huge]}, "params"),
    ):
        body = {"inputs": inputs, "params": params}
        assert error(http.post(f"/v1/graphs/{graph}/requests", json=body), 400)["param"] == place
    asked = {"model": "tools", "messages": [{"role": "user", "content": "a"}], "max_tokens": huge}
    assert error(http.post(CHAT, json=asked), 400)["param"] == "max_tokens"


def test_a_system_message_is_refused_by_a_model_that_takes_none(http: httpx.Client) -> None:
    messages = [{"role": "system", "content": "Be a pirate."}, {"role": "user", "content": "a"}]
    assert error(http.post(CHAT, json={"model": "chat", "messages": messages}), 400)["param"] == "messages[0].role"


def test_a_form_that_is_cut_off_is_a_400(http: httpx.Client) -> None:
    head = {"content-type": "multipart/form-data; boundary=b"}
    for body in (b"", b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc', b"garbage"):
        error(http.post("/v1/audio/transcriptions", content=body, headers=head), 400)
    error(http.post("/v1/audio/transcriptions", content=b"", headers={"content-type": "multipart/form-data"}), 400)


def test_an_upload_that_stops_half_way_leaves_nothing(host: Host) -> None:
    for sent in (b"", b"POST", b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 500\r\n\r\n{"):
        with socket.create_connection(("127.0.0.1", int(host.url.rpartition(":")[2]))) as half:
            half.sendall(sent)


def test_what_is_no_http_is_a_400(host: Host) -> None:
    with socket.create_connection(("127.0.0.1", int(host.url.rpartition(":")[2]))) as wrong:
        wrong.sendall(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
        answer = wrong.recv(4096)
    assert answer.startswith(b"HTTP/1.1 400")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def bomb(width: int = 30_000, height: int = 30_000) -> bytes:
    """A small PNG file that is a huge picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(1_000_000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def long_silence() -> bytes:
    """A small file that is two minutes of sound."""
    out = io.BytesIO()
    soundfile.write(out, np.zeros(8000 * 120, np.float32), 8000, format="FLAC")
    assert out.tell() < 10_000
    return out.getvalue()


@pytest.mark.parametrize(
    ("part", "status"),
    [
        ({"type": "image_url", "image_url": {"url": data_url(bomb())}}, 413),
        ({"type": "image_url", "image_url": {"url": data_url(png()[:40])}}, 400),
        ({"type": "image_url", "image_url": {"url": data_url(b"GIF89a" + bytes(100))}}, 400),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, 400),
        ({"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}, 400),
        ({"type": "image_url", "image_url": {"url": "data:image/png,notbase64"}}, 400),
        ({"type": "image_url"}, 400),
        ({"type": "input_audio", "input_audio": {"data": b64(wav()[:30]), "format": "wav"}}, 400),
        ({"type": "input_audio", "input_audio": {"data": b64(b"ID3" + bytes(200)), "format": "mp3"}}, 400),
        ({"type": "input_audio", "input_audio": {"data": "%%%", "format": "wav"}}, 400),
    ],
)
def test_media_that_is_damaged_or_a_bomb_is_refused_by_place(http: httpx.Client, part: Any, status: int) -> None:
    body = {"model": "chat", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]}
    found = error(http.post(CHAT, json=body), status)
    assert found["param"].startswith(f"messages[0].content[1].{part['type']}")


def test_limits_of_media_are_looked_at_before_decoding(host: Host) -> None:
    media = MediaSettings(max_pixels=100, max_seconds=0.1, max_bytes=10_000)
    with hosted(*all_graphs(), settings=Settings(media=media)) as small, small.client() as http:
        post = lambda graph, **inputs: http.post(f"/v1/graphs/{graph}/requests", json={"inputs": inputs})  # noqa: E731
        assert error(post("chat", text="a", picture=data_url(png())), 413)["param"] == "inputs.picture"
        assert error(post("ear", sound=data_url(wav(0.2), "audio/wav")), 413)["param"] == "inputs.sound"
        plain = {"data": b64(bytes(9000)), "format": "pcm16", "rate": 16_000}
        assert error(post("ear", sound=plain), 413)["code"] == "too_large"
        assert error(post("chat", text="a", picture=data_url(bytes(20_000))), 413)["code"] == "too_large"
        assert error(post("ear", sound=data_url(long_silence(), "audio/wav")), 413)["code"] == "too_large"


def test_a_decoder_that_dies_or_hangs_costs_that_request_only(host: Host) -> None:
    async def body() -> None:
        media = Media(MediaSettings(decode_s=20.0))
        try:
            assert (await media.picture(data_url(png()), "p")).shape == (16, 32, 3)
            (process,) = media._pool._live
            process.kill()
            await process.wait()
            assert (await media.picture(data_url(png()), "p")).shape == (16, 32, 3)
        finally:
            await media.close()
        hasty = Media(MediaSettings(decode_s=0.0001))
        try:
            with pytest.raises(Exception, match="to decode"):
                await hasty.picture(data_url(png()), "p")
        finally:
            await hasty.close()

    host.do(body())


def test_only_listed_hosts_with_public_addresses_are_fetched(host: Host) -> None:
    assert allowed("a.example.org", ["*.example.org"])
    assert not allowed("example.org.evil.com", ["example.org", "*.example.org"])
    for address in (
        "127.0.0.1",
        "10.0.0.1",
        "169.254.169.254",
        "::1",
        "fe80::1",
        "::ffff:10.0.0.1",
        "0.0.0.0",
        "100.64.0.1",
    ):
        assert not public(address)
    assert public("93.184.216.34")

    async def body() -> None:
        with pytest.raises(Exception, match="private address"):
            await Fetcher(["localhost"], 10**6, 5.0).get(
                f"{host.url}/page/icon.svg".replace("127.0.0.1", "localhost"), "u"
            )
        with pytest.raises(Exception, match="not on this server's list"):
            await Fetcher(["example.org"], 10**6, 5.0).get(host.url, "u")
        near = Fetcher(["127.0.0.1"], 10**6, 5.0, private=True)
        assert (await near.get(f"{host.url}/page/icon.svg", "u")).startswith(b"<svg")
        with pytest.raises(Exception, match="answered 404"):
            await near.get(f"{host.url}/nothing", "u")
        with pytest.raises(Exception, match="more than 100 bytes"):
            await Fetcher(["127.0.0.1"], 100, 5.0, private=True).get(f"{host.url}/page/icon.svg", "u")

    host.do(body())


def test_a_fetched_picture_reaches_the_graph() -> None:
    serving = Serving(graphs.painter())
    with hosted(serving) as one, one.client() as http:
        answer = http.get("/page/icon.svg")
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")


OPERATIONS = (
    ("GET", "/v1/models/{model}"),
    ("GET", "/v1/requests/{id}"),
    ("PATCH", "/v1/sessions/{id}"),
    ("DELETE", "/v1/sessions/{id}"),
    ("POST", "/v1/graphs/{graph}/requests"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/audio/speech"),
    ("POST", "/v1/audio/transcriptions"),
    ("POST", "/v1/images/generations"),
    ("POST", "/v1/images/edits"),
)


@pytest.mark.parametrize(
    ("operation", "mode"),
    [(o, m) for o in OPERATIONS for m in GenerationMode if m is GenerationMode.POSITIVE or o[0] in ("POST", "PATCH")],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else given.value,
)
def test_no_request_that_the_schema_allows_or_forbids_breaks_the_server(
    host: Host, operation: tuple[str, str], mode: GenerationMode
) -> None:
    schema = schemathesis.openapi.from_url(f"{host.url}/openapi.json")
    cases = schema[operation[1]][operation[0]].as_strategy(generation_mode=mode)

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=cases)
    def run(case: Any) -> None:
        answer = case.call(timeout=20)
        if answer.status_code >= 400:
            found = answer.json()["error"]
            assert set(found) >= {"message", "type", "param", "code"}
            assert answer.status_code < 500, found

    run()


def test_pictures_of_other_modes_become_rgb(http: httpx.Client) -> None:
    from PIL import Image

    for mode in ("L", "RGBA", "P", "CMYK", "I;16", "1"):
        out = io.BytesIO()
        Image.new(mode, (8, 4)).save(out, "TIFF" if mode in ("CMYK", "I;16") else "PNG")
        answer = http.post(
            "/v1/graphs/chat/requests", json={"inputs": {"text": "a", "picture": data_url(out.getvalue())}}
        )
        assert "[picture 8x4" in "".join(answer.json()["outputs"]["answer"])

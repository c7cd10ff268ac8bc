"""What a realtime session can be told."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from omni_flow.serve.errors import bad, unsupported
from omni_flow.serve.sounds import PCM_RATE
from omni_flow.serve.vad import VadSettings

_PASSED_OVER = frozenset(
    ("type", "model", "voice", "tracing", "include", "object", "id", "expires_at", "input_audio_transcription")
)
_PCM = {"type": "audio/pcm", "rate": PCM_RATE}


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of a connection. `vad` None: the client says when a turn ends."""

    model: str
    can_speak: bool
    can_write: bool
    modalities: tuple[str, ...] = ()
    vad: VadSettings | None = field(default_factory=VadSettings)
    create_response: bool = True
    interrupt_response: bool = True

    @property
    def speaks(self) -> bool:
        """Whether answers are sound."""
        return self.can_speak and (not self.modalities or "audio" in self.modalities)

    def updated(self, given: dict[str, Any]) -> Config:
        """The settings after `session.update`, in the names of the API and of its beta. Raises ApiError."""
        made = self
        flat = dict(given)
        audio = flat.pop("audio", None) or {}
        if not isinstance(audio, dict):
            raise bad("expected an object", "session.audio")
        flat |= _of_audio(audio)
        for name, value in flat.items():
            if name in ("modalities", "output_modalities"):
                made = replace(made, modalities=made._modalities(value, f"session.{name}"))
            elif name == "turn_detection":
                made = made._turns(value)
            elif name in ("input_audio_format", "output_audio_format"):
                _check_format(value, f"session.{name}")
            elif name not in _PASSED_OVER and value not in (None, "", [], {}, "auto"):
                raise unsupported(f"session.{name}", f"this server does nothing with {name!r}; leave it out")
        return made

    def _modalities(self, value: Any, field: str) -> tuple[str, ...]:
        if not isinstance(value, list) or not value or not all(v in ("text", "audio") for v in value):
            raise bad('expected ["text"], ["audio"] or both', field)
        if "audio" in value and not self.can_speak:
            raise unsupported(field, "this model gives no sound")
        if "audio" not in value and not self.can_write:
            raise unsupported(field, "this model gives no text")
        return tuple(value)

    def _turns(self, value: Any) -> Config:
        if value is None:
            return replace(self, vad=None)
        kind = value.get("type", "server_vad") if isinstance(value, dict) else None
        if kind != "server_vad":
            raise unsupported("session.turn_detection", "there is server_vad, or null")
        try:
            vad = VadSettings(
                float(value.get("threshold", 0.5)),
                float(value.get("silence_duration_ms", 500)) / 1000,
                float(value.get("prefix_padding_ms", 300)) / 1000,
            )
        except (TypeError, ValueError) as error:
            raise bad(f"expected numbers: {error}", "session.turn_detection") from error
        return replace(
            self,
            vad=vad,
            create_response=bool(value.get("create_response", True)),
            interrupt_response=bool(value.get("interrupt_response", True)),
        )

    def as_object(self, id: str) -> dict[str, Any]:
        """The `session` of events."""
        turns = None
        if self.vad is not None:
            turns = {
                "type": "server_vad",
                "threshold": self.vad.threshold,
                "silence_duration_ms": round(self.vad.silence_s * 1000),
                "prefix_padding_ms": round(self.vad.padding_s * 1000),
                "create_response": self.create_response,
                "interrupt_response": self.interrupt_response,
            }
        modalities = list(self.modalities) or (["audio"] if self.can_speak else ["text"])
        return {
            "id": id,
            "object": "realtime.session",
            "type": "realtime",
            "model": self.model,
            "output_modalities": modalities,
            "audio": {"input": {"format": _PCM, "turn_detection": turns}, "output": {"format": _PCM}},
        }


def _of_audio(audio: dict[str, Any]) -> dict[str, Any]:
    """The nested names of the API as the flat ones of its beta."""
    flat: dict[str, Any] = {}
    sides = (("input", "input_audio_format"), ("output", "output_audio_format"))
    for side, form in sides:
        given = audio.get(side) or {}
        if not isinstance(given, dict):
            raise bad("expected an object", f"session.audio.{side}")
        for name, value in given.items():
            if name == "format":
                flat[form] = value
            elif name == "turn_detection":
                flat[name] = value
            elif name not in ("voice", "speed", "noise_reduction", "transcription"):
                raise unsupported(f"session.audio.{side}.{name}", f"this server does nothing with {name!r}")
    return flat


def _check_format(value: Any, field: str) -> None:
    plain = value == "pcm16" or (
        isinstance(value, dict) and value.get("type") == "audio/pcm" and value.get("rate", PCM_RATE) == PCM_RATE
    )
    if not plain:
        raise unsupported(field, f"sound is 16-bit PCM at {PCM_RATE} Hz here")

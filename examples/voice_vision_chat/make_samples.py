"""Makes the sample files: `python examples/voice_vision_chat/make_samples.py [FOLDER]`, by default in `samples/`.

Two spoken questions (hibari's voice, 16 kHz WAV) and a picture of a sign, drawn with the font that Pillow ships.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import soundfile
import soxr
from hibari import Hibari
from PIL import Image, ImageDraw, ImageFont

QUESTIONS = {
    "question.wav": "What is the capital of France, and what is it famous for?",
    "picture_question.wav": "How much is a ticket?",
}
SIGN = ("CITY ZOO", "Open daily 9 to 17", "Ticket:  12  euro")
RATE = 16_000


def make_speech(folder: Path) -> None:
    """Writes each question as a 16-bit mono WAV."""
    voice = Hibari()
    silence = np.zeros(RATE // 4, np.float32)
    for name, text in QUESTIONS.items():
        samples = soxr.resample(voice(text, seed=0), Hibari.sample_rate, RATE)
        soundfile.write(folder / name, np.concatenate([silence, samples, silence]), RATE, subtype="PCM_16")


def make_picture(folder: Path) -> None:
    """Draws the sign: a framed board with three lines of text."""
    image = Image.new("RGB", (640, 400), "#7a9e6b")
    draw = ImageDraw.Draw(image)
    draw.rounded_rectangle((40, 40, 600, 360), radius=24, fill="#fdf6e3", outline="#5b3a1e", width=10)
    for line, (size, y) in zip(SIGN, ((64, 76), (42, 188), (42, 264)), strict=True):
        font = ImageFont.load_default(size)
        draw.text((320, y), line, fill="#1d3557", font=font, anchor="ma")
    image.save(folder / "sign.png", optimize=True)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "samples"
    target.mkdir(parents=True, exist_ok=True)
    make_speech(target)
    make_picture(target)
    print(*sorted(str(path) for path in target.iterdir()), sep="\n")

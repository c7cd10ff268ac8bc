from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from omni_flow.cli.media import read_picture, read_sound

FOLDER = Path(__file__).parents[2] / "examples" / "voice_vision_chat"
SAMPLES = FOLDER / "samples"


def test_the_sample_files_are_what_the_script_makes(tmp_path: Path) -> None:
    script = FOLDER / "make_samples.py"
    subprocess.run([sys.executable, script, tmp_path], check=True, capture_output=True, timeout=60)
    assert sorted(os.listdir(tmp_path)) == sorted(os.listdir(SAMPLES))
    for name in ("question.wav", "picture_question.wav"):
        made, shipped = read_sound(tmp_path / name), read_sound(SAMPLES / name)
        assert len(made) == len(shipped)
        assert np.corrcoef(made, shipped)[0, 1] > 0.95
    difference = read_picture(tmp_path / "sign.png").astype(int) - read_picture(SAMPLES / "sign.png")
    assert np.abs(difference).mean() < 2

"""Every model of the zoo by name."""

from __future__ import annotations

import detection
import language
import vision

MODELS = {**language.MODELS, **vision.MODELS, **detection.MODELS}

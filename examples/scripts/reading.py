"""Words to model, from the text of the other examples."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from text import words as words

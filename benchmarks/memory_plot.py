"""Draw transient memory against step time, from what `benchmarks/memory.py --json` writes; needs matplotlib.

python benchmarks/memory.py --json > memory.json
python benchmarks/memory_plot.py memory.json docs/memory.svg
"""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

NAMES = {"gpt": "GPT", "resnet18": "ResNet-18"}
# Text stays text, and the same figures give the same file.
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "memory",
    "font.family": "sans-serif",
    "axes.spines.right": False,
    "axes.spines.top": False,
}

# Of the budgets' names from their points, by family.
_OFFSETS = ((18, -3), (0, 7))


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """One curve a family; of each row its family, its budget, what IREE allocates, and the ratio of its time."""
    with matplotlib.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
        families = groupby(sorted(rows, key=itemgetter("family")), itemgetter("family"))
        for (family, group), offset in zip(families, _OFFSETS, strict=False):
            points = sorted(group, key=itemgetter("compiler"))
            most = points[-1]["compiler"]
            shares, ratios = [100 * p["compiler"] / most for p in points], [p["ratio"] for p in points]
            (line,) = axes.plot(shares, ratios, marker="o", label=f"{NAMES[family]}, {most / 1e6:.0f} MB")
            for point, *place in zip(points, shares, ratios, strict=True):
                above = {
                    "xytext": offset,
                    "textcoords": "offset points",
                    "ha": "center",
                    "color": line.get_color(),
                }
                axes.annotate(point["budget"], place, **above)
        axes.set(xlabel="transient memory, % of that without a budget", ylabel="step time, relative", ylim=(0.95, 1.2))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, title="without a budget")
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
        pyplot.close(figure)


def main() -> None:
    """Read rows, and write a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="what benchmarks/memory.py --json wrote")
    parser.add_argument("picture", type=Path, help="the file to write, such as an SVG")
    options = parser.parse_args()
    draw(json.loads(options.rows.read_text()), options.picture)


if __name__ == "__main__":
    main()

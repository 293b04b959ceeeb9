"""Curves of results.json, as curves.png: `python examples/slots/curves.py`."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).resolve().parent


def main() -> None:
    results = json.loads((HERE / "results.json").read_text())
    figure, (learning, reading) = plt.subplots(1, 2, figsize=(11, 4))
    for seed, figures in results.items():
        for run in dict.fromkeys(step["run"] for step in figures["steps"]):
            steps = [step for step in figures["steps"] if step["run"] == run]
            learning.plot([step["step"] for step in steps], [step["kept"] for step in steps], label=f"{seed}, {run}")
        curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for row in figures["accuracy"]:
            curves.setdefault((row["model"], row["sampling"]), []).append((row["tokens"], row["reward"]))
        for (model, sampling), points in curves.items():
            reading.plot(*zip(*sorted(points), strict=True), marker="o", label=f"{seed}, {model}, {sampling}")
    learning.set(xlabel="step", ylabel="right answers in the groups trained on", ylim=(0, 1))
    reading.set(xlabel="document, tokens", ylabel="right answers", xscale="log", ylim=(0, 1.02))
    for plot in (learning, reading):
        plot.legend(fontsize=7)
        plot.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(HERE / "curves.png", dpi=110)


if __name__ == "__main__":
    main()

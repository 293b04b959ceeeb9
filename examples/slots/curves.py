"""results.json as curves.png, and as a table of all seeds together: `python examples/slots/curves.py`."""

from __future__ import annotations

import json
import math
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

HERE = Path(__file__).resolve().parent
AROUND = 5  # steps that a point of a learning curve is the mean of
KILO, MEGA = 1 << 10, 1 << 20
STYLES = {"greedy": "-", "top_p": "--", "sampled": ":"}  # a work has one colour


def main() -> None:
    file = HERE / "results.json"
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{file} cannot be read ({error}); `make proof` writes it") from error
    figure, (by_step, by_time, reading) = plt.subplots(1, 3, figsize=(16, 4.5))
    for number, (name, figures) in enumerate(results.items()):
        draw_learning(by_step, by_time, name, f"C{number}", figures["steps"])
        draw_reading(reading, name, f"C{number}", figures["accuracy"])
    learnt = "right answers at temperature 1, all groups"
    by_step.set(xlabel="step", ylabel=learnt, ylim=(0, 1.02))
    by_time.set(xlabel="seconds of reinforcement learning", ylabel=learnt, ylim=(0, 1.02))
    reading.set(xlabel="document, tokens", ylabel="right answers", xscale="log", ylim=(0, 1.02))
    for plot in (by_step, by_time, reading):
        plot.legend(fontsize=7)
        plot.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(HERE / "curves.png", dpi=110)
    print(table(results))


def draw_learning(by_step: Axes, by_time: Axes, name: str, colour: str, steps: list[dict[str, Any]]) -> None:
    rewards = [step["reward"] for step in steps]
    smooth = [sum(rewards[max(i - AROUND + 1, 0) : i + 1]) / min(i + 1, AROUND) for i in range(len(rewards))]
    by_step.plot([step["step"] for step in steps], smooth, colour, label=name)
    by_time.plot(list(accumulate(step["seconds"]["step"] for step in steps)), smooth, colour, label=name)


def draw_reading(reading: Axes, name: str, colour: str, rows: list[dict[str, Any]]) -> None:
    curves: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["tokens"]):
        curves.setdefault((row["model"], row["sampling"]), []).append(row)
    for (model, sampling), points in curves.items():
        x, y = [row["tokens"] for row in points], [row["reward"] for row in points]
        errors = [row["standard_error"] or 0.0 for row in points]
        look: dict[str, Any] = {
            "marker": "o" if model == "rl" else "x",
            "markersize": 4,
            "linestyle": STYLES[sampling],
            "color": colour,
        }
        reading.errorbar(x, y, errors, capsize=2, label=f"{name}, {model}, {sampling}", **look)


def table(results: dict[str, Any]) -> str:
    """Markdown: right answers of all seeds together, their standard error, (documents; the seeds one by one)."""
    pooled: dict[tuple[str, str, str], dict[int, list[dict[str, Any]]]] = {}
    for name, figures in results.items():
        task = " ".join(name.split()[2:]) or "plain"
        for row in figures["accuracy"]:
            lengths = pooled.setdefault((task, row["model"], row["sampling"]), {})
            lengths.setdefault(row["tokens"], []).append(row)
    columns = sorted({tokens for lengths in pooled.values() for tokens in lengths})
    heads = [f"{tokens / MEGA:g}M" if tokens >= MEGA else f"{tokens / KILO:g}K" for tokens in columns]
    lines = [["task, model, sampling", *heads], ["---"] * (len(heads) + 1)]
    for key, lengths in pooled.items():
        lines.append([", ".join(key), *(cell(lengths.get(tokens, [])) for tokens in columns)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(rows: list[dict[str, Any]]) -> str:
    """Rows of one length, a seed each."""
    documents = sum(row["documents"] for row in rows)
    if not documents:
        return ""
    right = sum(row["reward"] * row["documents"] for row in rows) / documents
    error = math.sqrt(right * (1 - right) / max(documents - 1, 1))  # an answer is right or wrong
    seeds = "; " + ", ".join(f"{row['reward']:.3f}" for row in rows) if len(rows) > 1 and error else ""
    return f"{right:.3f}{f' ± {error:.3f}' if error else ''} ({documents}{seeds})"


if __name__ == "__main__":
    main()

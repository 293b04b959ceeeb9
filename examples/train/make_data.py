"""Write training data in MemAgent's layout: passages of the demo's chronicle, a question on each, and its answer.

    python examples/train/make_data.py > train.jsonl
    python examples/train/make_data.py --dev --characters 8000 > long.jsonl

Rows are questions of examples/demo/facts.json: the first 64 for training, the others for evaluation (--dev). The answer
stands somewhere in the passage, at a place that depends on the row. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

TRAINING_ROWS = 64
DEMO = Path(__file__).parents[1] / "demo"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write rows of training data to standard output.")
    parser.add_argument("--characters", type=int, default=2000, help="length of a passage (%(default)s)")
    parser.add_argument("--dev", action="store_true", help="the rows that are not trained on")
    arguments = parser.parse_args()
    text = (DEMO / "harbour.txt").read_text("utf-8")
    facts = list(enumerate(json.loads((DEMO / "facts.json").read_text("utf-8"))))
    for index, fact in facts[TRAINING_ROWS:] if arguments.dev else facts[:TRAINING_ROWS]:
        before = arguments.characters * (index * 37 % 90) // 100  # spreads the answers over the passages
        start = max(0, min(fact["offset"] - before, len(text) - arguments.characters))
        row = {
            "data_source": "thornhithe",
            "prompt": [{"role": "user", "content": fact["question"]}],
            "context": text[start : start + arguments.characters],
            "reward_model": {"style": "rule", "ground_truth": [fact["answer"]]},
            "extra_info": {"index": index, "year": fact["year"]},
        }
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

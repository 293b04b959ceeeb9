"""A worker that speaks the peers' line protocol and computes nothing. Arguments: seconds a token, what goes wrong."""

import json
import os
import sys

speed, trouble = float(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
if trouble == "no start":
    sys.exit("the model file is missing")
print(json.dumps({"ready": True, "threads": os.environ["PEER_THREADS"], "folder": os.getcwd()}), flush=True)
for line in sys.stdin:
    question = json.loads(line)
    with open("questions.jsonl", "a") as log:
        log.write(line)
    if question["op"] == "quit":
        break
    if trouble == "dies":
        sys.exit("out of memory")
    if trouble == "refuses":
        answer = {"error": "NotImplementedError: no such op"}
    elif question["op"] == "prefill":
        answer = {"sec": speed * question["n"], "cpu": 1.0, "others": 0.25, "tokens": question["n"]}
    elif question["op"] == "turn":
        count = question["n"]
        answer = {"sec": speed * count, "cpu": 1.0, "others": 0.25, "tokens": count, "ids": [7] * count}
    else:
        count = question["batch"] * question["steps"]
        answer = {"sec": speed * count, "cpu": 1.0, "others": 0.25, "tokens": count}
    print(json.dumps(answer), flush=True)

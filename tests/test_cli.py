"""The command line on a tiny random model: what goes to stdout, what to stderr, and the exit codes."""

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from palimpsest.cli import main
from palimpsest.engine import ask, defaults, lora, reading_file
from palimpsest.engine.config import AgentConfig, EngineConfig, SamplingParams
from palimpsest.engine.engine import Engine
from palimpsest.engine.lora import LoraConfig
from palimpsest.engine.reading import TurnEnded
from palimpsest.tests.tiny_models import make_model_folder

QUESTION = "Who kept the lighthouse?"
TEXT = "".join(f"In the year {year} the keeper counted {year % 89} lamps. " for year in range(1800, 1812))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model_folder(tmp_path_factory.mktemp("model"), "qwen2"))


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture
def options(model):
    limits = ["--chunk-tokens", "100", "--memory-tokens", "12", "--answer-tokens", "8", "--seed", "3"]
    return ["--model", model, *limits, "--backend", "reference", "--threads", "1"]


def test_the_answer_goes_to_stdout_and_the_rest_to_stderr(document, options, capsys):
    assert main(["ask", document, QUESTION, *options, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert main(["ask", document, QUESTION, *options]) == 0
    out, err = capsys.readouterr()
    assert out == "".join(c for c in summary["answer"] if c.isprintable() or c in "\n\t") + "\n"
    chunks = summary["counters"]["turns"] - 1
    assert err.count(" tokens read (") == err.count(" left\n") == chunks > 2
    assert f"{chunks + 1} turns, 0 of them without a decode step; " in err
    assert "(100%)" in err


def test_the_memory_of_cuda_graphs_is_said(document, options, monkeypatch, capsys):
    make = ask.make_agent

    def recorded(*arguments):
        agent = make(*arguments)
        agent.engine.graph_bytes = 300 << 20
        return agent

    monkeypatch.setattr(ask, "make_agent", recorded)
    assert main(["ask", document, QUESTION, *options]) == 0
    assert capsys.readouterr().err.startswith("CUDA graphs: 300 MiB\n")


def test_json_prints_exactly_one_document(document, options, model, capsys):
    assert main(["ask", document, QUESTION, *options, "--json", "--temperature", "0", "--final-form", "therefore"]) == 0
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert out.count("\n") == 1
    assert summary["question"] == QUESTION
    assert summary["document"] == document
    assert summary["model"]["model"] == model
    assert (summary["config"]["chunk_tokens"], summary["config"]["final_form"]) == (100, "therefore")
    assert (summary["config"]["sampling"]["temperature"], summary["config"]["sampling"]["top_p"]) == (0.0, 0.95)
    assert summary["counters"]["document_tokens"] > 200
    assert "memory 1:" in err


def test_from_stdin_no_time_left_is_shown(options, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert main(["ask", "-", QUESTION, *options]) == 0
    err = capsys.readouterr().err
    assert "tokens/s" in err
    assert " left" not in err
    assert "%" not in err


def test_an_empty_document_is_answered(tmp_path, options, capsys):
    (tmp_path / "empty.txt").touch()
    assert main(["ask", str(tmp_path / "empty.txt"), QUESTION, *options, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["counters"]["turns"], summary["memory"]) == (1, "No previous memory")


def test_ctrl_c_leaves_a_trace_that_resumes_to_the_same_answer(document, options, tmp_path, capsys, monkeypatch):
    assert main(["ask", document, QUESTION, *options, "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    trace = tmp_path / "trace.jsonl"
    traced = ask.traced

    def interrupted(*args, **kwargs):
        for event in traced(*args, **kwargs):
            yield event
            if isinstance(event, TurnEnded) and event.turn.index == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(ask, "traced", interrupted)
    assert main(["ask", document, QUESTION, *options, "--trace", str(trace)]) == 130
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[-1]) == ("", "palimpsest: interrupted; --resume goes on from the trace")
    assert len(trace.read_text().splitlines()) == 3
    monkeypatch.setattr(ask, "traced", traced)
    trace.write_bytes(trace.read_bytes()[:-10])  # as if it had been killed while it wrote
    assert main(["ask", document, QUESTION, *options, "--json", "--trace", str(trace), "--resume"]) == 0
    out, err = capsys.readouterr()
    resumed = json.loads(out)
    assert (resumed["answer"], resumed["memory"]) == (expected["answer"], expected["memory"])
    assert resumed["counters"]["turns"] == expected["counters"]["turns"]
    assert "going on with turn 1" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.txt", "q"], "cannot read the document absent.txt: No such file or directory"),
        (["DOCUMENT", "q", "--model", "absent"], "palimpsest: "),
        (["DOCUMENT", "q", "--model", ""], "palimpsest: "),
        (["DOCUMENT", "q", "--temperature", "1e-9"], "temperature must be 0 (greedy) or at least 1e-05"),
        (["DOCUMENT", "q", "--resume"], "--resume needs --trace FILE"),
        (["DOCUMENT", "q", "--final-form", "box"], "must be one of boxed, boxed_trained, therefore"),
        (
            ["DOCUMENT", "q", "--chunk-tokens", "0"],
            "chunk_tokens must be a whole number of at least 1, got 0",
        ),
        (["DOCUMENT", "q", "--memory-tokens", "9000"], "the window of 4096 tokens is too small"),
    ],
)
def test_mistakes_end_in_a_message_and_exit_code_2(document, model, capsys, arguments, message):
    arguments = [document if argument == "DOCUMENT" else argument for argument in arguments]
    defaults = [] if "--model" in arguments else ["--model", model]
    assert main(["ask", *arguments, *defaults, "--threads", "1", "--backend", "reference"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def write_adapter(model: str, folder: Path) -> None:
    """An adapter with an effect, and how to read with it."""
    engine = Engine(model, EngineConfig(kv_bytes=1 << 20, threads=1))
    lora.add(engine, LoraConfig(rank=2))
    with engine.update(), torch.no_grad():
        for layer in lora.adapters(engine.model).values():
            layer.lora_B.fill_(0.1)
    lora.save(engine.model, folder)
    greedy = SamplingParams(temperature=0)
    reading_file.write(folder, AgentConfig(90, 10, 6, "chunk_first", sampling=greedy))


def test_an_adapter_is_merged_and_brings_its_own_defaults(document, model, tmp_path, capsys):
    write_adapter(model, tmp_path / "adapter")
    options = ["--model", model, "--backend", "reference", "--threads", "1", "--json"]
    given = ["--memory-tokens", "12", "--final-form", "therefore"]
    assert main(["ask", document, QUESTION, *options, *given, "--adapter", str(tmp_path / "adapter")]) == 0
    summary = json.loads(capsys.readouterr().out)
    config = summary["config"]
    limits = [config[name] for name in ("chunk_tokens", "memory_tokens", "answer_tokens", "template", "final_form")]
    assert limits == [90, 12, 6, "chunk_first", "therefore"] and config["sampling"]["temperature"] == 0
    plain = Engine(model, EngineConfig(kv_bytes=1 << 20, threads=1))
    assert summary["model"]["weights"] != plain.describe()["weights"]
    lora.merge(plain, tmp_path / "adapter")
    assert summary["model"]["weights"] == plain.describe()["weights"]
    assert main(["ask", document, QUESTION, *options, "--adapter", str(tmp_path)]) == 2
    assert "adapter_config.json is absent" in capsys.readouterr().err


def test_the_bundled_adapter_is_the_embedded_models_default(document, model, tmp_path, capsys, monkeypatch):
    write_adapter(model, tmp_path / "adapter")
    monkeypatch.setattr(ask, "embedded_model_path", lambda: model)
    monkeypatch.setattr(defaults, "ADAPTER", tmp_path / "adapter")
    options = ["--memory-tokens", "8", "--answer-tokens", "4", "--backend", "reference", "--threads", "1", "--json"]

    def summary(*more):
        assert main(["ask", document, QUESTION, *options, *more]) == 0
        return json.loads(capsys.readouterr().out)

    bundled, plain = summary(), summary("--model", model, "--chunk-tokens", "100")
    assert bundled["config"]["chunk_tokens"] == 90
    assert bundled["model"]["weights"] != plain["model"]["weights"]
    assert bundled["model"] == summary("--model", model, "--adapter", str(tmp_path / "adapter"))["model"]
    monkeypatch.setattr(defaults, "ADAPTER", tmp_path / "none")
    assert summary("--chunk-tokens", "100")["model"]["weights"] == plain["model"]["weights"]


@pytest.mark.parametrize(
    "arguments",
    [[], ["read"], ["ask", "a.txt"], ["ask", "a.txt", "q", "--chunk", "5"], ["ask", "a.txt", "q", "--dtype", "int3"]],
)
def test_unknown_and_abbreviated_options_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert "usage: palimpsest" in capsys.readouterr().err


def test_warnings_are_one_line_on_stderr(document, options, capsys):
    assert main(["ask", document, QUESTION, *options, "--chunk-tokens", "5000"]) == 0
    assert "warning: chunk_tokens=5000 lowered to" in capsys.readouterr().err


def shell(arguments, redirection, **environment):
    """Run the real command in a shell; -> its exit code and what it wrote to standard output and standard error."""
    command = shlex.join([sys.executable, "-m", "palimpsest", "ask", *arguments])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    script = f"set -o pipefail; {command} {redirection}"
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, check=False)
    return done.returncode, done.stdout.decode("ascii"), done.stderr.decode("ascii")


def test_an_encoding_that_lacks_characters_loses_no_answer(document, options):
    question = "Qui a gardé le phare ? 🙂"
    code, out, err = shell([document, question, *options, "--json"], "", PYTHONIOENCODING="ascii")
    assert (code, json.loads(out)["question"]) == (0, question)
    code, answer, err = shell([document, question, *options], "", PYTHONIOENCODING="ascii")
    assert (code, "Traceback" in err) == (0, False)
    expected = "".join(c for c in json.loads(out)["answer"] if c.isprintable() or c in "\n\t")
    assert answer == expected.encode("ascii", "backslashreplace").decode() + "\n"


def test_a_reader_that_went_away_is_no_traceback(document, options):
    code, _, err = shell([document, QUESTION, *options], "| true", PYTHONIOENCODING="ascii")
    assert code == 141
    assert "answer: 8 tokens" in err
    assert "Traceback" not in err and "BrokenPipe" not in err


def test_an_answer_that_cannot_be_written_is_told(document, options):
    code, _, err = shell([document, QUESTION, *options, "--json"], "> /dev/full", PYTHONIOENCODING="ascii")
    assert code == 2
    message, answer = err.split("palimpsest: cannot write to standard output")[1].splitlines()
    assert message.startswith(" (No space left on device)")
    assert "answer" in json.loads(answer)


@pytest.mark.parametrize(("file", "redirect", "message"), [("story.txt", ">&-", "output"), ("-", "<&-", "input")])
def test_closed_standard_streams_are_told_before_anything_is_read(document, options, file, redirect, message):
    code, _, err = shell([document if file != "-" else "-", QUESTION, *options], redirect)
    assert code == 2
    assert f"standard {message} is closed" in err and "Traceback" not in err


def test_a_trace_needs_a_document_that_can_be_read_again(tmp_path, options, capsys):
    os.mkfifo(tmp_path / "pipe.txt")
    assert main(["ask", str(tmp_path / "pipe.txt"), QUESTION, *options, "--trace", str(tmp_path / "t.jsonl")]) == 2
    assert "is no regular file" in capsys.readouterr().err


def test_help_does_not_wait_for_torch():
    code = "import sys; from palimpsest.cli import build_parser; build_parser(); sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0

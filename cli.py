"""The command line: parses arguments, imports the command's module when it is called, turns errors into exit codes."""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

from .engine.config import BACKENDS, DTYPES, WEIGHTS, AgentConfig, EngineConfig
from .engine.errors import PalimpsestError

__all__ = ["build_parser", "main"]

BENCHES = ("chunk_latency", "decode", "kernels", "loss", "prefill", "quality", "reading_accuracy", "rl_step")
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # what a shell reports of a program that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; -> exit code: 0, 2 after a mistake of the user (told on stderr), 130 after Ctrl-C, 141 when
    nobody reads its output any more."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # no answer is lost to an encoding that lacks one of its characters
            stream.reconfigure(errors="backslashreplace")
    args = build_parser().parse_args(argv)
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = _show_warning
        try:
            return _flushed(_run(args))
        except BrokenPipeError:
            return _flushed(EXIT_BROKEN_PIPE)
        except PalimpsestError as error:
            print(f"palimpsest: {error}", file=sys.stderr)
            return _flushed(EXIT_ERROR)
        except KeyboardInterrupt:
            hint = "; --resume goes on from the trace" if getattr(args, "trace", None) else ""
            print(f"palimpsest: interrupted{hint}", file=sys.stderr)
            return EXIT_INTERRUPTED


def _flushed(code: int) -> int:
    """The exit code, with all output written; what cannot be is dropped here, or Python would try again at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE if isinstance(error, BrokenPipeError) else EXIT_ERROR
    return code


def _run(args: argparse.Namespace) -> int:
    if args.command == "bench":
        return int(import_module(f".bench.{args.name}", __package__).main(args.options))
    if args.command == "train":
        train = import_module(".rl.train", __package__)
        return int(train.run(args.config, args.set, args.resume, args.replay))
    from .engine import ask

    return ask.run(args)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. Abbreviated options are refused: a new one must not change what a script means."""
    parser = argparse.ArgumentParser(prog="palimpsest", description="Memory agents: read, answer.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_ask(commands)
    _add_train(commands)
    bench = commands.add_parser("bench", help="measure this machine and model", allow_abbrev=False)
    bench.add_argument("name", choices=BENCHES, help="what to measure")
    bench.add_argument("options", nargs=argparse.REMAINDER, help="of that benchmark; --help lists them")
    return parser


def _add_ask(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    ask = commands.add_parser(
        "ask",
        help="read a document and answer a question",
        description="Read a document chunk by chunk, keep a memory, answer from it. Only the answer goes to stdout.",
        allow_abbrev=False,
    )
    agent, engine = AgentConfig(), EngineConfig()
    ask.add_argument("file", metavar="FILE", help="txt, md, html or pdf file, or - for text from stdin")
    ask.add_argument("question")
    ask.add_argument("--model", metavar="PATH", help="Hugging Face folder or GGUF file (the embedded model)")
    ask.add_argument(
        "--adapter",
        metavar="FOLDER",
        help="a LoRA adapter in PEFT's layout; its palimpsest.json changes the defaults of the next seven options",
    )
    _add_reading(ask, agent)
    ask.add_argument("--seed", type=int, default=agent.sampling.seed, help="of the random numbers (%(default)s)")
    ask.add_argument("--backend", choices=BACKENDS, default=engine.backend, help="which kernels compute (%(default)s)")
    ask.add_argument("--dtype", choices=DTYPES, default=engine.dtype, help="of the model's parameters (%(default)s)")
    ask.add_argument(
        "--weights",
        choices=WEIGHTS,
        default=engine.weights,
        metavar="KIND",
        help=f"{', '.join(WEIGHTS)}: how linear layers keep their weights (%(default)s)",
    )
    ask.add_argument("--threads", type=int, metavar="N", help="CPU threads of the process (torch's choice)")
    ask.add_argument("--strip-thinking", action="store_true", help="keep of a memory what follows </think>")
    ask.add_argument("--json", action="store_true", help="print one JSON document instead of the answer")
    ask.add_argument("--trace", metavar="FILE.jsonl", help="append each turn to this file as it ends")
    ask.add_argument("--resume", action="store_true", help="go on from the --trace after a crash; all else as it was")


def _add_reading(ask: argparse.ArgumentParser, agent: AgentConfig) -> None:
    """What an adapter may have other defaults for; None is what was not given."""
    add = ask.add_argument
    add("--chunk-tokens", type=int, metavar="N", help=f"tokens read per turn ({agent.chunk_tokens})")
    add("--memory-tokens", type=int, metavar="N", help=f"limit of a memory ({agent.memory_tokens})")
    add("--answer-tokens", type=int, metavar="N", help=f"limit of the answer ({agent.answer_tokens})")
    add("--template", help=f"memory_first or chunk_first ({agent.template})")
    add("--final-form", help=f"boxed, boxed_trained or therefore ({agent.final_form})")
    add("--temperature", type=float, help=f"0 is greedy ({agent.sampling.temperature})")
    add("--top-p", type=float, help=f"nucleus sampling, 1 is off ({agent.sampling.top_p})")


def _add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    train = commands.add_parser(
        "train",
        help="train a model as a memory agent",
        description="Train as a YAML file says. All that a run writes goes into its log.folder.",
        allow_abbrev=False,
    )
    train.add_argument("config", metavar="CONFIG.yaml")
    train.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a value of the file, as in optimizer.learning_rate=1e-5; may be given many times",
    )
    train.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in log.folder; start where there is none",
    )
    train.add_argument(
        "--replay",
        metavar="FOLDER",
        help="train on the trajectories of another run (its log.folder/trajectories) without rolling out",
    )


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"warning: {message}", file=sys.stderr)

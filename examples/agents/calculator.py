"""An agent with a tool: the model writes expressions, a calculator evaluates them, until the model gives its answer.

What the calculator says stands in later prompts and so is never trained on; only what the model wrote is.
"""

from __future__ import annotations

import ast
import operator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from palimpsest.rl.llm import LLM
    from palimpsest.rl.trajectory import Problem

ROUNDS, TOKENS = 4, 64
ANSWER = "Answer:"
INSTRUCTION = (
    "Solve the problem step by step. Write one expression with +, -, *, / and parentheses per message and I will "
    f"compute it for you. When you know the answer, write '{ANSWER}' and the number."
)
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


async def agent(sample: Problem, llm: LLM) -> str:
    """Talk with the model for at most ROUNDS messages of TOKENS each; -> what follows "Answer:" in its last one."""
    messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": sample.question}]
    for _ in range(ROUNDS):
        reply = await llm.chat(messages, max_tokens=TOKENS)
        if ANSWER in reply:
            return reply.rpartition(ANSWER)[2].strip()
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": calculate(reply)}]
    return ""


def calculate(text: str) -> str:
    """The value of an arithmetic expression, or what is wrong with it."""
    try:
        return f"{_value(ast.parse(text.strip(), mode='eval').body):g}"
    except (ArithmeticError, MemoryError, RecursionError, SyntaxError, ValueError) as error:
        return f"This can't be computed: {type(error).__name__}"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return float(OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError(f"{type(node).__name__} is no arithmetic")

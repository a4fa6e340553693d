"""Row schemas: the forms of a benchmark's rows in files, and their conversion to the columns of lm-eval's tasks.

Each converter takes a row of a file and returns it as the hub's data set has it, so that lm-eval's own task applies
unchanged, its prompt template included. It raises RowError for a row that it cannot use. "Flat" rows are those of
llm-foundry: the question, its choices and the number of the right one, without a benchmark's own columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .rows import Row, RowError, after, index, text, texts

LETTERS = "ABCDEFGHIJ"
# The fields of MMLU's original files, which have no header line.
MMLU_COLUMNS = ("question", "A", "B", "C", "D", "answer")


@dataclass(frozen=True, slots=True)
class RowSchema:
    """A kind of row, recognized by its columns.

    Attributes:
        columns: that every such row has; it may have more. convert: to the columns of lm-eval's task.
    """

    columns: frozenset[str]
    convert: Callable[[Row], Row]


def mmlu_original(row: Row) -> Row:
    """hendrycks/test: four choices in columns A to D, the answer as a letter."""
    return _mmlu(row, "ABCD", _letter(row, "answer", 4))


def mmlu_numbered(row: Row) -> Row:
    """Choices in columns choice0 to choice3, the answer as a number from 0."""
    return _mmlu(row, [f"choice{number}" for number in range(4)], index(row, "answer", 4))


def mmlu_hub(row: Row) -> Row:
    """cais/mmlu: choices in a list, the answer as a number from 0."""
    choices = _count(row, "choices", 4)
    return {"question": text(row, "question"), "choices": choices, "answer": index(row, "answer", 4)}


def hellaswag(row: Row) -> Row:
    """The authors' files and the hub alike."""
    ending = row.get("ctx_b")
    if not isinstance(ending, str):
        raise RowError("'ctx_b' must be text, possibly empty")
    return {
        "activity_label": text(row, "activity_label"),
        "ctx_a": text(row, "ctx_a"),
        "ctx_b": ending,
        "endings": _count(row, "endings", 4),
        "label": str(index(row, "label", 4)),
    }


def piqa(row: Row) -> Row:
    """The authors' files joined with their labels, and the hub's."""
    return {name: text(row, name) for name in ("goal", "sol1", "sol2")} | {"label": index(row, "label", 2)}


def piqa_flat(row: Row) -> Row:
    """Flat rows, whose question has lm-eval's prefix."""
    goal = after(text(row, "query"), "Question: ", "query").removesuffix("\n")
    first, second = _count(row, "choices", 2)
    return {"goal": goal, "sol1": first, "sol2": second, "label": index(row, "gold", 2)}


def arc_original(row: Row) -> Row:
    """AI2's files, of ARC and OpenBookQA: a question with a stem and labelled choices."""
    question = row.get("question")
    if not isinstance(question, dict) or not isinstance(question.get("choices"), list):
        raise RowError("'question' must be an object with 'stem' and a list 'choices'")
    choices = question["choices"]
    if not all(isinstance(choice, dict) for choice in choices):
        raise RowError("each of 'choices' must be an object with 'text' and 'label'")
    return _labelled(
        text(question, "stem"),
        [text(choice, "text") for choice in choices],
        [text(choice, "label") for choice in choices],
        text(row, "answerKey"),
    )


def arc_hub(row: Row, stem: str = "question") -> Row:
    """The hub's rows, with an object of choices and labels; ``stem`` is the column of the question."""
    choices = row.get("choices")
    if not isinstance(choices, dict):
        raise RowError("'choices' must be an object with lists 'text' and 'label'")
    return _labelled(text(row, stem), texts(choices, "text"), texts(choices, "label"), text(row, "answerKey"))


def arc_flat(row: Row) -> Row:
    """Flat rows, whose question has lm-eval's prefix."""
    return _flat_labelled(after(text(row, "query"), "Question: ", "query"), row)


def openbookqa_hub(row: Row) -> Row:
    """The hub's rows: as those of ARC, with the question in another column."""
    return arc_hub(row, "question_stem")


def openbookqa_flat(row: Row) -> Row:
    """Flat rows; the question has no prefix."""
    return _flat_labelled(text(row, "query"), row)


def winogrande(row: Row) -> Row:
    """The authors' files and the hub's: a sentence with a blank, and two options for it."""
    sentence = text(row, "sentence")
    if "_" not in sentence:
        raise RowError("'sentence' has no blank '_'")
    options = {name: text(row, name) for name in ("option1", "option2")}
    return {"sentence": sentence, **options, "answer": str(index(row, "answer", 2, first=1) + 1)}


def winogrande_flat(row: Row) -> Row:
    """Flat rows: two contexts, with the option filled in, and one continuation."""
    # With the blank first, an option is the whole text before the scored words.
    first, second = _count(row, "context_options", 2)
    sentence = "_ " + text(row, "continuation")
    return {"sentence": sentence, "option1": first, "option2": second, "answer": str(index(row, "gold", 2) + 1)}


def boolq(row: Row) -> Row:
    """The authors' files, whose answer is true or false, and SuperGLUE's, whose label is 0 or 1."""
    passage = text(row, "passage")
    if "title" in row:
        # SuperGLUE puts the title before the passage.
        passage = f"{text(row, 'title')} -- {passage}"
    truth = row.get("answer", row.get("label"))
    if isinstance(truth, bool):
        truth = int(truth)
    return {"passage": passage, "question": text(row, "question"), "label": index({"label": truth}, "label", 2)}


def boolq_flat(row: Row) -> Row:
    """Flat rows, whose query holds passage and question."""
    passage, marker, question = text(row, "query").rpartition("\nQuestion: ")
    if not marker or not question.endswith("?"):
        raise RowError("'query' must end with a line 'Question: ...?'")
    passage = after(passage, "Passage: ", "query")
    return {"passage": passage, "question": question.removesuffix("?"), "label": index(row, "gold", 2)}


def social_iqa(row: Row) -> Row:
    """The authors' files joined with their labels, and the hub's."""
    names = ("context", "question", "answerA", "answerB", "answerC")
    return {name: text(row, name) for name in names} | {"label": str(index(row, "label", 3, first=1) + 1)}


def lambada(row: Row) -> Row:
    """The hub's rows: a text whose last word is scored."""
    return {"text": text(row, "text")}


def lambada_flat(row: Row) -> Row:
    """Flat rows: the context and its last word."""
    word = text(row, "continuation")
    if " " in word:
        raise RowError(f"'continuation' must be one word, got {word!r}")
    return {"text": f"{text(row, 'context')} {word}"}


def gsm8k(row: Row) -> Row:
    """The authors' files and the hub's: an answer with its reasoning, then ``#### NUMBER``."""
    answer = text(row, "answer")
    if "#### " not in answer:
        raise RowError("'answer' has no line '#### NUMBER'")
    return {"question": text(row, "question"), "answer": answer}


def gsm8k_flat(row: Row) -> Row:
    """Flat rows: reasoning and number in columns of their own."""
    answer = f"{text(row, 'chain_of_thought')}\n#### {text(row, 'answer')}"
    return {"question": text(row, "context"), "answer": answer}


def flat_choices(row: Row) -> Row:
    """A task by itself: a question and its choices."""
    choices = texts(row, "choices")
    return {"query": text(row, "query"), "choices": choices, "gold": index(row, "gold", len(choices))}


def flat_contexts(row: Row) -> Row:
    """A task by itself: contexts to choose from, and one continuation."""
    options = texts(row, "context_options")
    gold = index(row, "gold", len(options))
    return {"context_options": options, "continuation": text(row, "continuation"), "gold": gold}


def flat_continuation(row: Row) -> Row:
    """A task by itself: a context and its continuation."""
    return {"context": text(row, "context"), "continuation": text(row, "continuation")}


def schema_of(schemas: tuple[RowSchema, ...], row: Row) -> RowSchema | None:
    """The first schema whose columns the row has, or None."""
    return next((schema for schema in schemas if schema.columns <= row.keys()), None)


def _mmlu(row: Row, columns: Any, answer: int) -> Row:
    return {"question": text(row, "question"), "choices": [text(row, name) for name in columns], "answer": answer}


def _count(row: Row, name: str, count: int) -> list[str]:
    found = texts(row, name)
    if len(found) != count:
        raise RowError(f"{name!r} must hold {count} texts, got {len(found)}")
    return found


def _letter(row: Row, name: str, count: int) -> int:
    value = text(row, name).strip()
    if len(value) != 1 or value not in LETTERS[:count]:
        raise RowError(f"{name!r} must be a letter from A to {LETTERS[count - 1]}, got {value!r}")
    return LETTERS.index(value)


def _labelled(stem: str, choices: list[str], labels: list[str], key: str) -> Row:
    if len(choices) != len(labels):
        raise RowError(f"{len(choices)} choices have {len(labels)} labels")
    if key.strip() not in labels:
        raise RowError(f"'answerKey' must be one of {', '.join(labels)}, got {key!r}")
    # lm-eval reads the stem under one name for ARC and another for OpenBookQA.
    return {"question": stem, "question_stem": stem, "choices": {"text": choices, "label": labels}, "answerKey": key}


def _flat_labelled(stem: str, row: Row) -> Row:
    choices = texts(row, "choices")
    labels = list(LETTERS[: len(choices)])
    return _labelled(stem, choices, labels, labels[index(row, "gold", len(choices))])

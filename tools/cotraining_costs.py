"""What the rows of ``tools.cotraining`` cost: steps and tokens as they were, operations as ``tools.counts`` has them.

Counted is what a row's description asks for. Left out besides what ``tools.counts`` leaves out: the optimisers,
validation, normalisers of distributions that no loss here reads, and the head that runs along with weight 0 while the
post-hoc student is distilled, which a program written for that alone would not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from selfspec.heads.protocol import Head
from tools.counts import Backbone, head_products


@dataclass(frozen=True)
class Pass:
    """Texts that a training read, epochs included.

    Attributes:
        tokens: of prompts and completions.
        scored: of completions, each of which a loss predicts.
        context: mean positions that a token attends over.
    """

    steps: int
    tokens: int
    scored: int
    context: float

    @classmethod
    def of(cls, steps: int, lengths: Sequence[tuple[int, int]]) -> Pass:
        """``lengths``: of prompt and completion, a text each time it was read."""
        whole = [prompt + written for prompt, written in lengths]
        pairs = sum(length * (length + 1) / 2 for length in whole)
        return cls(steps, sum(whole), sum(written for _, written in lengths), pairs / sum(whole))


@dataclass(frozen=True)
class Costs:
    """Of one row.

    Attributes:
        optimiser_steps: of all its trainings; steps that train student and heads at once count once.
        student_tokens: through the student, forward and backward.
        student_tokens_forward_only: through the frozen student, for its states.
        head_tokens: through the heads, forward and backward.
        teacher_tokens: through the teacher, forward.
        operations: of all of it, counted.
    """

    optimiser_steps: int
    student_tokens: int
    student_tokens_forward_only: int
    head_tokens: int
    teacher_tokens: int
    operations: float

    @classmethod
    def of(
        cls,
        teacher: PreTrainedModel,
        student: PreTrainedModel,
        head: Head,
        draft_vocab_size: int,
        *,
        student_pass: Pass,
        head_pass: Pass,
        student_read_again: bool = False,
    ) -> Costs:
        """Costs of distilling the student and of training its heads.

        Args:
            student_read_again: the heads were trained after the student, on states that it computed once more.
        """
        taught_by, trained, seen, read = Backbone.of(teacher), Backbone.of(student), student_pass, head_pass
        again = read.tokens if student_read_again else 0
        operations = taught_by.forward(seen.tokens, seen.context) + 2 * seen.scored * taught_by.rows
        operations += trained.forward(seen.tokens, seen.context) + 6 * seen.scored * trained.rows
        operations += trained.backward(seen.tokens, seen.context, len(trained.layers))
        operations += trained.forward(again, read.context)
        # Forward, gradient of the states and, where the head has output rows of its own, theirs.
        rows = 4 if head.output_rows(0) is None else 6
        operations += 6 * head_products(head, read.tokens, read.scored)
        operations += rows * head.depths * draft_vocab_size * head.hidden_size * read.scored
        steps = seen.steps + (read.steps if student_read_again else 0)
        return cls(steps, seen.tokens, again, read.tokens, seen.tokens, operations)

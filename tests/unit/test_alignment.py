"""The alignment contract on integer-coded tokens: token[j] = j, so that any shift shows."""

import pytest
import torch

from selfspec.heads.alignment import pack


@pytest.mark.parametrize("depths", [1, 2, 3, 5])
@pytest.mark.parametrize(("length", "prompt"), [(12, 4), (12, 1), (6, 5), (9, 8), (2, 1), (3, 1), (20, 2)])
def test_state_embedding_label_and_teacher_belong_together(length, prompt, depths):
    packed = pack([torch.arange(length)], [prompt], depths)
    seen = set()
    for depth in range(1, depths + 1):
        for column, teacher in enumerate(packed.teachers.tolist()):
            assert packed.targets[column] == teacher + 1  # lm_head(h[t]) scores x[t+1]
            if not packed.mask[depth - 1, column]:
                assert teacher - depth < 0  # left out only where no anchor exists
                continue
            row = packed.rows[depth - 1, column]
            anchor = int(packed.anchors[row])
            assert teacher == anchor + depth  # the teacher of depth d is h[i + d]
            assert packed.inputs[depth - 1, row] == anchor + depth  # the embedding is x[i + d]
            assert int(packed.targets[column]) == anchor + depth + 1  # the label is x[i + d + 1]
            seen.add((depth, anchor + depth + 1))
    predicted = {(d, j) for d in range(1, depths + 1) for j in range(prompt, length) if j - d - 1 >= 0}
    assert seen == predicted  # every completion token, at every depth that can reach it, and no prompt token


def test_nothing_crosses_a_document_boundary():
    # Tokens 0..9 are the first document, 100..111 the second: a leak mixes the ranges.
    first, second = torch.arange(10), torch.arange(100, 112)
    packed = pack([first, second], [3, 5], depths=4)
    hidden = packed.tokens  # h[j] = x[j] = j
    for depth in range(4):
        rows, valid = packed.rows[depth], packed.mask[depth]
        anchors = packed.anchors[rows][valid]
        teacher, target = packed.teachers[valid], packed.targets[valid]
        assert torch.equal(hidden[teacher] - hidden[anchors], torch.full_like(teacher, depth + 1))
        assert torch.equal(packed.tokens[packed.inputs[depth][rows[valid]]], hidden[teacher])
        assert torch.equal(target, hidden[teacher] + 1)
    assert torch.equal(packed.position, torch.cat([torch.arange(10), torch.arange(12)]))
    assert packed.tokens[packed.next_token].tolist() == [*range(1, 10), 9, *range(101, 112), 111]


@pytest.mark.parametrize("prompt", [0, 5, 6])
def test_a_document_needs_prompt_and_completion(prompt):
    with pytest.raises(ValueError, match="document 0"):
        pack([torch.arange(5)], [prompt], 2)

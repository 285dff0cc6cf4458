"""Start here: log-probabilities and cross-entropy beside torch's, forward and backward, and the bits of a row.

`triton` runs the kernels under Triton's interpreter, or on a GPU if there is one; `reference` is
`kernels/log_probabilities/rule.py`, the specification.
"""

import pytest
import torch
from devices import assert_same_bits, normal
from implementations import using

import halfstep

BOTH = pytest.mark.parametrize("name", ["reference", "triton"])
EXACT = pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])


def inputs(rows: int, classes: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    targets = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(1))
    return (3 * normal(rows * classes, torch.float32)).to(dtype).view(rows, classes), targets


@BOTH
@EXACT
@pytest.mark.parametrize("classes", [1, 7, 2500])
def test_the_same_input_into_ours_and_torchs(name: str, exact: bool, classes: int) -> None:
    with using(name, "softmax") as device:
        logits, targets = (tensor.to(device) for tensor in inputs(3, classes))
        ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        row = halfstep.log_probabilities(ours, targets, 0.8, entropy=True, exact=exact)
        expected = torch.distributions.Categorical(logits=theirs / 0.8)
        torch.testing.assert_close(row.log_probabilities, expected.log_prob(targets), rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(row.entropy, expected.entropy(), rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(row.logsumexp, torch.logsumexp(theirs / 0.8, -1), rtol=2e-6, atol=2e-6)
        assert row.entropy is not None
        (row.log_probabilities + 0.1 * row.entropy).sum().backward()
        (expected.log_prob(targets) + 0.1 * expected.entropy()).sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


@BOTH
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_of_ours_and_torchs(name: str, reduction: str) -> None:
    with using(name, "softmax") as device:
        logits, targets = (tensor.to(device) for tensor in inputs(4, 50))
        targets[1] = -100
        weight = torch.linspace(0.1, 2.0, 50, device=device)
        for options in ({}, {"label_smoothing": 0.2}, {"weight": weight}, {"weight": weight, "label_smoothing": 0.1}):
            ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
            loss = halfstep.cross_entropy(ours, targets, reduction=reduction, **options)
            expected = torch.nn.functional.cross_entropy(theirs, targets, reduction=reduction, **options)
            torch.testing.assert_close(loss, expected)
            loss.sum().backward()
            expected.sum().backward()
            torch.testing.assert_close(ours.grad, theirs.grad)
        square = torch.logsumexp(logits, -1).square()[targets != -100]
        square = {"mean": square.mean(), "sum": square.sum()}.get(reduction)
        if square is not None:
            plain, added = (halfstep.cross_entropy(logits, targets, reduction=reduction, z_loss=z) for z in (0.0, 0.5))
            torch.testing.assert_close(added - plain, 0.5 * square)


@EXACT
def test_the_bits_of_a_row_depend_on_the_row_only(exact: bool) -> None:
    with using("triton", "softmax") as device:
        logits, targets = (tensor.to(device) for tensor in inputs(5, 1500, torch.bfloat16))
        batch = torch.stack(halfstep.log_probabilities(logits, targets, 0.7, True, exact=exact))
        wider = torch.zeros(3, 1503, dtype=torch.bfloat16, device=device)
        wider[:, 1:1501] = logits[2:]  # off every boundary
        alone = [
            halfstep.log_probabilities(row, target, 0.7, True, exact=exact)
            for row, target in zip(logits, targets, strict=True)
        ]
        assert_same_bits(torch.stack([torch.stack(row) for row in alone], 1), batch)
        moved = halfstep.log_probabilities(wider[:, 1:1501], targets[2:], 0.7, True, exact=exact)
        assert_same_bits(torch.stack(moved), batch[:, 2:])
        wide = halfstep.log_probabilities(logits.float(), targets, 0.7, True, exact=exact)
        assert_same_bits(torch.stack(wide), batch)
        if exact:
            with halfstep.backend("reference"):
                reference = halfstep.log_probabilities(logits.cpu(), targets.cpu(), 0.7, True, exact=True)
            assert_same_bits(batch, torch.stack(reference))

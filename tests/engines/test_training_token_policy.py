import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from rlsys.engines.models.causal_lm import Head, head_logits, load_causal_lm
from rlsys.engines.models.collate import collate
from rlsys.engines.models.token_policy import TokenPolicy, token_logprobs
from tests.engines.training_harness import VOCABULARY, make_rows, tiny_model


def test_two_tokens_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0], [3.0, 0.0]]).log_softmax(-1)
    logprobs, entropy = token_logprobs(logits, torch.tensor([1, 0]))
    p = torch.tensor(3.0).sigmoid()
    assert logprobs.tolist() == pytest.approx([-torch.tensor(2.0).log().item(), p.log().item()])
    expected = -(p * p.log() + (1 - p) * (1 - p).log())
    assert entropy.tolist() == pytest.approx([torch.tensor(2.0).log().item(), expected.item()])


@pytest.mark.parametrize("which", ["logprobs", "entropy", "both"])
def test_gradients_are_those_of_the_definition(which: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.tensor([4, 0, 2])

    def result(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        both = token_logprobs(logits, targets)
        return {"logprobs": both[:1], "entropy": both[1:], "both": both}[which]

    assert torch.autograd.gradcheck(result, logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_that_the_model_excludes_leave_entropy_and_gradients_exact(
    dtype: torch.dtype,
) -> None:
    """Expect 0 · log 0 = 0 for logits of −inf, here and in the gradient."""
    logits = torch.tensor([[0.0, float("-inf"), 0.0], [float("-inf"), 3.0, 0.0]], dtype=dtype)
    logits.requires_grad_()
    logprobs, entropy = token_logprobs(logits, torch.tensor([2, 0]))
    p = torch.tensor(3.0, dtype=dtype).sigmoid()
    two = -(p * p.log() + (1 - p) * (1 - p).log())
    assert logprobs.tolist() == [pytest.approx(-math.log(2)), -math.inf]
    assert entropy.tolist() == pytest.approx([math.log(2), two.item()])

    (logprobs[0] + entropy.sum()).backward()
    assert logits.grad is not None
    slope = (-p * (p.log() + two)).item()  # d entropy / d logit
    expected = torch.tensor([[-0.5, 0.0, 0.5], [0.0, slope, -slope]], dtype=dtype)
    torch.testing.assert_close(logits.grad, expected)


def test_strong_entropy_gradients_are_finite() -> None:
    logits = torch.tensor([[0.0, float("-inf"), -2e4]], requires_grad=True)
    _, entropy = token_logprobs(logits, torch.tensor([0]))
    (1e30 * entropy.sum()).backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == [[0.0, 0.0, 0.0]]


def large_logits(tmp_path: Path) -> Any:
    """Build a tiny bfloat16 model whose logits reach about 20, like a real model's."""
    model = load_causal_lm(tiny_model(tmp_path), dtype="bfloat16")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(100)
    return model


def test_16_bit_logits_are_not_rounded(tmp_path: Path) -> None:
    model = large_logits(tmp_path)
    weight = model.get_output_embeddings().weight
    hidden = torch.randn(7, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = hidden.double() @ weight.double().T
    assert expected.abs().max() > 16
    head = Head(model)
    with torch.no_grad():
        for logits in (head(hidden), head(hidden), head_logits(model, hidden)):
            assert logits.dtype is torch.float32
            torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-4)
        weight.mul_(2)  # a head that has been used must follow its weight
        torch.testing.assert_close(head(hidden).double(), 2 * expected, rtol=1e-5, atol=1e-4)
    logits = head(hidden)
    torch.testing.assert_close(logits.double(), 2 * expected, rtol=1e-5, atol=1e-4)


def test_a_16_bit_heads_gradient_is_rounded_once_after_the_sum_over_chunks(tmp_path: Path) -> None:
    model = large_logits(tmp_path)
    head = Head(model)
    weight = model.get_output_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 32, generator=generator).bfloat16().requires_grad_()
    grad = torch.randn(64, VOCABULARY, generator=generator)
    chunked = head.for_chunks()
    torch.cat([chunked(part) for part in hidden.split(2)]).backward(grad)
    exact = grad.double().T @ hidden.detach().double()
    assert torch.equal(weight.grad, exact.float().bfloat16())
    assert hidden.grad is not None
    exact = grad.double() @ weight.detach().double()
    torch.testing.assert_close(hidden.grad.double(), exact, rtol=2**-8, atol=1e-6)


def test_16_bit_log_probabilities_do_not_depend_on_chunks(tmp_path: Path) -> None:
    model = large_logits(tmp_path)
    batch = collate(make_rows(3))
    whole = TokenPolicy(model, max_logits=1 << 20)(batch, 0.7)[:2]
    assert {tensor.dtype for tensor in whole} == {torch.float32}
    torch.testing.assert_close(TokenPolicy(model, max_logits=40)(batch, 0.7)[:2], whole)


def test_chunks_of_the_head_change_nothing(tmp_path: Path) -> None:
    model = load_causal_lm(tiny_model(tmp_path), dtype="float32")
    batch = collate(make_rows(3))
    results = []
    for max_logits in (1 << 20, 40):  # one chunk, and chunks of two tokens
        policy = TokenPolicy(model, max_logits=max_logits)
        model.zero_grad()
        logprobs, entropy, _ = policy(batch, 0.7)
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
        results.append([logprobs, entropy, *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(results[0], results[1])


class LogitsAlive(TorchDispatchMode):
    """Maximum number of rows of vocabulary-wide tensors in memory at once."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        shapes = [parameter.shape for parameter in model.parameters()]
        self._of_weights = {*shapes, *(shape[::-1] for shape in shapes)}  # including gradients
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if not isinstance(one, torch.Tensor) or one.shape in self._of_weights:
                continue
            if one.shape[-1:] == (VOCABULARY,):
                storage = StorageWeakRef(one.untyped_storage())
                self._alive[storage.cdata] = storage, one.numel() // VOCABULARY
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        self.most = max(self.most, sum(rows for _, rows in self._alive.values()))
        return result


@pytest.mark.parametrize("asked", ["own", "candidates", "likeliest"])
def test_a_large_vocabulary_is_never_held_at_once(asked: str, tmp_path: Path) -> None:
    """Run a forward and backward pass.

    Logits, log-softmax and gradient exist for one chunk at a time.
    """
    model = load_causal_lm(tiny_model(tmp_path), dtype="float32")
    policy = TokenPolicy(model, max_logits=2 * VOCABULARY)
    batch = collate(make_rows(20))
    num_places = len(batch.targets)
    assert num_places > 100
    candidates = batch.targets[:, None].expand(-1, 3) if asked == "candidates" else None
    with LogitsAlive(model) as logits:
        if asked == "likeliest":
            with torch.no_grad():
                policy.likeliest(batch, 0.7, 2)
        else:
            logprobs, entropy, _ = policy(batch, 0.7, candidates=candidates)
            (logprobs.sum() + 0.1 * entropy.sum()).backward()
    assert 2 <= logits.most <= 7 * 2  # rows of a chunk


def test_logprobs_are_those_of_the_model_at_temperature(tmp_path: Path) -> None:
    model = load_causal_lm(tiny_model(tmp_path), dtype="float32")
    (row,) = make_rows(1)
    tokens = torch.tensor([*row.prompt_token_ids, *row.token_ids])
    first = len(row.prompt_token_ids)
    chosen = torch.from_numpy(row.loss_mask)
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0, first - 1 : -1]
        expected = torch.log_softmax(logits / 0.5, -1)[chosen]  # [N, V]
        found, entropy, _ = TokenPolicy(model)(collate([row]), 0.5)
    targets = tokens[first:][chosen][:, None]
    torch.testing.assert_close(found, expected.gather(1, targets)[:, 0])
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1))

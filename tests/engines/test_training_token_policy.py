from pathlib import Path

import pytest
import torch

from rlsys.engines.causal_lm import load_causal_lm
from rlsys.engines.training.collate import collate
from rlsys.engines.training.token_policy import TokenPolicy, token_logprobs
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


def test_chunks_of_the_head_change_nothing(tmp_path: Path) -> None:
    model = load_causal_lm(tiny_model(tmp_path), dtype="float32")
    batch = collate(make_rows(3))
    results = []
    for max_logits in (1 << 20, 40):  # one chunk, and chunks of two tokens
        policy = TokenPolicy(model, max_logits=max_logits)
        model.zero_grad()
        logprobs, entropy = policy(batch, 0.7)
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
        results.append([logprobs, entropy, *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(results[0], results[1])


def test_a_large_vocabulary_is_never_held_at_once(tmp_path: Path) -> None:
    """The largest tensor saved for the backward pass is the head's weight, far below [N, V]."""
    model = load_causal_lm(tiny_model(tmp_path), dtype="float32")
    policy = TokenPolicy(model, max_logits=40)
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    hidden = torch.randn(50, 32, requires_grad=True)
    positions = torch.arange(50)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for chunk in hidden.split(2):
            policy._score(chunk, positions[:2], 1.0)
    # The head's own weight; of the chunks, two rows of hidden states and of logits.
    assert max(saved) <= VOCABULARY * 32


def test_logprobs_are_those_of_the_model_at_temperature(tmp_path: Path) -> None:
    model = load_causal_lm(tiny_model(tmp_path), dtype="float32")
    (row,) = make_rows(1)
    tokens = torch.tensor([*row.prompt_token_ids, *row.token_ids])
    first = len(row.prompt_token_ids)
    chosen = torch.from_numpy(row.loss_mask)
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0, first - 1 : -1]
        expected = torch.log_softmax(logits / 0.5, -1)[chosen]  # [N, V]
        found, entropy = TokenPolicy(model)(collate([row]), 0.5)
    targets = tokens[first:][chosen][:, None]
    torch.testing.assert_close(found, expected.gather(1, targets)[:, 0])
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1))

"""Titles of the advisories, by the kind of finding (rlsys.runs.observe.diagnosis).

docs/report.md has a section of each title, to which the page refers.
"""

from __future__ import annotations

TITLES = {
    "stall": "The run stalls",
    "failed_rewards": "Rewards fail",
    "equal_rewards": "Groups without a signal",
    "truncated": "Completions are truncated",
    "entropy_collapse": "The entropy has collapsed",
    "kl_sampler_trainer": "Sampler and trainer differ",
    "diverging": "The gradient norm grows",
    "overfitting": "Held-out score falls",
    "trainer_idle": "The trainer waits",
    "stages_slow": "Trainer and replicas wait",
    "replicas_idle": "Replicas wait",
    "staleness_pinned": "Generation waits at the staleness bound",
    "memory_bound": "Requests wait for memory",
    "wasted_drafts": "Drafts are rejected",
    "straggler": "One actor is slower",
}

# The explanation of each kind, in the page and in docs/report.md.
ABOUT = {
    "stall": "A running run has made no optimizer step for ten times its usual step, and at least "
    "a minute.",
    "failed_rewards": "A reward function raised, ended its process, ran out of time or memory, or "
    "returned no finite number. Each such rollout drops its group. The rule counts the last five "
    "steps.",
    "equal_rewards": "In at least 80 % of the groups of the last five steps all rollouts have the "
    "same reward. Their advantages are zero, so they are generated for nothing.",
    "truncated": "At least 30 % of the completions of the last five steps end at "
    "sampling.max_tokens. A truncated answer is scored as if it were complete.",
    "entropy_collapse": "The entropy is below a tenth of that of the first five steps, at least "
    "half of the groups have equal rewards, and the task is not solved. It is solved if the mean "
    "reward is about as high as reward/best_of_group was at its highest (at most a quarter of the "
    "first steps' reward/std below it), or if the held-out score has risen to its best, beyond "
    "both 95 % intervals. A low entropy is no problem then.",
    "kl_sampler_trainer": "The log-probabilities of the sampler and of the trainer differ by at "
    "least 0.05 nats a token, mean of the last five steps. Kernels in bfloat16 alone differ by "
    "about 0.001.",
    "diverging": "The median gradient norm of the last five steps is at least ten times the median "
    "of up to 45 steps before. A single spike does not count.",
    "overfitting": "The 95 % interval of the last evaluation is below that of the best one, while "
    "the training reward is higher than it was then.",
    "trainer_idle": "The trainer waits for rollouts for more than half of the last five steps.",
    "stages_slow": "The trainer waits for rollouts for more than half of the last five steps, and "
    "the replicas have no request for at least 80 % of them. So neither of them is the bottleneck.",
    "replicas_idle": "The replicas have no request for at least 80 % of the last five steps, while "
    "the trainer has rollouts to train on.",
    "staleness_pinned": "The mean staleness is at least 90 % of asynchrony.max_staleness while the "
    "trainer works at least 80 % of the time: rollouts wait for the trainer, and generation waits "
    "at the gate until a step ends.",
    "memory_bound": "In the engine of a replica at least as many requests wait as run, half of its "
    "memory for keys and values or of the places of rollout.max_running is used, means of the last "
    "five steps, and the trainer waits too.",
    "wasted_drafts": "An engine accepts fewer than 10 % of the tokens that it drafts. The torch "
    "engine stops drafting by itself then, and is not reported.",
    "straggler": "One of several actors of a kind works at least 70 % of the time and at least "
    "twice as much as the mean of the others, over the last five steps.",
}

# Kinds that cost speed and leave what is learned as it is.
SPEED = {
    "trainer_idle",
    "stages_slow",
    "replicas_idle",
    "staleness_pinned",
    "memory_bound",
    "wasted_drafts",
    "straggler",
}

PAGE = "docs/report.md"


def anchor(kind: str) -> str:
    """Return the place in the documentation that explains a kind of finding."""
    return f"{PAGE}#{TITLES[kind].lower().replace(' ', '-')}"

